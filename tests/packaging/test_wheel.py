"""The wheel that `make wheel` has built: into an empty virtual environment, in an empty folder, without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from bench.processes import ServerProcess, free_port
from tests.front.certificates import Authority
from tests.packaging.served import check_response, write_repository

ROOT = Path(__file__).resolve().parents[2]
WHEELS = sorted((ROOT / "dist").glob("inferd-*manylinux*.whl"))
SDISTS = sorted((ROOT / "dist").glob("inferd-*.tar.gz"))

HIDING = """
import sys

class Hiding:
    def find_spec(self, name, path=None, target=None):
        if name == {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hiding())
from inferd.server.cli import main
sys.exit(main(sys.argv[1:]))
"""

pytestmark = pytest.mark.skipif(not WHEELS, reason="there is no wheel in dist/: make wheel")


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """A virtual environment with the wheel and ONNX Runtime."""
    folder = tmp_path_factory.mktemp("wheel") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    command = [folder / "bin" / "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", WHEELS[-1], "onnxruntime"]
    subprocess.run(command, check=True)
    return folder


def test_it_serves_where_nothing_of_the_tree_is(environment, tmp_path) -> None:
    repository = write_repository(tmp_path / "models")
    bare = {"PATH": str(environment / "bin"), "HOME": str(tmp_path)}
    port = free_port()
    command = [environment / "bin" / "inferd", "serve", "--model-repository", repository, "--grpc-port", str(port)]
    here = Path.cwd()
    os.chdir(tmp_path)
    try:
        server = ServerProcess(command, port, log=tmp_path / "log", env=bare, patience=60)
    finally:
        os.chdir(here)
    try:
        health = [environment / "bin" / "inferd", "health", "--url", server.address, "--service", "twice"]
        assert subprocess.run(health, capture_output=True, text=True, env=bare).returncode == 0
        check_response(server.address)
        check_response(server.address, "own")
    finally:
        assert server.stop() == 0


def test_it_serves_with_tls(environment, tmp_path) -> None:
    """By the OpenSSL that it brings, to clients with others: grpcio has its own, inferd_client takes Python's."""
    repository = write_repository(tmp_path / "models")
    authority = Authority(tmp_path / "certificates")
    pair = authority.issue("localhost", "DNS:localhost")
    port = free_port()
    command = [environment / "bin" / "inferd", "serve", "--model-repository", repository, "--grpc-port", str(port)]
    command += ["--grpc-use-ssl", "--grpc-server-cert", pair.certificate, "--grpc-server-key", pair.key]
    bare = {"PATH": str(environment / "bin"), "HOME": str(tmp_path)}
    server = ServerProcess(command, port, log=tmp_path / "log", env=bare, patience=60)
    try:
        check_response(f"localhost:{port}", ssl=True, root_certificates=str(authority.root))
        call = [environment / "bin" / "inferd", "infer", "twice", "--random"]
        call += ["--url", f"localhost:{port}", "--root-cert", authority.root]
        called = subprocess.run(call, capture_output=True, text=True, env=bare, cwd=tmp_path)
        assert called.returncode == 0, called.stderr
    finally:
        assert server.stop() == 0


def test_tritonclient_may_be_installed_after_it(tmp_path) -> None:
    """With the newest packages that both allow: what pip changes for the client leaves the server able to start."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    pip = [tmp_path / "venv" / "bin" / "pip", "install", "--quiet"]
    subprocess.run([*pip, WHEELS[-1]], check=True)
    subprocess.run([*pip, "tritonclient[grpc]"], check=True)
    subprocess.run([pip[0], "check"], check=True)
    code = "import inferd.server.app, inferd.server.front.grpcio, tritonclient.grpc"
    subprocess.run([tmp_path / "venv" / "bin" / "python", "-c", code], check=True, cwd="/")


def test_it_brings_its_libraries(environment) -> None:
    """libnghttp2 and OpenSSL come out of the wheel, not from the system."""
    code = "import inferd._native.transport.io_thread; print(open('/proc/self/maps').read())"
    command = [environment / "bin" / "python", "-c", code]
    maps = subprocess.run(command, check=True, capture_output=True, text=True, cwd="/").stdout
    libraries = {Path(line.split()[-1]) for line in maps.splitlines() if "inferd.libs" in line}
    assert {path.name.partition("-")[0] for path in libraries} == {"libcrypto", "libnghttp2", "libssl"}
    assert all(environment in path.parents for path in libraries)
    assert not [line for line in maps.splitlines() if "/libssl.so" in line or "/libnghttp2.so" in line]


def test_other_names_are_left_to_users() -> None:
    """All that is installed begins with `inferd`: a user's `server` or `backends` is the user's."""
    with zipfile.ZipFile(WHEELS[-1]) as archive:
        assert {name for name in archive.namelist() if not name.startswith("inferd")} == set()


def test_the_licences_of_what_it_contains_are_in_it(environment) -> None:
    for name in ("LICENSE", "THIRD_PARTY_LICENSES.md"):
        assert len(list(environment.rglob(f"inferd-*.dist-info/**/{name}"))) == 1


def test_it_says_nothing_of_other_sources(environment, tmp_path) -> None:
    """A wheel has no sources of extensions, whose state it could compare with that of the build."""
    bare = {"PATH": str(environment / "bin"), "HOME": str(tmp_path)}
    command = [environment / "bin" / "inferd", "--version"]
    told = subprocess.run(command, check=True, capture_output=True, text=True, env=bare, cwd=tmp_path)
    assert "warning" not in told.stdout + told.stderr
    packages = [environment.rglob(f"site-packages/{name}/**/*") for name in ("inferd", "inferd_client")]
    assert not [path for found in packages for path in found if path.suffix in (".pyx", ".pxi", ".c", ".h")]


@pytest.mark.parametrize("missing", ["uvloop", "numpy", "grpc", "google.protobuf", "cyclopts"])
def test_a_missing_dependency_is_named(environment, tmp_path, missing) -> None:
    """`serve` names the module that is not there, and nothing else."""
    program = HIDING.format(missing=missing)
    command = [environment / "bin" / "python", "-c", program, "serve", "--model-repository", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert missing in done.stderr
    assert "built from other sources" not in done.stderr


def test_the_source_distribution_has_all_sources(tmp_path) -> None:
    assert SDISTS, "there is no sdist in dist/: make wheel"
    names = subprocess.run(["tar", "tzf", SDISTS[-1]], check=True, capture_output=True, text=True).stdout
    packed = {name.partition("/")[2] for name in names.splitlines()}
    tracked = subprocess.run(
        ["git", "ls-files", "_native", "backends", "inferd", "inferd_client", "server"],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
    ).stdout.split()
    expected = {name if name.startswith("inferd") else f"inferd/{name}" for name in tracked}
    assert expected - packed == {f"inferd/{name}" for name in ("_native", "backends", "server")}  # links in the tree
    assert not [name for name in packed - expected if name.endswith((".so", ".c"))]
