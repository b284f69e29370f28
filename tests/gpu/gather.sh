#!/usr/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# gather.sh: fetches what a machine with a GPU but without a network may lack to build ckptd: the headers and
# libraries of Debian 12 that README.md names, unpacked below tests/gpu/carry (about 2 MB). Run it where apt-get works,
# take the tree there, and run tests/gpu/run.sh.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")"

packages=(liburing-dev liburing2 libxxhash-dev libxxhash0 libjansson-dev libjansson4 libinih-dev libinih1 uthash-dev
    liblz4-dev liblz4-1 libcmocka-dev libcmocka0)

rm -rf carry
mkdir carry
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
(cd "$scratch" && apt-get -qq download "${packages[@]}")
for package in "$scratch"/*.deb; do dpkg-deb -x "$package" carry; done
rm -rf carry/usr/share carry/usr/lib/*/*.a
echo "gathered ${#packages[@]} packages in $PWD/carry"
