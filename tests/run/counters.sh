#!/usr/bin/bash
# SPDX-License-Identifier: Apache-2.0
# counters.sh PROGRAM...: runs it with a directory of its own below $COUNTERS for what it writes about its coverage.
export GCOV_PREFIX=$COUNTERS/$$
exec "$@"
