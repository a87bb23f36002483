"""Frameworks behind the server, compared with a loop that calls them directly with the same batches.

    python -m bench.frameworks [--tensorflow ENVIRONMENT] [--only NAME...]

One network, layers of 1024, in two sizes: `wide` moves much data for each computation, `deep` little. Every request is
a batch. Both sides compute on one thread. The loop and the server take turns; each ratio is that of one pair of turns,
and the median counts, because rates depend on other work of the machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import inferd.backends.openvino as _openvino  # noqa: F401 (before the runtime, which it keeps from telling its makers of being imported)
from bench import inferd, messages
from inferd_client.driver import Driver, Fixed

WIDTH = 1024
CONFIG = """
{more}
max_batch_size: 64
input {{ name: "x" data_type: TYPE_FP32 dims: [ 1024 ] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [ 1024 ] }}
instance_group {{ kind: KIND_CPU count: {instances} }}
"""
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Work:
    """A network and its batches."""

    name: str
    rows: int
    layers: int


WORKS = (Work("wide", 64, 3), Work("deep", 16, 12))


@dataclass(frozen=True, slots=True)
class Round:
    """The figures of one turn."""

    rate: float  # batches per second
    cpu_us: float  # a batch


def weights(work: Work) -> list[Any]:
    """Of the layers."""
    import numpy as np

    chance = np.random.default_rng(1)
    return [(chance.random((WIDTH, WIDTH), np.float32) - 0.5) / 16 for _ in range(work.layers)]


def batch(work: Work) -> Any:
    """What every request has."""
    import numpy as np

    return np.frombuffer(messages.floats(work.rows * WIDTH), np.float32).reshape(work.rows, WIDTH).copy()


def parameters(**values: str) -> str:
    """For `config.pbtxt`."""
    return " ".join(
        f"parameters {{ key: \"{key}\" value {{ string_value: '{value}' }} }}" for key, value in values.items()
    )


def add(root: Path, name: str, more: str, instances: int = 1) -> Path:
    """A model's version folder."""
    version = root / name / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(CONFIG.format(more=more, instances=instances))
    return version


# -- each makes a model from the weights, and returns a function that calls the same file as its framework's examples do


def openvino(root: Path, name: str, work: Work) -> Call:
    """In OpenVINO's own format."""
    import openvino
    from openvino import opset13 as ops

    version = add(root, name, 'backend: "openvino" ' + parameters(INFERENCE_NUM_THREADS="1", NUM_STREAMS="1"))
    x = ops.parameter([-1, WIDTH], openvino.Type.f32, name="x")
    x.output(0).set_names({"x"})
    y = x
    for weight in weights(work):
        y = ops.relu(ops.matmul(y, ops.constant(weight), False, False))
    y.output(0).set_names({"y"})
    openvino.save_model(openvino.Model([ops.result(y)], [x], "m"), version / "model.xml", compress_to_fp16=False)
    return _openvino_call(version / "model.xml", work)


def openvino_2(root: Path, name: str, work: Work) -> Call:
    """The same with two instances: one is prepared while the other one computes, so still one thread computes."""
    call = openvino(root, name, work)
    config = root / name / "config.pbtxt"
    config.write_text(config.read_text().replace("count: 1", "count: 2"))
    return call


def _openvino_call(file: Path, work: Work, **more: object) -> Call:
    import openvino

    settings = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1, "ENABLE_CPU_PINNING": False, **more}
    compiled = openvino.Core().compile_model(str(file), "CPU", settings)
    given = batch(work)
    return lambda: compiled({0: given})


def _save_onnx(file: Path, work: Work) -> None:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    made = [numpy_helper.from_array(weight, f"w{place}") for place, weight in enumerate(weights(work))]
    nodes, at = [], "x"
    for place in range(work.layers):
        out = "y" if place == work.layers - 1 else f"h{place}"
        nodes += [helper.make_node("MatMul", [at, f"w{place}"], [f"p{place}"]),
                  helper.make_node("Relu", [f"p{place}"], [out])]  # fmt: skip
        at = out
    ends = [helper.make_tensor_value_info(end, TensorProto.FLOAT, ["N", WIDTH]) for end in ("x", "y")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], made)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(file))


def onnxruntime(root: Path, name: str, work: Work) -> Call:
    """As ONNX."""
    import onnxruntime

    version = add(root, name, 'platform: "onnxruntime_onnx" ' + parameters(intra_op_thread_count="1"))
    _save_onnx(version / "model.onnx", work)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(version / "model.onnx"), settings)
    given = batch(work)
    return lambda: session.run(None, {"x": given})


