"""Clients beside each other: requests per second and CPU per request of one process, inferd_client and tritonclient.

    python -m bench.client              writes bench/results/client.md
    python -m bench.client --quick      one short round, to see that it works

The server is one process and the same for all; each client is a process of its own. Rounds alternate between the
clients, and the best of each counts. Both clients compare the tensor of every answer with the one sent. For comparison,
the load driver and plain sockets are measured, too: over the sockets another process sends the same bytes back, with a
system call for each message. For large messages, that is the cost of the system itself.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
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
    """Run a client under one load for some seconds; count the correct answers."""

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
        self.asked = 0.0  # seconds in `infer`, of all threads together

    def verify(self, result: Any) -> None:
        if not np.array_equal(result.as_numpy("OUTPUT0"), self.tensor):
            raise RuntimeError("a wrong answer")
        self.done += 1

    def measured(self, work: Callable[[], Any]) -> dict[str, float]:
        self.done, self.asked = 0, 0.0
        started, cpu = time.perf_counter(), time.process_time()
        self.ends = started + self.seconds
        work()
        elapsed, cpu = time.perf_counter() - started, time.process_time() - cpu
        return {
            "rate": self.done / elapsed,
            "cpu_us": cpu / self.done * 1e6,
            "round_us": (self.asked or elapsed) / self.done * 1e6,
        }

    def sync(self, _: int) -> dict[str, float]:
        with self.module.InferenceServerClient(self.address) as client:
            self.verify(client.infer(MODEL, self.inputs))
            return self.measured(lambda: self._ask(client))

    def _ask(self, client: Any) -> None:
        while (began := time.perf_counter()) < self.ends:
            result = client.infer(MODEL, self.inputs)
            self.asked += time.perf_counter() - began
            self.verify(result)

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


@dataclass(frozen=True, slots=True)
class Floor:
    """The figures of a client that does not read tensors: no client can do better.

    Attributes:
        round_us: the round trip with one in flight.
        cpu_us: CPU of the client's process for each of these requests.
        rate: requests per second with many in flight.
    """

    round_us: float
    cpu_us: float
    rate: float

    def better(self, other: Floor) -> Floor:
        """The best of both, each figure by itself."""
        return Floor(min(self.round_us, other.round_us), min(self.cpu_us, other.cpu_us), max(self.rate, other.rate))


def driven(address: str, size: int, seconds: float) -> Floor:
    """The load driver."""
    request = Fixed([messages.identity(size).request])
    with Driver(address) as driver:
        alone = driver.run(request, seconds=seconds)
        many = driver.run(request, in_flight=MANY, seconds=seconds)
    return Floor(alone.latency.mean, alone.driver_cpu_seconds / alone.requests * 1e6, many.rate)


ECHO = """
import socket, sys
listening, block = socket.create_server(("127.0.0.1", 0)), memoryview(bytearray(int(sys.argv[1])))
print(listening.getsockname()[1], flush=True)
connection, _ = listening.accept()
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while connection.recv_into(block, len(block), socket.MSG_WAITALL) == len(block):
    connection.sendall(block)
"""


def echoed(size: int, seconds: float) -> Floor:
    """Plain sockets: another process sends back each message when it has come."""
    (alone, cpu_us), (many, _) = (_echoes(size, count, seconds) for count in (1, MANY))
    return Floor(1e6 / alone, cpu_us, many)


def _echoes(size: int, count: int, seconds: float) -> tuple[float, float]:
    """Messages per second with this number in flight, and this process's CPU for each in microseconds."""
    message, block, free = bytes(size), bytearray(size), threading.Semaphore(count)
    with subprocess.Popen([sys.executable, "-c", ECHO, str(size)], stdout=subprocess.PIPE, text=True) as echo:
        assert echo.stdout is not None
        with socket.create_connection(("127.0.0.1", int(echo.stdout.readline()))) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            started, cpu, done = time.perf_counter(), time.process_time(), 0

            def send() -> None:
                while time.perf_counter() < started + seconds:
                    free.acquire()
                    connection.sendall(message)
                connection.shutdown(socket.SHUT_WR)

            if count > 1:
                threading.Thread(target=send).start()
                while connection.recv_into(block, size, socket.MSG_WAITALL) == size:
                    done += 1
                    free.release()
            while count == 1 and time.perf_counter() < started + seconds:
                connection.sendall(message)
                connection.recv_into(block, size, socket.MSG_WAITALL)
                done += 1
            elapsed, cpu = time.perf_counter() - started, time.process_time() - cpu
    return done / elapsed, cpu / done * 1e6


def import_ms(package: str) -> float:
    """Milliseconds to import the client, without numpy; the least of five."""
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
    floors: dict[tuple[int, str], Floor] = {}
    with tempfile.TemporaryDirectory() as folder:
        server = inferd.start(write(Path(folder) / "models", BENCH[:1]), Path(folder) / "log")
        try:
            for _ in range(rounds):
                for size in SIZES:
                    for name, floor in (
                        ("driver", driven(server.address, size, seconds / 2)),
                        ("sockets", echoed(size, seconds / 2)),
                    ):
                        floors[size, name] = floor.better(floors.get((size, name), floor))
                        print(size, name, floor, file=sys.stderr, flush=True)
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
    text = written(best, floors)
    print(text)
    if not arguments.quick:
        RESULT.write_text(text)


def written(best: dict[tuple[int, str, str], dict[str, float]], floors: dict[tuple[int, str], Floor]) -> str:
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
        most = max(best[size, title, "tritonclient"]["rate"] for title in LOADS)
        driver, sockets = floors[size, "driver"], floors[size, "sockets"]
        lines += [
            "",
            "Without looking at tensors:",
            "",
            f"| | round trip, 1 in flight | CPU then | {MANY} in flight: requests/s | of tritonclient's most |",
            "|---|---:|---:|---:|---:|",
            *(
                f"| {name} | {floor.round_us:.0f} µs | {floor.cpu_us:.1f} µs | {floor.rate:.0f} | "
                f"{floor.rate / most:.1f} x |"
                for name, floor in (("the load driver, in C", driver), ("plain sockets, an echo", sockets))
            ),
            "",
            f"Round trip of `infer` of `inferd_client`, 1 in flight, without the comparison of the tensors: "
            f"{our['round_us']:.0f} µs, {our['round_us'] / driver.round_us:.2f} x the driver's.",
        ]
    times = {package: import_ms(package) for package in CLIENTS}
    lines += ["", "`import ….grpc`: " + ", ".join(f"{package} {ms:.0f} ms" for package, ms in times.items()) + "."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
