#!/bin/sh
# Run native tests on the debug and sanitizer builds, without touching the build in the checkout.
#
#   tools/sanitize.sh [debug|asan|all] [pytest arguments]        default: all, tests/native tests/engine
#
#   debug   bounds checks of Cython, assertions of our own (NDEBUG is not defined), -O1 -g
#   asan    the same with the address and undefined-behaviour sanitizers of gcc: any report ends the run
#
# The sources (tracked files and new ones that git does not ignore) are copied to $INFERD_SANITIZE, by default
# inferd-sanitize under the temporary directory, and built there; a second run builds only what has changed.
# INFERD_ONLY=_native.codec,_native.wire builds only these modules, for tests that need no others.
#
# Leaks are not looked for: the interpreter never frees what its modules made. Live counters of native objects, which
# the tests assert, do that job.
set -eu

checkout=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
python=$checkout/.venv/bin/python
copies=${INFERD_SANITIZE:-${TMPDIR:-/tmp}/inferd-sanitize}

builds="debug asan"
case "${1:-}" in
    debug | asan) builds=$1 && shift ;;
    all) shift ;;
esac
[ $# -gt 0 ] || set -- tests/native tests/engine

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
    if [ "$build" = asan ]; then
        # The interpreter itself is not instrumented, so the libraries have to be there before it starts.
        LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)"
        ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=1
        UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
        PYTHONMALLOC=malloc
        export LD_PRELOAD ASAN_OPTIONS UBSAN_OPTIONS PYTHONMALLOC
    fi
    # Sanitizers write to the descriptor of standard error and end the process: pytest must not capture that.
    "$python" -m pytest -q -p no:cacheprovider --capture=sys "$@"
done
