"""The command `inferd` of an editable install, which `make setup` makes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.processes import ServerProcess, free_port
from tests.packaging.served import check_response, write_own_names

COMMAND = Path(sys.executable).with_name("inferd")


USE = """
from inferd.backends.api import Backend
from inferd_client.grpc import InferenceServerClient

reveal_type(Backend.name)
reveal_type(InferenceServerClient("unix:x").infer("m", []))
"""


def test_type_checkers_find_it(tmp_path, monkeypatch) -> None:
    """Guards the editable install: a type checker imports nothing, so it follows paths, but no hooks of imports."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "use.py").write_text(USE)
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), "use.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    revealed = re.findall(r'Revealed type is "([\w.]+)"', done.stdout)
    assert [each.rpartition(".")[2] for each in revealed] == ["str", "InferResult"], done.stdout


@pytest.mark.skipif(not COMMAND.exists(), reason="there is no command inferd: make setup")
def test_modules_of_a_model_have_names_of_the_source_tree(tmp_path, monkeypatch) -> None:
    """Guards that no folder of the tree is importable but `inferd`: a model's `import server` is the model's module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    repository, port = write_own_names(tmp_path / "models"), free_port()
    command = [COMMAND, "serve", "--model-repository", repository, "--grpc-port", str(port)]
    server = ServerProcess(command, port, log=tmp_path / "log", patience=120)
    try:
        check_response(server.address, "own")
    finally:
        assert server.stop() == 0