def onnx_openvino(root: Path, name: str, work: Work) -> Call:
    """The same with the accelerator `openvino`, which computes in FP32 where OpenVINO would take BF16."""
    accelerator = 'name: "openvino" parameters { key: "num_of_threads" value: "1" }'
    more = f"optimization {{ execution_accelerators {{ cpu_execution_accelerator: [ {{ {accelerator} }} ] }} }}"
    version = add(root, name, f'platform: "onnxruntime_onnx" {more}')
    _save_onnx(version / "model.onnx", work)
    return _openvino_call(version / "model.onnx", work, INFERENCE_PRECISION_HINT="f32")


MODULE = """
import torch

class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.empty(1024, 1024) for _ in range({layers})])

    def forward(self, x):
        for weight in self.weights:
            x = torch.relu(x @ weight)
        return x
"""


def _module(work: Work) -> Any:
    import torch

    found: dict[str, Any] = {}
    exec(compile(MODULE.format(layers=work.layers), "model.py", "exec"), found)
    module = found["Layers"]().eval()
    module.load_state_dict({f"weights.{place}": torch.from_numpy(weight) for place, weight in enumerate(weights(work))})
    torch.set_num_threads(1)
    return module


def _torch_call(module: Any, work: Work) -> Call:
    import torch

    given = torch.from_numpy(batch(work))

    def call() -> object:
        with torch.inference_mode():
            return module(given).numpy()

    return call


