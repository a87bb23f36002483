"""The example programs that share memory with the server do what their page says."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.shared import serving

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "shared_memory"
SAID = re.compile(r"65536 bytes there and back: \d+ us in shared memory, \d+ us on the wire\n")


def run(*command):
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("example")
    made = run(sys.executable, EXAMPLE / "make_repository.py", folder / "models")
    assert made.returncode == 0, made.stderr
    with serving("native", folder / "models", folder) as server:
        yield server
        assert "inferd-example" not in Path(f"/proc/{server.process.pid}/maps").read_text(), "a region is left"
    assert not list(Path("/dev/shm").glob("inferd-example-*"))


def test_the_client_in_python(server):
    done = run(sys.executable, EXAMPLE / "client.py", server.unix, "--size", 65536, "--count", 3)
    assert SAID.fullmatch(done.stdout), done.stderr


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_the_client_in_c(server, tmp_path):
    program = tmp_path / "client"
    built = run("cc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", program, EXAMPLE / "client.c", "-lnghttp2")
    assert built.returncode == 0, built.stderr
    done = run(program, server.unix.removeprefix("unix:"), 65536, 3)
    assert SAID.fullmatch(done.stdout), done.stderr


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_the_client_in_c_says_what_the_server_refuses(server, tmp_path):
    program = tmp_path / "client"
    run("cc", "-o", program, EXAMPLE / "client.c", "-lnghttp2")
    done = run(program, server.unix.removeprefix("unix:"), 1, 3)
    assert done.stderr == "expected BYTES of 64 or more, and a COUNT of 1 or more\n"
