#!/bin/bash
# Installs the programs of tests/clients and tests/proxy: compilers, gRPC libraries of other languages, tools, proxies.
# As root on Debian it installs missing packages; for other users it prints their names. Packages of npm and PyPI go to
# the tests' cache folder (INFERD_CACHE, or ~/.cache/inferd-tests), where the client programs are built, too.
#
#     tools/client_packages.sh PYTHON    a Python that can import the tests, such as .venv/bin/python
set -euo pipefail

python=$1
cd "$(dirname "$0")/.."

packages=(
    curl nghttp2-client                                                       # curl, h2load
    nodejs npm                                                                # grpc-js, nice-grpc, buf
    g++ pkg-config libgrpc++-dev protobuf-compiler protobuf-compiler-grpc     # C++; protoc and plugins, Ruby's too
    golang-go golang-google-grpc-dev golang-goprotobuf-dev                    # Go, without modules
    default-jdk-headless libgrpc-java libnetty-java libprotobuf-java libperfmark-java libgeronimo-annotation-1.3-spec-java
    libslf4j-java protobuf-compiler-grpc-java-plugin                          # Java, without Maven
    ruby ruby-grpc                                                            # Ruby
    nginx-light haproxy                                                       # Envoy comes from PyPI
)

missing=()
for package in "${packages[@]}"; do
    [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
done
# node is often there without Debian's packages
if command -v node >/dev/null && command -v npm >/dev/null; then
    missing=($(printf '%s\n' ${missing[@]+"${missing[@]}"} | grep -v -x -e nodejs -e npm || true))
fi

if ((${#missing[@]})); then
    if [[ $EUID -eq 0 ]] && command -v apt-get >/dev/null; then
        echo "installing ${missing[*]}"
        export DEBIAN_FRONTEND=noninteractive
        # packages of servers would start them: the tests start their own
        policy=/usr/sbin/policy-rc.d
        if [[ ! -e $policy ]]; then
            printf '#!/bin/sh\nexit 101\n' >$policy
            chmod +x $policy
            trap 'rm -f $policy' EXIT
        fi
        apt-get -qq update
        # one by one if all together fail: a package that this release lacks must not keep the others from being
        # installed
        apt-get -qq install -y --no-install-recommends "${missing[@]}" ||
            for package in "${missing[@]}"; do
                apt-get -qq install -y --no-install-recommends "$package" || echo "inferd: no package $package" >&2
            done
    else
        echo "inferd: not installed, their tests are skipped: apt-get install ${missing[*]}" >&2
    fi
fi

"$python" -m tests.clients.toolchains
