"""Clients beside each other: requests per second and CPU per request of one process, inferd_client and tritonclient.

    python -m bench.client              writes bench/results/client.md
    python -m bench.client --quick      one short round, to see that it works

The server is one process and the same for all; each client is a process of its own. Rounds alternate between the
clients, and the best of each is taken. The tensor of every answer is compared with what was sent, which both pay for.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench import inferd, messages, system
from bench.repository import BENCH, write
from inferd_client.driver import Driver, Fixed

RESULT = Path(__file__).parent / "results" / "client.md"
CLIENTS = ("tritonclient", "inferd_client")
SIZES = (64, 600_000)
MANY = 32
LOADS = {
    "`infer`, 1 in flight": ("sync", 1),
    f"`infer` in {MANY} threads": ("threads", MANY),
    f"`async_infer`, {MANY} in flight": ("callbacks", MANY),
    "aio `infer`, 1 in flight": ("aio", 1),
    f"aio `infer`, {MANY} in flight": ("aio", MANY),
}
MODEL = "identity"


class Load:
    """A client under one load for some seconds; counts what came back right."""

    def __init__(self, package: str, address: str, size: int, seconds: float) -> None:
        self.module = importlib.import_module(f"{package}.grpc")
        self.aio = importlib.import_module(f"{package}.grpc.aio")
        self.address = address
        self.tensor = np.arange(size // 4, dtype=np.float32).reshape(1, -1)
        self.inputs = [self.module.InferInput("INPUT0", list(self.tensor.shape), "FP32")]
        self.inputs[0].set_data_from_numpy(self.tensor)
        self.seconds = seconds
        self.done = 0
        self.ends = 0.0

    def verify(self, result: Any) -> None:
        if not np.array_equal(result.as_numpy("OUTPUT0"), self.tensor):
            raise RuntimeError("a wrong answer")
        self.done += 1

    def measured(self, work: Callable[[], Any]) -> dict[str, float]:
        self.done = 0
        started, cpu = time.perf_counter(), time.process_time()
        self.ends = started + self.seconds
        work()
        elapsed, cpu = time.perf_counter() - started, time.process_time() - cpu
        return {"rate": self.done / elapsed, "cpu_us": cpu / self.done * 1e6, "round_us": elapsed / self.done * 1e6}

    def sync(self, _: int) -> dict[str, float]:
        with self.module.InferenceServerClient(self.address) as client:
            self.verify(client.infer(MODEL, self.inputs))
            return self.measured(lambda: self._ask(client))

    def _ask(self, client: Any) -> None:
        while time.perf_counter() < self.ends:
            self.verify(client.infer(MODEL, self.inputs))

    def threads(self, count: int) -> dict[str, float]:
        with self.module.InferenceServerClient(self.address) as client:
            self.verify(client.infer(MODEL, self.inputs))

            def work() -> None:
                running = [threading.Thread(target=self._ask, args=(client,)) for _ in range(count)]
                for each in running:
                    each.start()
                for each in running:
                    each.join()

            return self.measured(work)

    def callbacks(self, count: int) -> dict[str, float]:
        free, wrong = threading.Semaphore(count), []

        def told(result: Any, error: Any) -> None:
            try:
                if error is not None:
                    raise error
                self.verify(result)
            except Exception as found:
                wrong.append(found)
            free.release()

        def work() -> None:
            while time.perf_counter() < self.ends and not wrong:
                free.acquire()
                client.async_infer(MODEL, self.inputs, told)
            for _ in range(count):
                free.acquire()

        with self.module.InferenceServerClient(self.address) as client:
            self.verify(client.infer(MODEL, self.inputs))
            found = self.measured(work)
        if wrong:
            raise wrong[0]
        return found

    def aio_load(self, count: int) -> dict[str, float]:
        async def loop() -> None:
            async with self.aio.InferenceServerClient(self.address) as client:

                async def ask() -> None:
                    while time.perf_counter() < self.ends:
                        self.verify(await client.infer(MODEL, self.inputs))

                await asyncio.gather(*(ask() for _ in range(count)))

        return self.measured(lambda: asyncio.run(loop()))


def child(package: str, address: str, size: int, kind: str, count: int, seconds: float) -> None:
    load = Load(package, address, size, seconds)
    print(
        json.dumps(
            {"sync": load.sync, "threads": load.threads, "callbacks": load.callbacks, "aio": load.aio_load}[kind](count)
        )
    )


def run(package: str, address: str, size: int, kind: str, count: int, seconds: float) -> dict[str, float]:
    """One round, in a process of its own."""
    command = [sys.executable, "-m", "bench.client", "--child", package, address, str(size), kind, str(count)]
    done = subprocess.run([*command, str(seconds)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return dict(json.loads(done.stdout))


def driven(address: str, size: int, seconds: float) -> tuple[float, float]:
    """The load driver, which looks at no tensor: the round trip with one in flight, in microseconds, and requests per
    second with many."""
    request = Fixed([messages.identity(size).request])
    with Driver(address) as driver:
        alone = driver.run(request, seconds=seconds).latency.mean
        return alone, driver.run(request, in_flight=MANY, seconds=seconds).rate


def import_ms(package: str) -> float:
    """What importing the client takes, in milliseconds, numpy not counted if it imports that; the least of five."""
    code = f"import time; t = time.perf_counter(); import {package}.grpc; print((time.perf_counter() - t) * 1e3)"
    return min(float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--child", nargs=6)
    arguments = parser.parse_args()
    if arguments.child:
        package, address, size, kind, count, seconds = arguments.child
        child(package, address, int(size), kind, int(count), float(seconds))
        return
    seconds, rounds = (0.3, 1) if arguments.quick else (2.0, 3)
    best: dict[tuple[int, str, str], dict[str, float]] = {}
    driver: dict[int, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        server = inferd.start(write(Path(folder) / "models", BENCH[:1]), Path(folder) / "log")
        try:
            for _ in range(rounds):
                for size in SIZES:
                    alone, many = driven(server.address, size, seconds / 2)
                    least, most = driver.get(size, (alone, many))
                    driver[size] = min(least, alone), max(most, many)
                    for title, (kind, count) in LOADS.items():
                        for package in CLIENTS:
                            one = run(package, server.address, size, kind, count, seconds)
                            kept = best.setdefault((size, title, package), one)
                            kept["rate"] = max(kept["rate"], one["rate"])
                            kept["cpu_us"] = min(kept["cpu_us"], one["cpu_us"])
                            kept["round_us"] = min(kept["round_us"], one["round_us"])
                            print(size, title, package, one, file=sys.stderr, flush=True)
        finally:
            server.stop()
    text = written(best, driver)
    print(text)
    if not arguments.quick:
        RESULT.write_text(text)


def written(best: dict[tuple[int, str, str], dict[str, float]], driver: dict[int, tuple[float, float]]) -> str:
    """The page of results."""
    machine, versions = system.describe(), system.versions()
    lines = [
        "# Clients beside each other",
        "",
        f"`python -m bench.client`, commit {system.source_version()}, {time.strftime('%Y-%m-%d')}: {machine['cpu']}, "
        f"{machine['cores']} cores, which the server and the client share; Python {versions['python']}, grpcio "
        f"{versions['grpcio']}. One process, one connection; identity model; every answer's tensor is compared. "
        "The best of three rounds of 2 s, for each figure by itself.",
    ]
    for size in SIZES:
        lines += [
            "",
            f"## {size} bytes there and back",
            "",
            "| load | tritonclient: requests/s | CPU | inferd_client: requests/s | CPU | requests/s | CPU |",
            "|---|---:|---:|---:|---:|---:|---:|",
        ]
        for title in LOADS:
            their, our = (best[size, title, package] for package in CLIENTS)
            each = " | ".join(f"{found['rate']:.0f} | {found['cpu_us']:.1f} µs" for found in (their, our))
            more, less = our["rate"] / their["rate"], their["cpu_us"] / our["cpu_us"]
            lines.append(f"| {title} | {each} | {more:.1f} x | 1/{less:.1f} |")
        our = best[size, "`infer`, 1 in flight", "inferd_client"]
        lines += [
            "",
            f"Round trip, 1 in flight: the load driver, in C, {driver[size][0]:.0f} µs; `inferd_client` "
            f"{our['round_us']:.0f} µs, {our['round_us'] / driver[size][0]:.2f} x. "
            f"The load driver with {MANY} in flight, which looks at no tensor: {driver[size][1]:.0f} requests/s.",
        ]
    times = {package: import_ms(package) for package in CLIENTS}
    lines += ["", "`import ….grpc`: " + ", ".join(f"{package} {ms:.0f} ms" for package, ms in times.items()) + "."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
