"""Tensors in shared memory against the same tensors on the wire, over one unix socket.

    python -m bench.shared_memory

Each round measures all ways of a table one after the other, so that they share the machine's good and bad moments; the
best round of each counts. Every answer is compared, and so are the contents of the region afterwards.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import numpy as np

from bench import inferd, messages
from bench.figures import Figure, best, measure
from bench.messages import Exchange
from bench.repository import GATHER, Identity, write
from inferd.server.pb import grpc_service_pb2 as pb
from inferd_client.driver import Fixed

LARGE = 16 << 20
SMALL = 64
# without a batch dimension, as most models with such tensors: each request is executed alone
MODELS = (
    Identity("identity", (("FP32", 2),), max_batch_size=0, instances=2, parameters=GATHER),
    Identity("large_in", (("FP32", 2), ("FP32", 2)), max_batch_size=0, instances=2, parameters=GATHER),
)
ACCESS = {"in place": "map", "copied": "copy"}
FRAMEWORK = """backend: "{backend}"
max_batch_size: 0
input {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ {dims} ] }}
output {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ {outputs} ] }}
instance_group {{ count: 1 kind: KIND_CPU }}
"""
CODE = """import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request.inputs()[0].as_numpy()) for request in requests]

    def answer(self, x):
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", ANSWER)])
"""
PYTHON = {"returns its input": "x", "doubles": "x + x", "adds up": "x.sum(keepdims=True)"}
ONNX = {"fixed": (1, LARGE // 4), "named like the input's": ("N", "L"), "unknown": (None, None)}
"""Dimensions of the output of an ONNX model that doubles."""


class Region:
    """A shared memory object with a large tensor in its first half, registered as "region"."""

    def __init__(self, stack: ExitStack, address: str) -> None:
        self.size = 2 * LARGE
        self.content = messages.floats(LARGE // 4)
        self._path = Path(f"/dev/shm/inferd-bench-{os.getpid()}")
        stack.callback(self._path.unlink)
        self._path.write_bytes(self.content + bytes(LARGE))
        channel = stack.enter_context(grpc.insecure_channel(address))
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/SystemSharedMemoryRegister",
            request_serializer=pb.SystemSharedMemoryRegisterRequest.SerializeToString,
        )
        call(pb.SystemSharedMemoryRegisterRequest(name="region", key=f"/{self._path.name}", byte_size=self.size))

    @contextmanager
    def cleared(self, expected: bytes = b"") -> Iterator[None]:
        """Clear the second half, then check that it becomes `expected` (by default, the first half)."""
        expected = expected or self.content
        with self._path.open("r+b") as file:
            file.seek(LARGE)
            file.write(bytes(LARGE))
        yield
        with self._path.open("rb") as file:
            file.seek(LARGE)
            if file.read(len(expected)) != expected:
                raise RuntimeError("wrong output in the region")

    def copy(self, seconds: float) -> Figure:
        """Copy the first half to the second one, in this process."""
        with self._path.open("r+b") as file, mmap.mmap(file.fileno(), self.size) as memory:
            halves = np.frombuffer(memory, np.uint8).reshape(2, -1)
            took = []
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                begun = time.perf_counter()
                np.copyto(halves[1], halves[0])
                took.append(time.perf_counter() - begun)
            del halves
        return Figure(statistics.mean(took) * 1e6, len(took) / seconds, statistics.median(took) * 1e6)


def placed(exchange: Exchange, *, output: bool) -> Exchange:
    """The same request with INPUT0 in the region, and with `output` OUTPUT0 after it."""
    request = pb.ModelInferRequest.FromString(exchange.request)
    response = pb.ModelInferResponse.FromString(exchange.response)
    _refer(request.inputs[0], 0)
    del request.raw_input_contents[0]
    if output:
        _refer(request.outputs.add(name="OUTPUT0"), LARGE)
        response.raw_output_contents[0] = b""
    return Exchange(request.SerializeToString(), response.SerializeToString())


def add_models(repository: Path) -> None:
    """Models in Python and for ONNX Runtime that get 16 MiB."""
    import onnx
    from onnx import TensorProto, helper

    def add(name: str, **config: str) -> Path:
        version = repository / name / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(FRAMEWORK.format(**config))
        return version

    for number, answer in enumerate(PYTHON.values()):
        outputs = "-1, -1" if "sum" not in answer else "1, 1"
        version = add(f"python{number}", backend="python", dims="-1, -1", outputs=outputs)
        (version / "model.py").write_text(CODE.replace("ANSWER", answer))
    for number, dims in enumerate(ONNX.values()):
        text = ", ".join(str(dim) if isinstance(dim, int) else "-1" for dim in dims)
        version = add(f"onnx{number}", backend="onnxruntime", dims=text, outputs=text)
        x = helper.make_tensor_value_info("INPUT0", TensorProto.FLOAT, ("N", "L") if None in dims else dims)
        y = helper.make_tensor_value_info("OUTPUT0", TensorProto.FLOAT, dims)
        graph = helper.make_graph([helper.make_node("Add", ["INPUT0", "INPUT0"], ["OUTPUT0"])], "g", [x], [y])
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9),
                  str(version / "model.onnx"))  # fmt: skip


def _refer(
    tensor: pb.ModelInferRequest.InferInputTensor | pb.ModelInferRequest.InferRequestedOutputTensor, offset: int
) -> None:
    tensor.parameters["shared_memory_region"].string_param = "region"
    tensor.parameters["shared_memory_offset"].int64_param = offset
    tensor.parameters["shared_memory_byte_size"].int64_param = LARGE


def table(title: str, found: dict[str, Figure], base: str) -> list[str]:
    """A row of figures, and their ratio to those of `base`."""
    lines = [f"| {title} | requests/s | p50 | server CPU a request | rate, CPU / {base} |", "|---|---:|---:|---:|---:|"]
    for name, figure in found.items():
        rate, cpu = figure.rate / found[base].rate, figure.cpu_us / max(found[base].cpu_us, 0.01)
        lines.append(
            f"| {name} | {figure.rate:,.0f} | {figure.p50_us:,.0f} µs | {figure.cpu_us:,.1f} µs | "
            f"{rate:.2f}, {cpu:.2f} |"
        )
    return lines


def tables(folder: Path, access: str, in_flight: int, rounds: int, seconds: float) -> Iterator[list[str]]:
    """The tables of one way of access: regions used in place, or copied."""
    unix = f"unix:{folder}/{access}"
    options = ["--grpc-address", "127.0.0.1", "--grpc-address", unix, "--client-shm-access", access]
    repository = write(folder / "models", MODELS)
    add_models(repository)
    server = inferd.start(repository, folder / f"{access}.log", options=options)
    with ExitStack() as stack:
        stack.callback(server.stop)
        region = Region(stack, unix)
        small, large, whole = messages.identity(SMALL), messages.large_in(LARGE), messages.identity(LARGE)

        def way(exchange: Exchange, in_flight: int = in_flight) -> Callable[[], Figure]:
            workload = Fixed([exchange.request], [exchange.response])
            return lambda: measure(server, workload, (1, in_flight), seconds, address=unix)

        def model(name: str, doubled: bytes, summed: bool = False) -> Callable[[], Figure]:
            exchange = messages.identity(LARGE, name)
            response = pb.ModelInferResponse.FromString(exchange.response)
            if summed:
                response.outputs[0].shape[:] = 1, 1
            ask = way(placed(Exchange(exchange.request, response.SerializeToString()), output=True), 1)

            def checked() -> Figure:
                with region.cleared(doubled):
                    return ask()

            return checked

        yield table(
            f"input with a small output, {in_flight} in flight",
            best(
                {
                    "64 B on the wire": way(small),
                    "16 MiB in a region": way(placed(large, output=False)),
                    "16 MiB on the wire": way(large),
                },
                rounds,
            ),
            "64 B on the wire",
        )
        with region.cleared():
            yield table(
                f"identity, {in_flight} in flight",
                best({"16 MiB on the wire": way(whole), "16 MiB in a region": way(placed(whole, output=True))}, rounds),
                "16 MiB on the wire",
            )
        content = np.frombuffer(region.content, np.float32)
        ways = {"memcpy of 16 MiB": lambda: region.copy(seconds)}
        for number, (name, answer) in enumerate(PYTHON.items()):
            summed = "sum" in answer
            expected = content.sum(keepdims=True) if summed else content + content if answer != "x" else content
            ways[f"model.py that {name}"] = model(f"python{number}", expected.tobytes(), summed)
        for number, dims in enumerate(ONNX):
            ways[f"ONNX, doubles, dimensions of the output {dims}"] = model(
                f"onnx{number}", (content + content).tobytes()
            )
        yield table("16 MiB in and out by region, 1 in flight", best(ways, rounds), "memcpy of 16 MiB")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each round")
    parser.add_argument("--in-flight", type=int, default=4)
    arguments = parser.parse_args()
    for name, access in ACCESS.items():
        with tempfile.TemporaryDirectory(prefix="inferd-shm-") as folder:
            print(f"regions are {name} (--client-shm-access={access})\n")
            for lines in tables(Path(folder), access, arguments.in_flight, arguments.rounds, arguments.seconds):
                print(*lines, "", sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
