"""What a client notices while other models are loaded and unloaded.

    nice -n -5 python -m bench.loading                 20 s for each row
    python -m bench.loading --seconds 5 --rate 500

One client sends 64 bytes to an identity model at fixed times, whether earlier requests are answered or not, so that a
stall counts for each request that it delays. An operator loads and unloads one model again and again: none (the base),
a model of the identity backend, the demo's CNN as ONNX and as TorchScript, a model in Python. A framework's first load
imports it into the running server, and has a row of its own; a second row is for a server that imported the framework
before it served. Times are the client's, in milliseconds; all rows contain the client's wake-ups on a busy machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench import digits, inferd, messages
from bench.processes import ServerProcess
from bench.repository import Identity, write
from inferd_client.driver import Driver, Fixed
from inferd_client.driver.report import Report
from inferd_client.grpc import InferenceServerClient

PYTHON = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""
PYTHON_CONFIG = """backend: "python"
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
"""
LOADED = {
    "identity": "identity",
    "ONNX": "digits_onnx",
    "TorchScript": "digits_torchscript",
    "Python": "python",
}
IMPORTED = {"ONNX": "onnxruntime", "TorchScript": "pytorch"}
"""The backends whose frameworks the server's own process imports."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Of each row."""

    seconds: float
    rate: float  # requests a second


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    loads: int
    report: Report

    def __str__(self) -> str:
        latency = self.report.latency
        times = (latency.p50, latency.p99, latency.p999, latency.max)
        return f"| {self.name} | {self.loads} | {' | '.join(f'{us / 1000:.2f}' for us in times)} |"


class Operator:
    """Loads and unloads a model again and again, on a thread of its own, until `end`."""

    def __init__(self, address: str, model: str, loads: int) -> None:
        self.loads = 0
        self._client = InferenceServerClient(address)
        self._model = model
        self._end = threading.Event()
        self._most = loads
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.is_set() and self.loads != self._most:
            self._client.load_model(self._model)
            self._client.unload_model(self._model)
            self.loads += 1

    def end(self) -> int:
        """Loads that were made."""
        self._end.set()
        self._thread.join()
        self._client.close()
        return self.loads


def repository(folder: Path) -> Path:
    """The demo's models, two of the identity backend, one of which stays loaded, and one in Python."""
    root = digits.make(folder / "models")
    write(root, [Identity(name, (("FP32", 1),)) for name in ("small", "identity")])
    (root / "python" / "1").mkdir(parents=True)
    (root / "python" / "config.pbtxt").write_text(PYTHON_CONFIG)
    (root / "python" / "1" / "model.py").write_text(PYTHON)
    return root


@contextlib.contextmanager
def serving(root: Path, log: Path, options: list[str]) -> Iterator[ServerProcess]:
    """A server, until the block ends."""
    server = inferd.start(root, log, options=options)
    try:
        yield server
    finally:
        server.stop()


def row(name: str, address: str, effort: Effort, model: str = "", loads: int = -1) -> Row:
    """The client's times while the operator loads and unloads `model`, `loads` times or until the row ends."""
    exchange = messages.identity(64, "small")
    operator = Operator(address, model, loads) if model else None
    with Driver(address) as driver:
        report = driver.run(
            Fixed([exchange.request], [exchange.response]), seconds=effort.seconds, rate=effort.rate, in_flight=1000
        )
    made = 0 if operator is None else operator.end()
    assert report.correct == report.requests, report.samples
    return Row(name, made, report)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.loading", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="for each row")
    parser.add_argument("--rate", type=float, default=1000.0, help="requests a second")
    given = parser.parse_args()
    effort = Effort(given.seconds, given.rate)
    print(f"load average {os.getloadavg()[0]:.1f}, {len(os.sched_getaffinity(0))} cores\n")
    print("| beside | loads | p50, ms | p99 | p99.9 | max |\n|---|---:|---:|---:|---:|---:|", flush=True)
    with tempfile.TemporaryDirectory(prefix="inferd-loading-") as folder:
        root, log = repository(Path(folder)), Path(folder, "log")
        options = ["--model-control-mode", "explicit", "--load-model", "small"]
        with serving(root, log, options) as server:
            print(row("nothing", server.address, effort), flush=True)
            for what, model in LOADED.items():
                print(row(f"the first load: {what}", server.address, effort, model, 1), flush=True)
            for what, model in LOADED.items():
                print(row(f"loads and unloads: {what}", server.address, effort, model), flush=True)
        options += [f"--backend-config={backend},preload=true" for backend in IMPORTED.values()]
        with serving(root, log, options) as server:
            for what in IMPORTED:
                name = f"the first load, imported before: {what}"
                print(row(name, server.address, effort, LOADED[what], 1), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
