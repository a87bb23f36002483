"""Curves of a whole server: see bench.growth."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import grpc

from bench import inferd, messages
from bench.curves import Curve, Point
from bench.figures import measure
from bench.messages import Exchange
from bench.peers.drivers import h2load
from bench.peers.nghttpd import Nghttpd
from bench.processes import ServerProcess
from bench.repository import GATHER, Identity, write
from inferd_client.driver import Fixed
from inferd_client.pb import grpc_service_pb2 as pb

CONNECTIONS = (1, 8, 64, 512)
IN_FLIGHT = 64
STREAMS = (4, 32, 256, 1000, 2000)
DRIVEN = 50_000  # requests of h2load
SIZES = (64 << 10, 1 << 20, 4 << 20, 16 << 20)
SECONDS = 1.0
DEPTHS = (1, 2, 4, 8, 16)
FIRST = 16  # elements that the Python model answers with
PYTHON = f"""import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        values = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", values[:{FIRST}].copy())])
"""
CALLER = """import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.depth = int(args["model_name"].removeprefix("calls"))

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        values = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        if self.depth:
            call = pb_utils.InferenceRequest(
                model_name=f"calls{self.depth - 1}",
                inputs=[pb_utils.Tensor("INPUT0", values)],
                requested_output_names=["OUTPUT0"],
            )
            values = pb_utils.get_output_tensor_by_name(call.exec(), "OUTPUT0").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", values)])
"""
TENSORS = """
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
"""
ENSEMBLE = f"""platform: "ensemble"
{TENSORS}
ensemble_scheduling {{
  step {{ model_name: "native" model_version: -1
         input_map {{ key: "INPUT0" value: "INPUT0" }} output_map {{ key: "OUTPUT0" value: "between" }} }}
  step {{ model_name: "python" model_version: -1
         input_map {{ key: "INPUT0" value: "between" }} output_map {{ key: "OUTPUT0" value: "OUTPUT0" }} }}
}}
"""


@contextmanager
def _served(callers: int = 0) -> Iterator[tuple[ServerProcess, str]]:
    """A server with the models, some of which call each other, and the address of its unix socket."""
    models = (
        Identity("identity", (("FP32", 1),), parameters=GATHER),
        Identity("native", (("FP32", 1),), max_batch_size=0, parameters=GATHER),
    )
    with tempfile.TemporaryDirectory(prefix="inferd-growth-") as folder:
        root = write(Path(folder, "models"), models)
        for name, config in (("python", f'backend: "python"{TENSORS}'), ("ensemble", ENSEMBLE)):
            (root / name / "1").mkdir(parents=True)
            (root / name / "config.pbtxt").write_text(config)
        (root / "python/1/model.py").write_text(PYTHON)
        for depth in range(callers):
            (root / f"calls{depth}" / "1").mkdir(parents=True)
            (root / f"calls{depth}" / "config.pbtxt").write_text(f'backend: "python"{TENSORS}')
            (root / f"calls{depth}" / "1/model.py").write_text(CALLER)
        unix = f"unix:{folder}/socket"
        options = ["--grpc-address", "127.0.0.1", "--grpc-address", unix, "--client-shm-access", "map"]
        server = inferd.start(root, Path(folder, "log"), options=options)
        try:
            yield server, unix
        finally:
            server.stop()


def connections() -> Curve:
    """64 bytes there and back, 64 calls in flight over few connections, one on each of many."""
    exchange = messages.identity(64)
    workload = Fixed([exchange.request], [exchange.response])
    points = []
    with _served() as (server, _):
        for count in CONNECTIONS:
            figure = measure(server, workload, (count, max(1, IN_FLIGHT // count)), SECONDS)
            points.append(Point(count, figure.cpu_us, figure.p50_us))
    title = "64 bytes there and back by connections, 64 calls in flight or one on each"
    return Curve("connections", title, "us of the server's CPU a request", tuple(points), "p50, us")


def streams() -> Curve:
    """64 bytes there and back over one connection, by the calls in flight on it."""
    exchange = messages.identity(64)
    workload = Fixed([exchange.request], [exchange.response])
    points = []
    with _served() as (server, _):
        for count in STREAMS:
            figure = measure(server, workload, (1, count), SECONDS)
            points.append(Point(count, figure.cpu_us, figure.p50_us))
    title = "64 bytes there and back over one connection, by calls in flight"
    return Curve("streams", title, "us of the server's CPU a request", tuple(points), "p50, us")


def http2() -> Curve:
    """The curve of nghttpd, which answers with a file. h2load drives both servers; both figures include connecting."""
    exchange = messages.identity(64)
    costs: dict[str, list[float]] = {"inferd": [], "nghttpd": []}
    with (
        tempfile.TemporaryDirectory(prefix="inferd-growth-") as folder,
        _served() as (server, _),
        Nghttpd(exchange, Path(folder, "nghttpd")) as peer,
    ):
        for count in CONNECTIONS:
            for name, process in (("inferd", server), ("nghttpd", peer.server)):
                load = partial(
                    h2load,
                    process.address,
                    exchange.request,
                    connections=count,
                    in_flight=max(1, IN_FLIGHT // count),
                    folder=Path(folder),
                )
                load(requests=DRIVEN // 10)
                before = process.cpu_seconds()
                load(requests=DRIVEN)
                costs[name].append(1e6 * (process.cpu_seconds() - before) / DRIVEN)
    points = tuple(Point(*each) for each in zip(CONNECTIONS, costs["inferd"], costs["nghttpd"], strict=True))
    title = "64 bytes there and back by connections, driven by h2load"
    return Curve("http2", title, "us of the server's CPU a request", points, "of nghttpd's")


def regions() -> Curve:
    """The input of a Python model in the client's shared memory, compared with the same on the wire."""
    return _inputs("regions", "a Python model's input in shared memory, one at a time", "python", in_region=True)


