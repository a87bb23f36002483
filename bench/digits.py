"""The demo's digits CNN under 64 requests in flight, with dynamic batching and without, in both formats."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

from google.protobuf import text_format

from bench import inferd, messages
from bench.peers import AbsentError
from bench.processes import ServerProcess
from inferd_client.driver import Driver, Fixed
from inferd_client.pb import model_config_pb2 as config_pb

ROOT = Path(__file__).parent.parent
MAKE_REPOSITORY = ROOT / "examples" / "digits" / "make_repository.py"
CONNECTIONS, IN_FLIGHT = 8, 8
BATCHING = re.compile(r"dynamic_batching\s*\{[^{}]*\}")


def run(folder: Path, seconds: float, rounds: int) -> dict[str, dict[str, float]]:
    """Measure each model of the demo with batching and as `NAME_unbatched`; return "NAME on" and "NAME off" -> figures.

    Raises:
        AbsentError: the demo or what it needs is not here.
    """
    repository = make(folder / "models")
    names = sorted(path.parent.name for path in repository.glob("digits*/config.pbtxt"))
    for name in names:
        add_unbatched(repository / name)
    server = inferd.start(repository, folder / "log", patience=120)
    try:
        found = {}
        for name in names:
            for state, model in (("on", name), ("off", f"{name}_unbatched")):
                found[f"{name} {state}"] = measure(server, image_request(repository / name, model), seconds, rounds)
        return found
    finally:
        server.stop()


def make(repository: Path) -> Path:
    """The demo's repository."""
    if not MAKE_REPOSITORY.exists():
        raise AbsentError("digits: examples/digits/make_repository.py")
    done = subprocess.run([sys.executable, str(MAKE_REPOSITORY), str(repository)], capture_output=True, text=True)
    if done.returncode != 0:
        raise AbsentError(f"digits: the demo's repository cannot be made: {done.stderr[-500:]}")
    return repository


def add_unbatched(model: Path) -> None:
    """A copy of the model that is given one request at a time."""
    copy = model.with_name(f"{model.name}_unbatched")
    shutil.copytree(model, copy)
    config = (copy / "config.pbtxt").read_text()
    config = BATCHING.sub("", config).replace(f'"{model.name}"', f'"{copy.name}"', 1)
    (copy / "config.pbtxt").write_text(config)


def image_request(folder: Path, model: str) -> bytes:
    """A request to `model` with one image, as the configuration in this folder wants it."""
    config = text_format.Parse((folder / "config.pbtxt").read_text(), config_pb.ModelConfig())
    (tensor,) = config.input
    shape = [1, *tensor.dims]
    return messages.request(model, {tensor.name: ("FP32", shape, messages.floats(math.prod(shape)))})


def measure(server: ServerProcess, request: bytes, seconds: float, rounds: int) -> dict[str, float]:
    """The best of the rounds."""
    rates, cpus, p99s = [], [], []
    with Driver(server.address, connections=CONNECTIONS) as driver:
        driver.run(Fixed([request]), in_flight=IN_FLIGHT, seconds=0.3)
        for _ in range(rounds):
            before = server.cpu_seconds()
            report = driver.run(Fixed([request]), in_flight=IN_FLIGHT, seconds=seconds)
            if report.wrong or report.lost:
                raise RuntimeError(f"digits: {report}")
            rates.append(report.rate)
            cpus.append((server.cpu_seconds() - before) / report.requests * 1e6)
            p99s.append(report.latency.p99)
    return {"rate": max(rates), "cpu_us": min(cpus), "p99_us": min(p99s)}
