#!/bin/bash
# Installs the system packages that the build needs, as root on Debian or Ubuntu; for other users it prints a sentence
# for each missing one.
#
#     tools/system_packages.sh PYTHON
set -euo pipefail

python=$1
declare -A missing=()  # apt package -> the sentence for users who cannot install it

python_can() { "$python" -c "$1" >/dev/null 2>&1; }

look() {
    missing=()
    command -v cc >/dev/null ||
        missing[build-essential]="a C compiler (cc) is needed to build the extensions: apt-get install build-essential"
    command -v pkg-config >/dev/null ||
        missing[pkg-config]="pkg-config is needed to find libnghttp2 and OpenSSL: apt-get install pkg-config"
    if ! command -v pkg-config >/dev/null || ! pkg-config --exists 'libnghttp2 >= 1.43'; then
        missing[libnghttp2-dev]="libnghttp2 1.43 or newer with its headers is needed: apt-get install libnghttp2-dev"
    fi
    if ! command -v pkg-config >/dev/null || ! pkg-config --exists 'openssl >= 3.0'; then
        missing[libssl-dev]="OpenSSL 3.0 or newer with its headers is needed: apt-get install libssl-dev"
    fi
    printf '#include <zlib.h>\n' | cc -E - >/dev/null 2>&1 ||
        missing[zlib1g-dev]="zlib with its headers is needed: apt-get install zlib1g-dev"
    printf '#define XXH_INLINE_ALL\n#include <xxhash.h>\n' | cc -E - >/dev/null 2>&1 ||
        missing[libxxhash-dev]="xxHash's header is needed: apt-get install libxxhash-dev"
    if ! command -v "$python" >/dev/null; then
        missing[python3]="Python 3.11 or newer is needed as '$python': apt-get install python3, or make PYTHON=/path/to/python3"
        missing[python3-venv]="the venv module of Python is needed: apt-get install python3-venv"
        missing[python3-dev]="the headers of Python are needed: apt-get install python3-dev"
        return
    fi
    python_can 'import ensurepip, venv' ||
        missing[python3-venv]="the venv module of $python is needed: apt-get install python3-venv"
    python_can 'import pathlib, sysconfig; assert (pathlib.Path(sysconfig.get_path("include")) / "Python.h").exists()' ||
        missing[python3-dev]="the headers of $python are needed: apt-get install python3-dev"
}

look
if ((${#missing[@]})) && [[ $EUID -eq 0 ]] && command -v apt-get >/dev/null; then
    echo "installing ${!missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get -qq update && apt-get -qq install -y --no-install-recommends "${!missing[@]}" ||
        echo "apt-get failed" >&2
    look
fi
# Tests of the response cache start Redis servers of their own; without one they are skipped. Where systemd runs, the
# package would also start a server for the whole machine.
if ! command -v redis-server >/dev/null && [[ $EUID -eq 0 && ! -d /run/systemd/system ]] &&
    command -v apt-get >/dev/null; then
    { DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends redis-server ||
        { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends redis-server; }
    } >/dev/null 2>&1 || echo "there is no redis-server: the tests that need one will be skipped" >&2
fi
for package in "${!missing[@]}"; do
    echo "inferd: ${missing[$package]}" >&2
done
((${#missing[@]} == 0)) || exit 1

python_can 'import sys; assert sys.version_info >= (3, 11)' || {
    echo "inferd: Python 3.11 or newer is needed, $python is $("$python" -V): make PYTHON=/path/to/python3" >&2
    exit 1
}
