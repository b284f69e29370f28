#!/usr/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# run.sh: everything that only a real GPU can show, in one command: builds, runs the functional tests of device memory,
# asks what could not be known without a device (gpu-probe), and measures. It needs a compiler, meson and ninja; the
# libraries are the system's, or those that gather.sh put into tests/gpu/carry. PyTorch with CUDA, if it is there, adds the
# Python tests and what a matrix-product loop loses while the daemon copies.
#
#     tests/gpu/run.sh [MIB]       device memory for each measurement (1024)
#     tests/gpu/run.sh --probe [MIB]   only what gpu-probe asks and measures, without the tests
#     GPU_DRIVER=DIR               where libcuda.so.1 is looked for first (the tests' stand-in)
#     GPU_BUILD=DIR                a build that is there, instead of one of its own
#
# Exits with 0 if all tests passed; 77 without a device.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/../.."
only_probe=
if [[ ${1-} == --probe ]]; then only_probe=yes && shift; fi
mib=${1:-1024}
if [[ $# -gt 1 || ! $mib =~ ^[1-9][0-9]*$ ]]; then
    echo 'usage: tests/gpu/run.sh [--probe] [MIB]' >&2
    exit 2
fi
carry=$PWD/tests/gpu/carry
libraries=${GPU_DRIVER:-}

say() { printf '== %s\n' "$*"; }

if [[ -d $carry ]]; then
    lib=$carry/usr/lib/x86_64-linux-gnu
    export PKG_CONFIG_SYSROOT_DIR=$carry PKG_CONFIG_LIBDIR=$lib/pkgconfig CPATH=$carry/usr/include LIBRARY_PATH=$lib
    libraries=${libraries:+$libraries:}$lib
fi
export LD_LIBRARY_PATH=${libraries:+$libraries:}${LD_LIBRARY_PATH:-}

build=${GPU_BUILD:-}
if [[ -z $build ]]; then
    build=$PWD/build-gpu
    say 'building'
    [[ -f $build/build.ninja ]] || meson setup "$build" --buildtype release -Dwerror=false -Dman=disabled -Dsystemd=disabled >/dev/null
    ninja -C "$build" >"$build/gpu.log" 2>&1 || {
        tail -n 40 "$build/gpu.log"
        exit 1
    }
fi
LD_LIBRARY_PATH=$LD_LIBRARY_PATH:$build/client
export CKPTD=$build/daemon/ckptd CKPTCTL=$build/tools/ckptctl FUNCTIONAL_TESTS=$PWD/tests/functional

scratch=$(mktemp -d "${TMPDIR:-/tmp}/ckptd-gpu.XXXXXX")
daemon=
end() {
    [[ -z $daemon ]] || kill "$daemon" 2>/dev/null || true
    wait || true
    rm -rf "$scratch"
}
trap end EXIT
if [[ -n ${GPU_DRIVER:-} ]]; then # the stand-in wants a directory that its processes share
    mkdir "$scratch/cuda"
    export CUDA_STANDIN_DIR=$scratch/cuda
fi

failed=0
for program in "$build"/tests/functional/functional-{device,gpu-client}; do
    [[ -z $only_probe ]] || break
    say "${program##*/}"
    for loop in uring posix; do
        code=0
        env -u CUDA_STANDIN_DIR CKPTD_LOOP=$loop "$program" || code=$?
        ((code == 0 || code == 77)) || failed=1
    done
done

say 'what the driver answers, and how fast'
cat >"$scratch/ckptd.conf" <<CONF
[pool]
size = $((mib * 3))M
[tier local]
role = local
path = $scratch/local
CONF
"$CKPTD" --config "$scratch/ckptd.conf" --socket "$scratch/sock" 2>"$scratch/log" &
daemon=$!
export CKPT_SOCKET=$scratch/sock
code=0
"$build/tests/gpu/gpu-probe" "$mib" || code=$?
if ((code == 77)); then exit 77; fi
((code == 0)) || { failed=1 && tail -n 20 "$scratch/log"; }

if [[ -n $only_probe ]]; then
    :
elif python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    say 'a matrix-product loop beside the daemon'
    CKPT_LIBRARY=$build/client/libckpt.so.0 PYTHONPATH=client/python python3 tests/gpu/slow_down.py "$mib" || failed=1
else
    say 'no PyTorch with a CUDA device here: the matrix-product loop was not run'
fi
kill "$daemon" && wait "$daemon" || failed=1
daemon=
((failed == 0)) && say passed || say FAILED
exit $failed