def torchscript(root: Path, name: str, work: Work) -> Call:
    """As TorchScript."""
    import torch

    version = add(root, name, 'platform: "pytorch_libtorch" ' + parameters(INTRA_OP_THREAD_COUNT="1"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(_module(work), torch.from_numpy(batch(work))).save(str(version / "model.pt"))
        return _torch_call(torch.jit.load(str(version / "model.pt")).eval(), work)


def aotinductor(root: Path, name: str, work: Work) -> Call:
    """Compiled by AOTInductor."""
    import torch

    file = add(root, name, 'platform: "torch_aoti" ' + parameters(INTRA_OP_THREAD_COUNT="1")) / "model.pt2"
    rows = torch.export.Dim("rows", max=64)
    program = torch.export.export(_module(work), (torch.from_numpy(batch(work)),), dynamic_shapes=({0: rows},))
    torch._inductor.config.cpp.threads = 1
    torch._inductor.aoti_compile_and_package(program, package_path=str(file))
    return _torch_call(torch._inductor.aoti_load_package(str(file)), work)


def module(root: Path, name: str, work: Work) -> Call:
    """As a module in Python, which a worker process executes."""
    import torch

    more = parameters(TORCH_COMPILE_OPTIONAL_PARAMETERS='{"disable": true}')
    version = add(root, name, f'backend: "pytorch" runtime: "model.py" {more}')
    (version / "model.py").write_text(MODULE.format(layers=work.layers))
    made = _module(work)
    torch.save(made.state_dict(), version / "model.pt")
    return _torch_call(made, work)


FRAMEWORKS: dict[str, Callable[[Path, str, Work], Call]] = {
    "openvino": openvino,
    "openvino_2": openvino_2,
    "onnxruntime": onnxruntime,
    "onnx_openvino": onnx_openvino,
    "torchscript": torchscript,
    "aotinductor": aotinductor,
    "module": module,
}
LATEST = "tensorflow"

TENSORFLOW = """
import os, sys, time
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import numpy as np, tensorflow as tf
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)
folder, weights, rows, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
if not seconds:
    module = tf.Module()
    module.weights = [tf.Variable(each) for each in np.load(weights)]
    def run(x):
        for weight in module.weights:
            x = tf.nn.relu(x @ weight)
        return {"y": x}
    module.run = tf.function(run, input_signature=[tf.TensorSpec([None, 1024], tf.float32, name="x")])
    tf.saved_model.save(module, folder, signatures=module.run)
    sys.exit()
function = tf.saved_model.load(folder).signatures["serving_default"]
given = (np.arange(rows * 1024, dtype=np.float32) * 0.5 + 1).reshape(rows, 1024)
for _ in range(20):
    function(x=tf.constant(given))["y"].numpy()
cpu, begun, calls = time.process_time(), time.monotonic(), 0
while time.monotonic() - begun < seconds:
    function(x=tf.constant(given))["y"].numpy()
    calls += 1
print(calls / (time.monotonic() - begun), (time.process_time() - cpu) / calls * 1e6)
"""


def tensorflow_program(root: Path, name: str, work: Work, environment: Path, seconds: float) -> list[str]:
    """The output of the program above; with 0 seconds it saves the model."""
    import numpy as np

    layers = root.parent / f"{name}.npy"
    np.save(layers, np.stack(weights(work)))
    folder = root / name / "1" / "model.savedmodel"
    command = [str(environment / "bin" / "python"), "-c", TENSORFLOW, str(folder), str(layers), str(work.rows)]
    return subprocess.run([*command, str(seconds)], check=True, capture_output=True, text=True).stdout.split()


def measured_directly(call: Call, seconds: float) -> Round:
    """A loop in this process."""
    for _ in range(20):
        call()
    cpu, begun, calls = time.process_time(), time.monotonic(), 0
    while time.monotonic() - begun < seconds:
        call()
        calls += 1
    return Round(calls / (time.monotonic() - begun), (time.process_time() - cpu) / calls * 1e6)


def measured_served(server: Any, model: str, work: Work, in_flight: int, seconds: float) -> Round:
    """Requests in flight, each a batch."""
    tensor = ("FP32", [work.rows, WIDTH], messages.floats(work.rows * WIDTH))
    with Driver(server.address, connections=1) as driver:
        request = Fixed([messages.request(model, {"x": tensor})])
        driver.run(request, in_flight=in_flight, seconds=0.3)
        before = server.cpu_seconds()
        report = driver.run(request, in_flight=in_flight, seconds=seconds)
        if report.wrong or report.lost:
            raise RuntimeError(f"{model}: {report}")
        return Round(report.rate, (server.cpu_seconds() - before) / report.requests * 1e6)


def made(root: Path, work: Work, arguments: argparse.Namespace) -> dict[str, Callable[[], Round]]:
    """Make the models; return their loops, by name."""
    found: dict[str, Callable[[], Round]] = {}
    for framework, make in FRAMEWORKS.items():
        if framework in arguments.only:
            call = make(root, f"{framework}_{work.name}", work)
            found[f"{framework}_{work.name}"] = lambda call=call: (  # type: ignore[misc]
                measured_directly(call, arguments.seconds)
            )
    if arguments.tensorflow and LATEST in arguments.only:
        name = f"{LATEST}_{work.name}"
        threads = parameters(TF_NUM_INTRA_THREADS="1", TF_NUM_INTER_THREADS="1")
        add(root, name, f'platform: "tensorflow_savedmodel" {threads}')
        tensorflow_program(root, name, work, arguments.tensorflow, 0)
        found[name] = lambda: Round(
            *map(float, tensorflow_program(root, name, work, arguments.tensorflow, arguments.seconds))
        )
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="each turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--in-flight", type=int, default=32)
    parser.add_argument("--tensorflow", type=Path, help="an environment that has it")
    parser.add_argument("--only", nargs="+", default=[*FRAMEWORKS, LATEST], choices=[*FRAMEWORKS, LATEST])
    arguments = parser.parse_args()
    if arguments.tensorflow:
        arguments.tensorflow = arguments.tensorflow.absolute()
    for name in ONE_THREAD:
        os.environ[name] = "1"
    options = ["--backend-config", f"tensorflow,environment={arguments.tensorflow}"] if arguments.tensorflow else []
    for work in WORKS:
        with tempfile.TemporaryDirectory() as name:
            root = Path(name) / "models"
            loops = made(root, work, arguments)
            server = inferd.start(root, Path(name) / "log", options=options, patience=180)
            try:
                for model, loop in loops.items():
                    report(
                        model,
                        [
                            (loop(), measured_served(server, model, work, arguments.in_flight, arguments.seconds))
                            for _ in range(arguments.rounds)
                        ],
                    )
            finally:
                server.stop()
                shutil.rmtree(root)


def report(model: str, rounds: list[tuple[Round, Round]]) -> None:
    """A model's line: the pair of turns with the median ratio of rates, and the least CPU of each side."""
    direct, served = sorted(rounds, key=lambda pair: pair[1].rate / pair[0].rate)[len(rounds) // 2]
    ratio = statistics.median(pair[1].rate / pair[0].rate for pair in rounds)
    best = max(pair[1].rate for pair in rounds) / max(pair[0].rate for pair in rounds)
    cpu = [min(pair[side].cpu_us for pair in rounds) for side in (0, 1)]
    print(
        f"{model:20} {direct.rate:7.1f} {served.rate:7.1f} batches/s: {ratio:6.1%} (of the best turns {best:6.1%})"
        f"  {cpu[0]:8.0f} {cpu[1]:8.0f} µs of CPU a batch",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
