"""The command `inferd` of an editable install, which `make setup` makes."""

import sys
from pathlib import Path

import pytest

from bench.processes import ServerProcess, free_port
from tests.packaging.served import check_answer, write_own_names

COMMAND = Path(sys.executable).with_name("inferd")


@pytest.mark.skipif(not COMMAND.exists(), reason="there is no command inferd: make setup")
def test_modules_of_a_model_have_names_of_the_source_tree(tmp_path, monkeypatch) -> None:
    """Guards that no folder of the tree is importable but `inferd`: a model's `import server` is the model's module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    repository, port = write_own_names(tmp_path / "models"), free_port()
    command = [COMMAND, "serve", "--model-repository", repository, "--grpc-port", str(port)]
    server = ServerProcess(command, port, log=tmp_path / "log", patience=120)
    try:
        check_answer(server.address, "own")
    finally:
        assert server.stop() == 0
