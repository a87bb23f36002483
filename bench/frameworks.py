"""Frameworks behind the server beside themselves, called directly in a loop with the same batches.

    python -m bench.frameworks [--tensorflow ENVIRONMENT]

One network, three layers of 1024, and requests of 64 rows. Both sides compute on one thread. The two take turns, and of
each the round with the least CPU counts, since rates depend on who else the machine works for.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import backends.openvino  # noqa: F401 (before the runtime, which it keeps from telling its makers of being imported)
from bench import inferd, messages
from inferd_client.driver import Driver, Fixed

ROWS, WIDTH, LAYERS = 64, 1024, 3
CONFIG = """
{more}
max_batch_size: 64
input {{ name: "x" data_type: TYPE_FP32 dims: [ 1024 ] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [ 1024 ] }}
instance_group {{ kind: KIND_CPU count: 1 }}
"""
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Round:
    """What one round found."""

    rate: float  # batches per second
    cpu_us: float  # a batch


def weights() -> list[Any]:
    """Of the layers."""
    import numpy as np

    chance = np.random.default_rng(1)
    return [(chance.random((WIDTH, WIDTH), np.float32) - 0.5) / 16 for _ in range(LAYERS)]


def add(root: Path, name: str, more: str) -> Path:
    """A model's version folder."""
    version = root / name / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(CONFIG.format(more=more))
    return version


def openvino_model(root: Path) -> None:
    """The network in OpenVINO's own format."""
    import openvino
    from openvino import opset13 as ops

    version = add(root, "openvino", 'backend: "openvino"')
    x = ops.parameter([-1, WIDTH], openvino.Type.f32, name="x")
    x.output(0).set_names({"x"})
    y = x
    for weight in weights():
        y = ops.relu(ops.matmul(y, ops.constant(weight), False, False))
    y.output(0).set_names({"y"})
    openvino.save_model(openvino.Model([ops.result(y)], [x], "m"), version / "model.xml", compress_to_fp16=False)


def openvino_call(root: Path) -> Callable[[], object]:
    """A call of the same file, as its makers' examples do it."""
    import numpy as np
    import openvino

    settings = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1, "ENABLE_CPU_PINNING": False}
    compiled = openvino.Core().compile_model(str(root / "openvino" / "1" / "model.xml"), "CPU", settings)
    given = np.frombuffer(messages.floats(ROWS * WIDTH), np.float32).reshape(ROWS, WIDTH).copy()
    return lambda: compiled({0: given})


MODULE = f"""
import torch

class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.empty({WIDTH}, {WIDTH}) for _ in range({LAYERS})])

    def forward(self, x):
        for weight in self.weights:
            x = torch.relu(x @ weight)
        return x
"""


def pytorch_model(root: Path) -> None:
    """The network as a module in Python."""
    import torch

    more = """
        backend: "pytorch" runtime: "model.py"
        parameters { key: "TORCH_COMPILE_OPTIONAL_PARAMETERS" value { string_value: '{"disable": true}' } }
    """
    version = add(root, "pytorch", more)
    (version / "model.py").write_text(MODULE)
    state = {f"weights.{index}": torch.from_numpy(weight) for index, weight in enumerate(weights())}
    torch.save(state, version / "model.pt")


def pytorch_call(root: Path) -> Callable[[], object]:
    """A call of the same module."""
    import torch

    found: dict[str, Any] = {}
    exec(compile(MODULE, "model.py", "exec"), found)
    module = found["Layers"]().eval()
    module.load_state_dict(torch.load(root / "pytorch" / "1" / "model.pt", weights_only=True))
    torch.set_num_threads(1)
    given = torch.frombuffer(bytearray(messages.floats(ROWS * WIDTH)), dtype=torch.float32).reshape(ROWS, WIDTH)

    def call() -> object:
        with torch.inference_mode():
            return module(given).numpy()

    return call


