"""A model whose requests take as long as a test wants: it answers as soon as a file is there."""

from __future__ import annotations

from pathlib import Path

NAME = "held"
CONFIG = """
backend: "python"
max_batch_size: 0
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
instance_group { kind: KIND_CPU count: 1 }
"""
CODE = """
import pathlib, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.folder = pathlib.Path(args["model_repository"])

    def execute(self, requests):
        (self.folder / "began").touch()
        while not (self.folder / "go").exists():
            time.sleep(0.01)
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", request.inputs()[0].as_numpy())])
            for request in requests
        ]
"""


def add_held_model(repository: Path, name: str = NAME, config: str = CONFIG) -> Path:
    """Put it into a repository; the file that lets it answer. `began` beside it is there when it executes something."""
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config)
    (folder / "1" / "model.py").write_text(CODE)
    return folder / "go"
