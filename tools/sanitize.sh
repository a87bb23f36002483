#!/bin/sh
# Run native tests on the debug and sanitizer builds, without touching the build in the checkout.
#
#   tools/sanitize.sh [debug|asan|tsan|all] [pytest arguments]
#   tools/sanitize.sh debug|asan|tsan -m MODULE [its arguments]    runs a program, as -m tests.storms.mixed --instrumented
#
# Default: debug and asan with tests/native tests/engine; tsan with tests of shared state.
#
#   debug   bounds checks of Cython, assertions of our own (NDEBUG is not defined), -O1 -g
#   asan    the same with the address and undefined-behaviour sanitizers of gcc: any report ends the run
#   tsan    the same with the thread sanitizer; races within the interpreter and libraries are ignored
#
# The stub driver is compiled with the same sanitizer.
#
# The sources (tracked files and new ones that git does not ignore) are copied to $INFERD_SANITIZE, by default
# inferd-sanitize under the temporary directory, and built there; a second run builds only what has changed.
# INFERD_ONLY=inferd._native.protobuf.codec,inferd._native.protobuf.wire builds only these modules, for tests that need no others.
#
# Reports are files under $INFERD_SANITIZE/reports-BUILD-..., of all processes: servers, workers, and killed ones. They
# are shown at the end, and are a failure.
#
# Leaks are not checked, because the interpreter never frees its modules' objects. Instead, the tests assert live
# counters of native objects.
set -eu

checkout=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
python=$checkout/.venv/bin/python
copies=${INFERD_SANITIZE:-${TMPDIR:-/tmp}/inferd-sanitize}
unset INFERD_SANITIZE  # servers warn of variables that are no option of theirs

builds="debug asan tsan"
case "${1:-}" in
    debug | asan | tsan) builds=$1 && shift ;;
    all) shift ;;
esac

copy_sources() {
    mkdir -p "$1"
    (cd "$checkout" && git ls-files -z --cached --others --exclude-standard |
        tar --create --null --files-from=- --ignore-failed-read --warning=no-failed-read) | tar --extract --directory "$1"
}

for build in $builds; do
    tree=$copies/$build
    copy_sources "$tree"
    cd "$tree"
    echo "== $build build"
    INFERD_BUILD=$build "$python" setup.py -q build_ext --inplace
    flags=
    reports=$(mktemp -d "$copies/reports-$build-XXXXXX")
    tests="tests/native tests/engine"
    if [ "$build" = tsan ]; then
        tests="tests/native/test_memory.py tests/native/test_resources.py tests/native/test_cuda_device.py
               tests/backends/python/test_batches_of_the_loop.py tests/engine/test_batches.py tests/engine/test_stopping.py"
        flags=-fsanitize=thread
        preload=$(gcc -print-file-name=libtsan.so)
        TSAN_OPTIONS=ignore_noninstrumented_modules=1:exitcode=66:report_signal_unsafe=0:allocator_may_return_null=1:die_after_fork=0
        TSAN_OPTIONS=$TSAN_OPTIONS:log_path=$reports/threads
        export TSAN_OPTIONS
    fi
    if [ "$build" = asan ]; then
        flags=-fsanitize=address,undefined
        # The interpreter itself is not instrumented, so the libraries must be loaded before it starts.
        preload="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so) $copies/undefined_reports.so"
        gcc -shared -fPIC -o "$copies/undefined_reports.so" "$checkout/tools/undefined_reports.c"
        ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=1:allocator_may_return_null=1:log_path=$reports/address
        UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
        UBSAN_REPORTS=$reports/undefined
        PYTHONMALLOC=malloc
        export ASAN_OPTIONS UBSAN_OPTIONS UBSAN_REPORTS PYTHONMALLOC
    fi
    export CFLAGS=$flags
    "$python" -c "from tests import gpu_stub; print(gpu_stub.library())"
    # shellcheck disable=SC2086
    [ $# -gt 0 ] || { defaulted=yes && set -- $tests; }
    status=0
    case $1 in
        -m) LD_PRELOAD=${preload:-} "$python" "$@" || status=$? ;;
        *) LD_PRELOAD=${preload:-} "$python" -m pytest -q -p no:cacheprovider "$@" || status=$? ;;
    esac
    if ! rmdir "$reports" 2>/dev/null; then
        head -n 60 "$reports"/*
        echo "$build: reports in $reports"
        exit 1
    fi
    [ "$status" -eq 0 ] || exit "$status"
    [ -z "${defaulted:-}" ] || { unset defaulted && set --; }
    unset CFLAGS preload
done
