"""What the way to a GPU and back costs, and what overlap gains; all figures as JSON.

python -m bench.gpu [FILE]      exit status 1, and a sentence, where there is no GPU
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from bench.memory_speed import pair_ns
from inferd._native.cuda import driver
from inferd._native.cuda.device import Device, device
from inferd._native.cuda.memory import DevicePool, PageLocked
from inferd.backends.loader import BackendLoader
from inferd.backends.tensorrt.library import is_installed
from inferd.server.engine.config import Options
from inferd.server.engine.engine import Engine
from inferd.server.engine.instances.gpu import Gpus
from inferd.server.engine.instances.instances import Hardware
from inferd_client.pb import grpc_service_pb2 as pb

MIB = 1 << 20

CONFIG = """
backend: "{backend}"
max_batch_size: 32
input {{ name: "x" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] }}
output {{ name: "{output}" data_type: TYPE_FP32 dims: [ {dims} ] }}
instance_group {{ kind: KIND_GPU count: 1 }}
dynamic_batching {{ preferred_batch_size: 32 }}
"""
IDENTITY = CONFIG.format(backend="identity", output="y", dims="3, 224, 224")
TORCH = CONFIG.format(backend="pytorch", output="y__0", dims="1000")
PLAN = CONFIG.format(backend="tensorrt", output="y", dims="1000") + 'default_model_filename: "model.onnx"'


def copies(gpu: Device) -> dict[str, float]:
    """Gigabytes per second of copies, from page-locked memory and from ordinary, one way and both ways at once."""
    pool, size = PageLocked(gpu, 256 * MIB), 64 * MIB
    first, second = pool.take(size), pool.take(size)
    pageable = (ctypes.c_uint8 * size)()
    memory, up, down = gpu.allocate(2 * size), gpu.stream(), gpu.stream()

    def rate(submit: object, moved: int) -> float:
        best = 0.0
        for _ in range(5):
            start = time.perf_counter()
            submit()  # type: ignore[operator]
            up.synchronize()
            down.synchronize()
            best = max(best, moved / (time.perf_counter() - start) / 1e9)
        return round(best, 2)

    def both() -> None:
        up.copy_to_device(memory.pointer, first.address, size)
        down.copy_to_host(second.address, memory.pointer + size, size)

    return {
        "to device": rate(lambda: up.copy_to_device(memory.pointer, first.address, size), size),
        "to host": rate(lambda: down.copy_to_host(second.address, memory.pointer, size), size),
        "both": rate(both, 2 * size),
        "to device, pageable": rate(lambda: up.copy_to_device(memory.pointer, ctypes.addressof(pageable), size), size),
    }


def pools(gpu: Device) -> dict[str, float]:
    """Nanoseconds to take a block of 1 MiB and to give it back."""
    return {
        "page-locked": round(min(pair_ns(PageLocked(gpu, 64 * MIB), MIB, 100_000) for _ in range(3)), 1),
        "device": round(min(pair_ns(DevicePool(gpu, 64 * MIB), MIB, 100_000) for _ in range(3)), 1),
    }


async def served(
    root: Path,
    config: str,
    requests: int = 4000,
    inflight: int = 96,
    options: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
) -> dict[str, float]:
    """Images per second through an engine, without sockets, and the mean batch; `options` are those of backends."""
    (root / "m" / "1").mkdir(parents=True, exist_ok=True)
    (root / "m" / "config.pbtxt").write_text(config)
    gpus = Gpus()
    engine = Engine([root], BackendLoader(options), Options(gpus=gpus.count), hardware=Hardware(gpus=gpus))
    problems = await engine.start()
    if problems:
        raise SystemExit("\n".join(problems))
    message = pb.ModelInferRequest(model_name="m")
    message.inputs.add(name="x", datatype="FP32", shape=[1, 3, 224, 224])
    message.raw_input_contents.append(np.zeros((3, 224, 224), np.float32).tobytes())
    raw, slots = message.SerializeToString(), asyncio.Semaphore(inflight)

    async def all_of(count: int) -> float:
        left, done = count, asyncio.Event()

        def answered(status: int, text: str, response: bytes | None) -> None:  # noqa: ARG001
            nonlocal left
            if status:
                raise SystemExit(text)
            slots.release()
            left -= 1
            if not left:
                done.set()

        start = time.perf_counter()
        for _ in range(count):
            await slots.acquire()
            engine.infer.submit(raw, answered)
        await done.wait()
        return count / (time.perf_counter() - start)

    try:
        await all_of(requests // 4)
        rate = await all_of(requests)
        statistics = engine.model("m").statistics()
        return {
            "images per second": round(rate),
            "mean batch": round(statistics.inference_count / statistics.execution_count, 1),
        }
    finally:
        await engine.close()


def bare_loop(path: Path, rows: int = 32, loops: int = 100) -> float:
    """Images per second of the module alone, over batches that lie on the device."""
    import torch

    module, x = torch.jit.load(str(path), map_location="cuda:0").eval(), torch.zeros(rows, 3, 224, 224, device="cuda:0")
    with torch.inference_mode():
        for _ in range(10):
            module(x)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(loops):
            module(x)
        torch.cuda.synchronize()
    return round(rows * loops / (time.perf_counter() - start))


def convolutions() -> Any:
    """A module of about ResNet-50's work for an image: 4 billion multiplications."""
    from torch import nn

    def block(inputs: int, outputs: int, stride: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        )

    layers = [nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    for inputs, outputs, stride in ((64, 64, 1), (64, 128, 1), (128, 256, 2), (256, 512, 2), (512, 512, 1)):
        layers += [block(inputs, outputs, stride), block(outputs, outputs, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)).eval()


def torchscript(root: Path) -> dict[str, object]:
    """The module served, beside the module alone."""
    try:
        import torch
    except ImportError:
        return {"left out": "PyTorch is not installed"}
    if not torch.cuda.is_available():
        return {"left out": f"PyTorch {torch.__version__} has no CUDA device"}
    path = root / "m" / "1" / "model.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.jit.freeze(torch.jit.script(convolutions())).save(str(path))
    found: dict[str, object] = {"bare loop, images per second": bare_loop(path)}
    for name, more in (("served", ""), ("served, CUDA graphs", "optimization { cuda { graphs: true } }")):
        found[name] = asyncio.run(served(root, TORCH + more))
    return found


def export(path: Path) -> None:
    """The module as ONNX, for batches of any size."""
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter without dynamo needs no further package
        torch.onnx.export(
            convolutions(),
            (torch.zeros(1, 3, 224, 224),),
            str(path),
            input_names=["x"],
            output_names=["y"],
            dynamic_axes={"x": {0: "n"}, "y": {0: "n"}},
            dynamo=False,
        )


def tensorrt(root: Path) -> dict[str, object]:
    """The module served as a plan that is built here, in the precision of the model."""
    if not any(map(is_installed, ("tensorrt", "tensorrt_rtx"))):
        return {"left out": "no TensorRT that builds plans is installed"}
    try:
        export(root / "m" / "1" / "model.onnx")
    except ImportError as error:
        return {"left out": f"the model cannot be written as ONNX: {error}"}
    options = {"tensorrt": {"engine-cache": str(root / "cache")}}
    found: dict[str, object] = {}
    for name, more in (("served", ""), ("served, CUDA graphs", "optimization { cuda { graphs: true } }")):
        try:
            found[name] = asyncio.run(served(root, PLAN + more, options=options))
        except SystemExit as error:  # the installed TensorRT may not support this GPU
            found[name] = {"failed": str(error)}
    return found


def main() -> int:
    """Measure everything; 1 where there is no GPU."""
    try:
        driver.load()
    except driver.CudaUnavailable as error:
        print(f"bench.gpu: nothing is measured, because it needs a GPU: {error}", file=sys.stderr)
        return 1
    gpu = device(0)
    gpu.use()
    found: dict[str, object] = {
        "gpu": gpu.name,
        "compute capability": gpu.compute_capability,
        "driver": driver.version(),
        "copies, GB/s": copies(gpu),
        "pools, ns": pools(gpu),
    }
    with tempfile.TemporaryDirectory() as folder:
        found["identity"] = asyncio.run(served(Path(folder) / "identity", IDENTITY))
        found["torchscript"] = torchscript(Path(folder) / "torchscript")
        found["tensorrt"] = tensorrt(Path(folder) / "tensorrt")
    text = json.dumps(found, indent=1)
    print(text)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
