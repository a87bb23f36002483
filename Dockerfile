# syntax=docker/dockerfile:1
# Images of inferd. Targets:
#
#   cpu         ONNX Runtime, Python models, object stores, OpenTelemetry (the default target is the last stage: name one)
#   cpu-full    the same and PyTorch for CPUs
#   gpu         the framework builds for GPUs that FRAMEWORKS names; CUDA's libraries come with their wheels
#
#   docker build --target cpu -t inferd:cpu .
#   docker run -v $PWD/models:/models:ro -p 8001:8001 inferd:cpu
#
# PACKAGES names more for the environment, for pip: --build-arg PACKAGES="inferd[hf] transformers".
#
# The server runs as uid 1000, needs no shell and no writable root. With `args: [tritonserver, --model-store=...]`, as
# KServe's stock runtime has them, it starts unchanged.

ARG BASE=debian:bookworm-slim

# ---- what is compiled -----------------------------------------------------------------------------------------------
# hadolint ignore=DL3006
FROM ${BASE} AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends \
        build-essential libnghttp2-dev libssl-dev libxxhash-dev pkg-config python3-dev python3-venv zlib1g-dev \
    && apt-get clean && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /source
COPY pyproject.toml setup.py constraints.txt README.md LICENSE THIRD_PARTY_LICENSES.md ./
RUN python3 -m venv /build && /build/bin/pip install setuptools wheel Cython -c constraints.txt \
    && python3 -m venv /sbom && /sbom/bin/pip install cyclonedx-bom==7.5.0
COPY inferd inferd
COPY _native _native
COPY backends backends
COPY inferd_client inferd_client
COPY server server
ARG REVISION=unknown
RUN INFERD_COMMIT="${REVISION}" /build/bin/pip wheel --no-build-isolation --no-deps -w /wheel .

# ---- what runs ------------------------------------------------------------------------------------------------------
# libnghttp2 and OpenSSL (Python's) are the distribution's, so that their security updates reach the image. Object stores and collectors are reached
# over TLS, and their clients do not start without certificates.
# hadolint ignore=DL3006
FROM ${BASE} AS runtime
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="inferd" \
      org.opencontainers.image.description="gRPC inference server for Triton model repositories" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends \
        ca-certificates libnghttp2-14 python3 tini \
    && apt-get clean && rm -rf /var/lib/apt/lists/* /var/cache/debconf /var/log/* \
    && mkdir /models \
    && echo 'inferd:x:1000:1000:inferd:/tmp:/usr/sbin/nologin' >> /etc/passwd \
    && echo 'inferd:x:1000:' >> /etc/group
ENV PATH=/opt/inferd/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    INFERD_GRPC_ADDRESS=0.0.0.0 \
    INFERD_METRICS_ADDRESS=0.0.0.0 \
    INFERD_MODEL_REPOSITORY=/models
USER 1000:1000
EXPOSE 8001 8002
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=120s CMD ["inferd", "health"]
# tini is process 1: it reaps what the processes of models leave behind.
ENTRYPOINT ["/usr/bin/tini", "--", "inferd", "serve"]

# ---- one virtual environment for each target ------------------------------------------------------------------------
# uvloop and ml_dtypes come with the symbols of their compilers, 35 MB.
FROM build AS core
RUN python3 -m venv --without-pip /opt/inferd \
    && /build/bin/pip --python /opt/inferd/bin/python install -c constraints.txt "$(echo /wheel/*.whl)" \
    && find /opt/inferd/lib/python3*/site-packages/inferd /opt/inferd/lib/python3*/site-packages/inferd_client \
        /opt/inferd/lib/python3*/site-packages/uvloop -name '*.so' -exec strip --strip-unneeded {} + \
    && find /opt/inferd \( -name tests -o -name '*.pyx' -o -name '*.pxd' -o -name '*.a' \) -prune -exec rm -rf {} + \
    && ln -s inferd /opt/inferd/bin/tritonserver
ENV PATH=/opt/inferd/bin:/sbom/bin:$PATH
# What the list of contents is made with: the packages of the base, and a script.
COPY --from=runtime /var/lib/dpkg/status /runtime/dpkg/status
COPY tools/sbom.py tools/sbom.py

FROM core AS core-onnx
ARG PACKAGES=""
# hadolint ignore=SC2086
RUN /build/bin/pip --python /opt/inferd/bin/python install -c constraints.txt \
        "inferd[bf16,cloud,otel,redis]" onnxruntime ${PACKAGES} \
    && strip --strip-unneeded /opt/inferd/lib/python3*/site-packages/ml_dtypes/*.so \
    && python3 tools/sbom.py /opt/inferd/sbom.cdx.json /opt/inferd/bin/python /runtime/dpkg

# An index that has the CPU build of torch; empty: the index of pip, whose plain build brings gigabytes of CUDA.
FROM core-onnx AS core-full
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN version="$(sed -n 's/^torch==//p' constraints.txt)" \
    && /build/bin/pip --python /opt/inferd/bin/python install "torch==${version}+cpu" -c constraints.txt \
        ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
    && python3 tools/sbom.py /opt/inferd/sbom.cdx.json /opt/inferd/bin/python /runtime/dpkg

FROM core AS core-gpu
ARG FRAMEWORKS="onnxruntime-gpu"
ARG PACKAGES=""
# hadolint ignore=DL3013,SC2086
RUN /build/bin/pip --python /opt/inferd/bin/python install \
        "inferd[bf16,cloud,gpu,otel,redis]" ${FRAMEWORKS} ${PACKAGES} \
    && strip --strip-unneeded /opt/inferd/lib/python3*/site-packages/ml_dtypes/*.so \
    && python3 tools/sbom.py /opt/inferd/sbom.cdx.json /opt/inferd/bin/python /runtime/dpkg

# ---- the images -----------------------------------------------------------------------------------------------------
FROM runtime AS gpu
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=core-gpu /opt/inferd /opt/inferd

FROM runtime AS cpu-full
COPY --from=core-full /opt/inferd /opt/inferd

FROM runtime AS cpu
COPY --from=core-onnx /opt/inferd /opt/inferd