TENSORFLOW = f"""
import os, resource, sys, time
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import numpy as np, tensorflow as tf
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)
folder, weights, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
if not seconds:
    module = tf.Module()
    module.weights = [tf.Variable(each) for each in np.load(weights)]
    def run(x):
        for weight in module.weights:
            x = tf.nn.relu(x @ weight)
        return {{"y": x}}
    module.run = tf.function(run, input_signature=[tf.TensorSpec([None, {WIDTH}], tf.float32, name="x")])
    tf.saved_model.save(module, folder, signatures=module.run)
    sys.exit()
function = tf.saved_model.load(folder).signatures["serving_default"]
given = (np.arange({ROWS * WIDTH}, dtype=np.float32) * 0.5 + 1).reshape({ROWS}, {WIDTH})
for _ in range(20):
    function(x=tf.constant(given))["y"].numpy()
cpu, begun, calls = time.process_time(), time.monotonic(), 0
while time.monotonic() - begun < seconds:
    function(x=tf.constant(given))["y"].numpy()
    calls += 1
print(calls / (time.monotonic() - begun), (time.process_time() - cpu) / calls * 1e6)
"""


def tensorflow_program(root: Path, environment: Path, seconds: float) -> list[str]:
    """The output of the program above; 0 seconds: it saves the model."""
    import numpy as np

    layers = root.parent / "weights.npy"
    np.save(layers, np.stack(weights()))
    folder = root / "tensorflow" / "1" / "model.savedmodel"
    command = [str(environment / "bin" / "python"), "-c", TENSORFLOW, str(folder), str(layers), str(seconds)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


def measured_directly(call: Callable[[], object], seconds: float) -> Round:
    """A loop in this process."""
    for _ in range(20):
        call()
    cpu, begun, calls = time.process_time(), time.monotonic(), 0
    while time.monotonic() - begun < seconds:
        call()
        calls += 1
    return Round(calls / (time.monotonic() - begun), (time.process_time() - cpu) / calls * 1e6)


def measured_served(server: Any, model: str, seconds: float) -> Round:
    """Two requests in flight, each a batch."""
    tensor = ("FP32", [ROWS, WIDTH], messages.floats(ROWS * WIDTH))
    with Driver(server.address, connections=1) as driver:
        request = Fixed([messages.request(model, {"x": tensor})])
        driver.run(request, in_flight=2, seconds=0.5)
        before = server.cpu_seconds()
        report = driver.run(request, in_flight=2, seconds=seconds)
        if report.wrong or report.lost:
            raise RuntimeError(f"{model}: {report}")
        return Round(report.rate, (server.cpu_seconds() - before) / report.requests * 1e6)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tensorflow", type=Path, help="an environment that has it")
    arguments = parser.parse_args()
    for name in ONE_THREAD:
        os.environ[name] = "1"
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "models"
        openvino_model(root)
        pytorch_model(root)
        directly: dict[str, Callable[[], Round]] = {}
        calls = {"openvino": openvino_call(root), "pytorch": pytorch_call(root)}
        for model, call in calls.items():
            directly[model] = lambda call=call: measured_directly(call, arguments.seconds)  # type: ignore[misc]
        options = []
        if arguments.tensorflow:
            threads = " ".join(
                f'parameters {{ key: "{key}" value {{ string_value: "1" }} }}'
                for key in ("TF_NUM_INTRA_THREADS", "TF_NUM_INTER_THREADS")
            )
            add(root, "tensorflow", f'platform: "tensorflow_savedmodel" {threads}')
            tensorflow_program(root, arguments.tensorflow, 0)
            options = ["--backend-config", f"tensorflow,environment={arguments.tensorflow}"]
            directly["tensorflow"] = lambda: Round(
                *map(float, tensorflow_program(root, arguments.tensorflow, arguments.seconds))
            )
        server = inferd.start(root, Path(name) / "log", options=options, patience=180)
        try:
            for model, direct in directly.items():
                rounds = [
                    (direct(), measured_served(server, model, arguments.seconds)) for _ in range(arguments.rounds)
                ]
                for what, side in (("directly", 0), ("served", 1)):
                    best = min((pair[side] for pair in rounds), key=lambda found: found.cpu_us)
                    rate = max(pair[side].rate for pair in rounds)
                    print(
                        f"{model:12} {what:9} {rate:8.1f} batches/s  {best.cpu_us:9.1f} µs of CPU a batch", flush=True
                    )
        finally:
            server.stop()


if __name__ == "__main__":
    sys.exit(main())
