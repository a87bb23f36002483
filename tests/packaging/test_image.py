"""The image of `make image`, run without a container engine: chroot, uid 1000, nothing writable but /tmp.

`make image` names the image; an image that somebody built some other day says nothing about this tree.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from bench.processes import ServerProcess, free_port
from tests.front.certificates import Authority
from tests.observe.collector import http_collector
from tests.packaging.served import check_response, write_repository
from tests.storage.stores import azure, azurite, s3

IMAGE = os.environ.get("INFERD_IMAGE", "")

pytestmark = pytest.mark.skipif(
    not IMAGE or shutil.which("buildah") is None or os.geteuid() != 0,
    reason="root, buildah and an image of this tree are needed: make image",
)

ENTER = """
set -e
mount --bind "$1" "$1"
mount --bind "$2" "$1/models"
mount -o remount,ro,bind "$1"
mount -t tmpfs tmpfs "$1/tmp"
mount --rbind /dev "$1/dev"
mount -t proc proc "$1/proc"
root=$1
shift 2
exec chroot --userspec=1000:1000 "$root" /usr/bin/env -i "$@"
"""


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def within(root: Path, models: Path, configuration: dict, **environment: str) -> list[str]:
    """What a command begins with that is run in the image, in its environment and in this one."""
    enter = ["unshare", "--mount", "--propagation", "private", "sh", "-c", ENTER, "sh", str(root), str(models)]
    return [*enter, *configuration["Env"], *(f"{name}={value}" for name, value in environment.items())]


@pytest.fixture(scope="module")
def root():
    """The folder with the image's files."""
    container = output("buildah", "from", IMAGE)
    yield Path(output("buildah", "mount", container))
    output("buildah", "rm", container)


@pytest.fixture(scope="module")
def configuration() -> dict:
    return json.loads(output("buildah", "inspect", "--type", "image", IMAGE))["Docker"]["config"]


@pytest.mark.parametrize("arguments", [(), ("tritonserver", "--model-store=/models", "--allow-http=true")])
def test_it_serves_and_drains(root, configuration, tmp_path, arguments) -> None:
    repository = write_repository(tmp_path / "models")
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(0o755)
    port = free_port()
    inside = within(root, repository, configuration, INFERD_GRPC_PORT=str(port))
    server = ServerProcess([*inside, *configuration["Entrypoint"], *arguments], port, log=tmp_path / "log", patience=60)
    try:
        assert server.processes()[0].uids().real == 1000
        check_response(server.address)
        subprocess.run([*inside, *configuration["Healthcheck"]["Test"][1:]], check=True)
    finally:
        assert server.stop() == 0


def test_it_serves_with_tls_and_its_health_check_follows(root, configuration, tmp_path) -> None:
    """Variables say that there is TLS, as in a container, and no flag."""
    repository = write_repository(tmp_path / "models")
    authority = Authority(repository / ".tls")  # no model: its name begins with a dot
    authority.issue("localhost", "DNS:localhost")
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(0o755)
    port = free_port()
    tls = {
        "INFERD_GRPC_USE_SSL": "true",
        "INFERD_GRPC_SERVER_CERT": "/models/.tls/localhost.pem",
        "INFERD_GRPC_SERVER_KEY": "/models/.tls/localhost.key",
    }
    inside = within(root, repository, configuration, INFERD_GRPC_PORT=str(port), **tls)
    server = ServerProcess([*inside, *configuration["Entrypoint"]], port, log=tmp_path / "log", patience=60)
    try:
        check_response(f"localhost:{port}", ssl=True, root_certificates=str(authority.root))
        subprocess.run([*inside, *configuration["Healthcheck"]["Test"][1:]], check=True)
        plain = within(root, repository, configuration, INFERD_GRPC_PORT=str(port))
        assert subprocess.run([*plain, *configuration["Healthcheck"]["Test"][1:]], check=False).returncode == 1
    finally:
        assert server.stop() == 0


@pytest.mark.parametrize("store", [s3, azure])
def test_models_come_from_a_store_and_traces_go_to_a_collector(root, configuration, tmp_path, store) -> None:
    """The image has everything that is needed for both."""
    if store is azure and azurite() is None:
        pytest.skip("not installed: azurite")
    written = write_repository(tmp_path / "models")
    (tmp_path / "empty").mkdir()
    port = free_port()
    with store() as cloud, http_collector() as collector:
        for path in filter(Path.is_file, written.rglob("*")):
            cloud.put(str(path.relative_to(written)), path.read_bytes())
        traced = ("level=TIMESTAMPS", "rate=1", "mode=opentelemetry", f"opentelemetry,url={collector.url}")
        inside = within(root, tmp_path / "empty", configuration, INFERD_GRPC_PORT=str(port), **cloud.environment)
        command = [*inside, *configuration["Entrypoint"], "--model-repository", cloud.url]
        command += [f"--trace-config={each}" for each in (*traced, "opentelemetry,bsp_schedule_delay=10")]
        server = ServerProcess(command, port, log=tmp_path / "log", patience=60)
        try:
            check_response(server.address)
            collector.wait(lambda spans: any(span.name == "twice" for span in spans))
        finally:
            assert server.stop() == 0


def test_what_it_says_of_itself(configuration) -> None:
    assert configuration["User"] == "1000:1000"
    assert configuration["Healthcheck"]["Test"] == ["CMD", "inferd", "health"]
    assert configuration["Labels"]["org.opencontainers.image.title"] == "inferd"


def test_it_is_small(root) -> None:
    """At most 420 MB, unpacked."""
    assert int(output("du", "-sxb", str(root)).split()[0]) <= 420e6


def test_it_lists_what_is_in_it(root) -> None:
    listed = json.loads((root / "opt/inferd/sbom.cdx.json").read_text())
    names = {component["name"] for component in listed["components"]}
    assert {"inferd", "grpcio", "numpy", "obstore", "onnxruntime", "opentelemetry-sdk"} <= names
    assert {"libc6", "libnghttp2-14", "tini"} <= names
