"""The models that are compared: the same files for every server that reads Triton's repositories."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from bench import messages, python_models
from bench.peers.base import CACHE
from bench.repository import Identity, write
from inferd_client.pb import grpc_service_pb2 as pb

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("echo.c")
STEPS = 2_000_000
"""Multiplications of an execution of `busy`, each of which waits for the last: 2 to 3 ms of one core."""
RESPONSES = 1000
ROWS = 8
WAIT_MS = 5

WAITING = python_models.IDENTITY.replace(
    "import triton_python_backend_utils", "import time\n\nimport triton_python_backend_utils"
).replace("        return [self", f"        time.sleep({WAIT_MS / 1000})\n        return [self", 1)
"""Waits for a whole batch, as a model.py does whose tensors are on a GPU."""

BATCHING = "dynamic_batching { }\n"


def _parameter(key: str, value: int) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


CONFIG = python_models.CONFIG.replace('"python"', '"echo"')
COMPILED = {
    "echo": CONFIG,
    "busy": CONFIG.replace("max_batch_size: 64", f"max_batch_size: {ROWS}").replace(
        BATCHING, f"dynamic_batching {{ default_queue_policy {{ max_queue_size: {8 * ROWS} }} }}\n"
    )
    + _parameter("steps", STEPS),
    "stream": CONFIG.replace("max_batch_size: 64", "max_batch_size: 0")
    .replace("[ -1 ]", "[ -1, -1 ]")
    .replace(BATCHING, "model_transaction_policy { decoupled: true }\n")
    + _parameter("responses", RESPONSES),
}
DIGITS = """import os

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        path = os.path.join(args["model_repository"], args["model_version"], "model.onnx")
        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def execute(self, requests):
        images = [pb_utils.get_input_tensor_by_name(request, "image").as_numpy() for request in requests]
        (found,) = self.session.run(None, {"image": np.concatenate(images)})
        responses, at = [], 0
        for image in images:
            rows = np.ascontiguousarray(found[at : at + len(image)])
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("probabilities", rows)]))
            at += len(image)
        return responses
"""
"""The demo's CNN in ONNX Runtime, for servers that have no backend for it."""

PYTHON = {"python": python_models.IDENTITY, "waiting": WAITING}
SHARED = (*COMPILED, "chain", *PYTHON)
"""The models that are loaded at the start; those of digits are loaded for their row: they import frameworks."""


def backends(among: Path | None = None) -> Path:
    """A folder for --backend-directory with the backend in C, compiled; with `among`, the backends of that folder, too.

    Raises:
        subprocess.CalledProcessError: the compiler failed.
    """
    folder = CACHE / ("backends-triton" if among else "backends")
    library = folder / "echo" / "libtriton_echo.so"
    if not library.exists() or library.stat().st_mtime < SOURCE.stat().st_mtime:
        library.parent.mkdir(parents=True, exist_ok=True)
        compiler = os.environ.get("CC", "cc").split()
        flags = ["-std=gnu11", "-O2", "-shared", "-fPIC", "-Wall", "-I", str(ROOT)]
        subprocess.run([*compiler, *flags, "-o", str(library), str(SOURCE)], check=True)
    for backend in among.iterdir() if among else ():
        if not (folder / backend.name).exists():
            (folder / backend.name).symlink_to(backend)
    return folder


@functools.cache
def demo() -> Path:
    """The demo's repository of digits, made once: that takes seconds."""
    folder = CACHE / "digits"
    program = ROOT / "examples" / "digits" / "make_repository.py"
    subprocess.run([sys.executable, str(program), str(folder)], check=True, stdout=subprocess.DEVNULL)
    return folder


def chain(*models: str) -> str:
    """The configuration of an ensemble of these models, one after the other."""
    tensors = ["INPUT0", *(f"between_{n}" for n in range(1, len(models))), "OUTPUT0"]
    steps = "".join(
        f'step {{ model_name: "{model}" model_version: -1 '
        f'input_map {{ key: "INPUT0" value: "{tensors[n]}" }} '
        f'output_map {{ key: "OUTPUT0" value: "{tensors[n + 1]}" }} }}\n'
        for n, model in enumerate(models)
    )
    return f"""platform: "ensemble"
max_batch_size: 64
input {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }}
output {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }}
ensemble_scheduling {{ {steps} }}
"""


def write_shared(folder: Path) -> Path:
    """The models in C and in Python; returns the repository."""
    for name, config in {**COMPILED, "chain": chain("echo", "echo", "echo")}.items():
        (folder / name / "1").mkdir(parents=True, exist_ok=True)
        (folder / name / "config.pbtxt").write_text(config.replace("NAME", name))
    digits = shutil.copytree(demo() / "digits_onnx", folder / "digits_python")
    config = (digits / "config.pbtxt").read_text().replace("digits_onnx", "digits_python")
    (digits / "config.pbtxt").write_text(config.replace('"onnxruntime"', '"python"'))
    (digits / "1" / "model.py").write_text(DIGITS)
    return python_models.write(folder, PYTHON)


def write_own(folder: Path) -> Path:
    """Besides, models for backends that come with inferd: an identity, and the demo's CNN; returns the repository."""
    for name in ("digits_onnx", "digits_torchscript"):
        shutil.copytree(demo() / name, folder / name)
    return write(write_shared(folder), [Identity("identity", (("FP32", 1),))])


def image(model: str) -> bytes:
    """A request for one image of 8 x 8 pixels."""
    return messages.request(model, {"image": ("FP32", [1, 1, 8, 8], messages.floats(64))})


def check_digit(answer: bytes) -> None:
    """Check the response to it.

    Raises:
        ValueError: it is not the probabilities of ten digits.
    """
    response = pb.ModelInferResponse.FromString(answer)
    found = np.frombuffer(response.raw_output_contents[0], np.float32)
    if len(found) != 10 or not np.isclose(found.sum(), 1, atol=1e-3):
        raise ValueError(f"wrong answer: expected probabilities of ten digits, got {found}")
