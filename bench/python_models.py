"""Models written in Python, the same for Triton and for the server under test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

IDENTITY = """import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        tensor = pb_utils.get_input_tensor_by_name(request, "INPUT0")
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", tensor.as_numpy())])
"""

# Each model of the chain calls the next one; the last one is an identity.
CALLER = """import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        tensor = pb_utils.get_input_tensor_by_name(request, "INPUT0")
        call = pb_utils.InferenceRequest(
            model_name="NEXT",
            requested_output_names=["OUTPUT0"],
            inputs=[pb_utils.Tensor("INPUT0", tensor.as_numpy())],
        )
        answer = call.exec()
        if answer.has_error():
            raise pb_utils.TritonModelException(answer.error().message())
        output = pb_utils.get_output_tensor_by_name(answer, "OUTPUT0")
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", output.as_numpy())])
"""

CONFIG = """name: "NAME"
backend: "python"
max_batch_size: 64
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
dynamic_batching { }
instance_group { count: 1 kind: KIND_CPU }
"""

CHAIN = "chain"
MODELS = {
    "identity": IDENTITY,
    CHAIN: CALLER.replace("NEXT", "chain_second"),
    "chain_second": CALLER.replace("NEXT", "chain_third"),
    "chain_third": IDENTITY,
}


def write(folder: Path, models: Mapping[str, str] = MODELS) -> Path:
    """Write a repository of models; `models` has the text of each model.py by name. Returns the folder."""
    for name, code in models.items():
        (folder / name / "1").mkdir(parents=True, exist_ok=True)
        (folder / name / "config.pbtxt").write_text(CONFIG.replace("NAME", name))
        (folder / name / "1" / "model.py").write_text(code)
    return folder


@contextmanager
def bare_interpreter() -> Iterator[int]:
    """The private bytes of a Python process that does nothing."""
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield int(psutil.Process(process.pid).memory_full_info().uss)
        finally:
            process.kill()
