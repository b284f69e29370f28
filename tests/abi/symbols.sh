#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The library exports exactly what the header declares, all of it under the version node CKPT_0.1,
# and needs no more than it should at run time.
library=$1 header=$2 map=$3
command -v readelf >/dev/null || exit 77
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT

tr '\n' ' ' <"$header" | sed 's/CKPT_PUBLIC/\n&/g' | sed -n 's/^CKPT_PUBLIC [^(]*[ *]\(ckpt_[a-z_]*\)(.*/\1/p' |
    sort >"$work/declared"
sed -n 's/^ *\(ckpt_[a-z_]*\);.*/\1/p' "$map" | sort >"$work/mapped"
nm -D --defined-only "$library" | awk '$2 != "A" { print $3 }' | sort >"$work/exported"
sed 's/$/@@CKPT_0.1/' "$work/declared" >"$work/versioned"

status=0
diff "$work/declared" "$work/mapped" || { echo "libckpt.map differs from ckpt.h"; status=1; }
diff "$work/versioned" "$work/exported" || { echo "the exported symbols differ from ckpt.h"; status=1; }
[ -s "$work/declared" ] || { echo "no declarations were found"; status=1; }

readelf -d "$library" >"$work/dynamic"
grep -q 'SONAME.*\[libckpt\.so\.0\]' "$work/dynamic" || { echo "the soname is not libckpt.so.0"; status=1; }
for needed in $(sed -n 's/.*NEEDED.*\[\(.*\)\]/\1/p' "$work/dynamic"); do
    case $needed in
    libjansson.so.*|libxxhash.so.*|libc.so.*|libpthread.so.*|ld-linux*|libgcc_s.so.*) ;;
    libasan.so.*|libubsan.so.*|libtsan.so.*) ;; # a build with sanitizers
    *) echo "the library needs $needed"; status=1 ;;
    esac
done
exit $status
