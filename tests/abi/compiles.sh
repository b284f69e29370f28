#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The compiler command line given compiles its file, and without a word.
out=$("$@" -c -o /dev/null 2>&1)
status=$?
[ -z "$out" ] || { echo "$out"; exit 1; }
exit $status
