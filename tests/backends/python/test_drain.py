"""A service manager signals every process of a service at once: requests that run are answered, then all end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import psutil

from bench.processes import ServerProcess, free_port
from inferd_client.pb import grpc_service_pb2 as pb
from tests.backends.python.served import WAITING, add_model, wait_for
from tests.storms.chaos import PATH, message

REQUESTS = 128
CONFIG = """
backend: "python"
max_batch_size: 16
input { name: "x" data_type: TYPE_INT64 dims: [ -1 ] }
output { name: "y" data_type: TYPE_INT64 dims: [ -1 ] }
instance_group { kind: KIND_CPU count: 2 }
dynamic_batching { }
"""


async def infer(channel: grpc.aio.Channel, value: int, model: str = "m") -> int:
    data = await channel.unary_unary(PATH, None, None)(message(model, np.array([[value]])), timeout=60)
    return int.from_bytes(pb.ModelInferResponse.FromString(data).raw_output_contents[0], "little")


def signal_all(signs: Iterable[Path], pid: int, go: Iterable[Path]) -> None:
    """SIGTERM for the server and all its descendants, once the models have given these signs; then let them go on."""
    for sign in signs:
        wait_for(sign)
    server = psutil.Process(pid)
    for process in (*server.children(recursive=True), server):
        with contextlib.suppress(psutil.NoSuchProcess):  # one that has ended by itself
            process.send_signal(signal.SIGTERM)
    for path in go:
        path.touch()


def test_sigterm_for_every_process_loses_no_request(tmp_path: Path) -> None:
    add_model(tmp_path / "models", "m", WAITING, CONFIG)
    port = free_port()
    command = [sys.executable, "-m", "inferd", "serve", "--model-repository", tmp_path / "models", "--grpc-port"]
    server = ServerProcess([*command, str(port)], port, log=tmp_path / "log")

    async def ask_all() -> list[int]:
        async with grpc.aio.insecure_channel(server.address) as channel:
            asked = [asyncio.ensure_future(infer(channel, value)) for value in range(REQUESTS)]
            statistics = channel.unary_unary("/inference.GRPCInferenceService/ModelStatistics", None, None)
            await statistics(b"")  # behind them on the connection: the server has read them
            folder = tmp_path / "models" / "m"
            await asyncio.to_thread(signal_all, [folder / "executing"], server.pid, [folder / "go"])
            return await asyncio.gather(*asked)

    try:
        assert asyncio.run(ask_all()) == list(range(REQUESTS))
        assert psutil.Process(server.pid).wait(60) == 0
    finally:
        server.stop()


HELPED = """
import multiprocessing, pathlib, time
import triton_python_backend_utils as pb_utils
def help(folder, number):
    (folder / f"helping {{number}}").touch()
    while not (folder / "go").exists():
        time.sleep(0.001)
    return number
class TritonPythonModel:
    def initialize(self, args):
        self.folder = pathlib.Path(args["model_repository"])
        self.pool = multiprocessing.get_context("{method}").Pool(2)
    def execute(self, requests):
        assert self.pool.starmap(help, [(self.folder, 0), (self.folder, 1)], chunksize=1) == [0, 1]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
    def finalize(self):
        self.pool.terminate()
        self.pool.join()
        (self.folder / "finalized").touch()
"""


def test_sigterm_for_every_process_spares_those_that_help_a_model(tmp_path: Path) -> None:
    """A pool waits for ever for a task whose process was ended: the request, and with it the server, would not end.

    `terminate` ends them as ever, or the model would not be finalized.
    """
    root = tmp_path / "models"
    methods = ("fork", "spawn")
    for method in methods:
        add_model(root, method, HELPED.format(method=method), CONFIG.replace("count: 2", "count: 1"))
    port = free_port()
    command = [sys.executable, "-m", "inferd", "serve", "--model-repository", root, "--grpc-port", str(port)]
    server = ServerProcess([*command, "--exit-timeout-secs", "3600"], port, log=tmp_path / "log")
    signs = [root / method / f"helping {number}" for method in methods for number in range(2)]

    async def ask() -> list[int]:
        async with grpc.aio.insecure_channel(server.address) as channel:
            asked = [asyncio.ensure_future(infer(channel, 7, method)) for method in methods]
            await asyncio.to_thread(signal_all, signs, server.pid, [root / method / "go" for method in methods])
            return await asyncio.gather(*asked)

    try:
        assert asyncio.run(ask()) == [7, 7]
        assert psutil.Process(server.pid).wait(60) == 0
        assert all((root / method / "finalized").exists() for method in methods)
    finally:
        server.stop()
