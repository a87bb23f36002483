"""A service manager signals every process of a service at once: requests that run are answered, then all end."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import psutil

from bench.chaos import PATH, message
from bench.processes import ServerProcess, free_port
from server.pb import grpc_service_pb2 as pb
from tests.backends.python.served import add_model

REQUESTS = 128
MODEL = """
import pathlib, time
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, args):
        self.folder = pathlib.Path(args["model_repository"])
    def execute(self, requests):
        (self.folder / "executing").touch()
        while not (self.folder / "go").exists():
            time.sleep(0.001)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""
CONFIG = """
backend: "python"
max_batch_size: 16
input { name: "x" data_type: TYPE_INT64 dims: [ -1 ] }
output { name: "y" data_type: TYPE_INT64 dims: [ -1 ] }
instance_group { kind: KIND_CPU count: 2 }
dynamic_batching { }
"""


async def infer(channel: grpc.aio.Channel, value: int) -> int:
    data = await channel.unary_unary(PATH, None, None)(message("m", np.array([[value]])), timeout=60)
    return int.from_bytes(pb.ModelInferResponse.FromString(data).raw_output_contents[0], "little")


def signal_all(folder: Path, pid: int) -> None:
    """SIGTERM for the server and all its descendants, while a batch is executed; then let that go on."""
    while not (folder / "executing").exists():
        time.sleep(0.001)
    server = psutil.Process(pid)
    for process in (*server.children(recursive=True), server):
        process.send_signal(signal.SIGTERM)
    (folder / "go").touch()


def test_sigterm_for_every_process_loses_no_request(tmp_path: Path) -> None:
    add_model(tmp_path / "models", "m", MODEL, CONFIG)
    port = free_port()
    command = [sys.executable, "-m", "server", "serve", "--model-repository", tmp_path / "models", "--grpc-port"]
    server = ServerProcess([*command, str(port)], port, log=tmp_path / "log")

    async def ask_all() -> list[int]:
        async with grpc.aio.insecure_channel(server.address) as channel:
            asked = [asyncio.ensure_future(infer(channel, value)) for value in range(REQUESTS)]
            statistics = channel.unary_unary("/inference.GRPCInferenceService/ModelStatistics", None, None)
            await statistics(b"")  # behind them on the connection: the server has read them
            await asyncio.to_thread(signal_all, tmp_path / "models" / "m", server.pid)
            return await asyncio.gather(*asked)

    try:
        assert asyncio.run(ask_all()) == list(range(REQUESTS))
        assert psutil.Process(server.pid).wait(30) == 0
    finally:
        server.stop()
