#!/bin/bash
# Build an image of the Dockerfile with docker or buildah.
#
#     tools/image.sh [cpu|cpu-full|gpu]     makes localhost/inferd:TARGET
#
# Variables: BASE (debian:bookworm-slim), or BASE=mmdebstrap to make such a base from Debian's packages, where no registry
# of images can be reached; BUILDER (docker if its daemon answers, else buildah); OPTIONS for the builder, such as
# "--build-arg=FRAMEWORKS=torch" or "--volume=/etc/ssl/certs:/etc/ssl/certs:ro".
set -euo pipefail
cd "$(dirname "$0")/.."

target=${1:-cpu}
base=${BASE:-debian:bookworm-slim}
builder=${BUILDER:-$(docker info >/dev/null 2>&1 && echo docker || echo buildah)}
command -v "$builder" >/dev/null || {
    echo "inferd: neither docker nor buildah is installed: apt-get install buildah" >&2
    exit 1
}

if [ "$base" = mmdebstrap ]; then
    base=localhost/inferd-base:bookworm
    if ! buildah inspect --type image "$base" >/dev/null 2>&1; then
        root=$(mktemp -d)
        trap 'rm -rf "$root"' EXIT
        # Without the files that slim bases omit.
        mmdebstrap --quiet --variant=minbase --dpkgopt='path-exclude=/usr/share/doc/*' \
            --dpkgopt='path-include=/usr/share/doc/*/copyright' --dpkgopt='path-exclude=/usr/share/man/*' \
            --dpkgopt='path-exclude=/usr/share/locale/*' bookworm "$root/base.tar"
        container=$(buildah from scratch)
        buildah add --quiet "$container" "$root/base.tar" / >/dev/null
        buildah config --cmd bash "$container"
        buildah commit --quiet --rm "$container" "$base" >/dev/null
    fi
fi

arguments=(--target "$target" --tag "localhost/inferd:$target" --build-arg "BASE=$base")
arguments+=(--build-arg "REVISION=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)")
# The health check is a part of Docker's format only.
[ "$builder" = buildah ] && arguments+=(--format docker --isolation chroot --layers)
# shellcheck disable=SC2086
"$builder" build "${arguments[@]}" ${OPTIONS:-} .