def steps() -> Curve:
    """The input of a Python model from an ensemble's native step, compared with the same on the wire."""
    return _inputs("steps", "a Python model's input from an ensemble's step, one at a time", "ensemble")


def calls() -> Curve:
    """Python models that call each other, one request at a time: what each level adds to the round trip."""
    points = []
    with _served(DEPTHS[-1] + 1) as (server, unix):
        times = {}
        for depth in (0, *DEPTHS):
            exchange = _exchange(f"calls{depth}", messages.floats(FIRST))
            times[depth] = measure(
                server, Fixed([exchange.request], [exchange.response]), (1, 1), SECONDS, address=unix
            )
        for depth in DEPTHS:
            more = times[depth].p50_us - times[0].p50_us, times[depth].cpu_us - times[0].cpu_us
            points.append(Point(depth, more[0] / depth, more[1] / depth))
    title = "Python models that call each other, by levels, one request at a time"
    return Curve("calls", title, "us of the round trip a level", tuple(points), "us of CPU, with the workers'")


def _inputs(name: str, title: str, model: str, *, in_region: bool = False) -> Curve:
    points = []
    with _served() as (server, unix), _region(unix) as content:
        for size in SIZES:
            way = _exchange(model, content[:size], in_region=in_region)
            wire = _exchange("python", content[:size])
            cost, beside = (
                measure(server, Fixed([each.request], [each.response]), (1, 1), SECONDS, address=unix).cpu_us
                for each in (way, wire)
            )
            points.append(Point(size, cost, beside))
    return Curve(name, title, "us of CPU a request, with the worker's", tuple(points), "on the wire, us")


@contextmanager
def _region(address: str) -> Iterator[bytes]:
    """The contents of "region", which is registered."""
    content = messages.floats(SIZES[-1] // 4)
    path = Path(f"/dev/shm/inferd-growth-{os.getpid()}")
    path.write_bytes(content)
    try:
        with grpc.insecure_channel(address) as channel:
            channel.unary_unary(
                "/inference.GRPCInferenceService/SystemSharedMemoryRegister",
                request_serializer=pb.SystemSharedMemoryRegisterRequest.SerializeToString,
            )(pb.SystemSharedMemoryRegisterRequest(name="region", key=f"/{path.name}", byte_size=len(content)))
            yield content
    finally:
        path.unlink()


def _exchange(model: str, content: bytes, *, in_region: bool = False) -> Exchange:
    tensor = ("FP32", [len(content) // 4], content)
    request = pb.ModelInferRequest.FromString(messages.request(model, {"INPUT0": tensor}))
    if in_region:
        request.inputs[0].parameters["shared_memory_region"].string_param = "region"
        request.inputs[0].parameters["shared_memory_byte_size"].int64_param = len(content)
        del request.raw_input_contents[:]
    answer = messages.response(model, {"OUTPUT0": ("FP32", [FIRST], content[: 4 * FIRST])})
    return Exchange(request.SerializeToString(), answer)
