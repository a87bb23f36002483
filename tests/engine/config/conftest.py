"""A model folder to write configurations into, and the pipeline around it without any framework."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from inferd.backends.api import Backend, Model, ModelSource, Signature
from inferd.server.engine.config import Options, Prepared, prepare
from inferd.server.engine.repository.folders import ModelFolder, versions_of


class FakeBackend(Backend):
    """Says of every model what it was told to say."""

    name = "fake"

    def __init__(self, signature: Signature | None = None) -> None:
        self.signature = signature
        self.inspected: list[ModelSource] = []

    def inspect(self, source: ModelSource) -> Signature | None:
        self.inspected.append(source)
        return self.signature

    def load(self, source: ModelSource) -> Model:
        raise AssertionError("a configuration is prepared without loading")


class FakeLoader:
    """Has one backend under any name."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def backend(self, name: str) -> Backend:
        return self._backend

    def backend_of_model(self, name: str, folders: Sequence[Path]) -> Backend:
        return self._backend


@pytest.fixture
def fake_backend() -> type[FakeBackend]:
    return FakeBackend


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """The folder of a model `m` with version 1."""
    path = tmp_path / "m"
    (path / "1").mkdir(parents=True)
    return path


@pytest.fixture
def prepared(model_dir: Path) -> Callable[..., Prepared]:
    """Prepare `m` with this configuration; `signature` is what its model file says."""

    def run(
        text: str | None,
        signature: Signature | None = None,
        options: Options | None = None,
        backend: Backend | None = None,
    ) -> Prepared:
        if text is not None:
            (model_dir / "config.pbtxt").write_text(text)
        folder = ModelFolder("m", model_dir, model_dir.parent, versions_of(model_dir))
        return prepare(folder, options or Options(), FakeLoader(backend or FakeBackend(signature)))

    return run


IO = """
input { name: "x" data_type: TYPE_FP32 dims: [ 3 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
"""
"""One input and one output, for configurations about something else."""


@pytest.fixture
def io() -> str:
    return IO
