"""The benchmark table: the server and its peers, measured side by side in one run.

    python -m bench.run             everything; writes bench/results/DATE.{json,md}
    python -m bench.run --quick     one short round of each, to see that it works
    python -m bench.run --only small idle

See README.md for what each row means and how it is measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from bench import digits, messages, python_models, system, table
from bench.messages import Exchange
from bench.peers import AbsentError, GrpcAioEcho, Inferd, InferdGrpcio, Nghttpd, Peer, Triton
from bench.peers.drivers import h2load, perf_analyzer
from bench.repository import WINDOWS_US
from bench.works import MIB, PYTHON, QUICK, Effort, Measure, Row, Work, measure, workload, works
from inferd_client.driver import Driver, Fixed

RESULTS = Path(__file__).parent / "results"
IDLE_CONNECTIONS = 1000


@dataclass(slots=True)
class Bench:
    """A run of the benchmarks, and its results so far."""

    effort: Effort
    folder: Path
    chosen: set[str]  # names of servers; empty for all
    rows: list[Row] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)  # results that are not rows
    versions: dict[str, str] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def fail(self, work: Work, error: RuntimeError) -> None:
        """A peer that fails under a load is dropped from it, and the results say so."""
        self.absent.append(f"{work.title}: {error}")
        self.say(f"  FAILED: {error}")

    def start(self, stack: ExitStack, servers: Iterable[type[Peer]], exchange: Exchange) -> list[Peer]:
        """Start the installed servers; report the others as absent."""
        started = []
        for server in servers:
            if self.chosen and server.name not in self.chosen:
                continue
            peer = server(exchange, Path(tempfile.mkdtemp(prefix=f"{server.__name__}-", dir=self.folder)))
            try:
                started.append(stack.enter_context(peer))
            except AbsentError as error:
                if str(error) not in self.absent:
                    self.absent.append(str(error))
                self.say(f"  ABSENT: {server.name}: {error}")
                continue
            self.versions.setdefault(peer.name, peer.version())
        return started

    def run_work(self, work: Work) -> None:
        """Run all servers of a work; each round measures one after the other."""
        self.say(f"{work.title}")
        with ExitStack() as stack:
            peers = self.start(stack, work.servers, work.exchange)
            loads = [workload(peer, work.exchange) for peer in peers]
            rounds: list[list[Measure]] = [[] for _ in peers]
            out: set[Peer] = set()
            for _ in range(self.effort.rounds):
                for peer, load, found in zip(peers, loads, rounds, strict=True):
                    if peer in out:
                        continue
                    try:
                        with Driver(peer.address, connections=work.connections) as driver:
                            found.append(measure(peer, driver, load, work.in_flight, self.effort))
                    except RuntimeError as error:
                        if type(peer) is Inferd:
                            raise
                        out.add(peer)
                        self.fail(work, error)
            for peer, found in zip(peers, rounds, strict=True):
                if not found:
                    continue
                row = Row(work.name, peer.name, work.connections, work.in_flight, found)
                self.rows.append(row)
                best = row.best
                self.say(
                    f"  {peer.name:22} {best['cpu_us']:9.1f} µs CPU {best['rate']:10.0f} /s  "
                    f"p50 {best['p50_us']:8.0f} µs  p99 {best['p99_us']:8.0f} µs"
                )

    def run_second_drivers(self) -> None:
        """Measure the same load with other projects' drivers, to check ours."""
        self.say("independent drivers, 1 connection x 32")
        exchange = messages.identity(64)
        found: dict[str, dict[str, float]] = {}
        with ExitStack() as stack:
            for peer in self.start(stack, (Nghttpd, GrpcAioEcho, Triton, Inferd), exchange):
                rates = found.setdefault(peer.name, {})
                drivers: dict[str, Callable[[], float]] = {"h2load": partial(self.h2load_rate, peer)}
                if isinstance(peer, Triton | Inferd):
                    drivers["perf_analyzer"] = partial(
                        perf_analyzer, peer.address, "identity", concurrency=32, shape="INPUT0:16"
                    )
                for name, drive in drivers.items():
                    try:
                        rates[name] = drive()
                    except (AbsentError, RuntimeError) as error:
                        self.absent.append(f"{name} against {peer.name}: {error}")
                        self.say(f"  ABSENT: {self.absent[-1]}")
                self.say(f"  {peer.name:22} {rates}")
        self.facts["second_drivers"] = found

    def h2load_rate(self, peer: Peer) -> float:
        """The best of the rounds."""
        count = max(2000, round(10_000 * self.effort.seconds))
        return max(
            h2load(
                peer.address, peer.exchange.request, requests=count, connections=1, in_flight=32, folder=self.folder
            ).rate
            for _ in range(self.effort.rounds)
        )

    def run_idle(self) -> None:
        """Connections that have served one request each and are then idle."""
        self.say(f"{IDLE_CONNECTIONS} idle connections")
        system.raise_file_limit()
        exchange = messages.identity(64)
        found: dict[str, dict[str, float]] = {}
        with ExitStack() as stack:
            for peer in self.start(stack, (Nghttpd, GrpcAioEcho, Inferd, InferdGrpcio), exchange):
                load = workload(peer, exchange)
                with Driver(peer.address) as driver:
                    driver.run(load, requests=2000, in_flight=8)
                before = peer.server.rss()
                with Driver(peer.address, connections=IDLE_CONNECTIONS) as driver:
                    driver.run(load, requests=IDLE_CONNECTIONS)
                    rss = (peer.server.rss() - before) / IDLE_CONNECTIONS
                    driver.idle(0.5)
                    cpu = peer.cpu_seconds()
                    driver.idle(self.effort.idle_seconds)
                    cpu = peer.cpu_seconds() - cpu
                found[peer.name] = {"rss_per_connection": rss, "cpu_seconds": cpu, "seconds": self.effort.idle_seconds}
                self.say(f"  {peer.name:22} {rss / 1024:.1f} KiB a connection, {cpu * 1e3:.0f} ms CPU")
        self.facts["idle"] = found

    def run_python_memory(self) -> None:
        """The private memory of a Python model's worker before its first request, and that of a bare interpreter."""
        self.say("workers of Python models that have not been asked anything")
        found: dict[str, float] = {}
        with ExitStack() as stack:
            bare = stack.enter_context(python_models.bare_interpreter())
            found["bare interpreter"] = bare
            for peer in self.start(stack, PYTHON, messages.identity(64)):
                found[peer.name] = min(peer.server.workers_memory())
            for name, size in found.items():
                self.say(f"  {name:22} {size / MIB:.1f} MiB")
        self.facts["python_memory"] = found

    def run_window(self) -> None:
        """How punctually a batch closes after max_queue_delay_microseconds: single requests wait it out."""
        self.say("batch window")
        found: dict[str, dict[str, float]] = {}
        with ExitStack() as stack:
            peers = self.start(stack, (Inferd,), messages.identity(64))
            if not peers:
                return
            (peer,) = peers
            driver = stack.enter_context(Driver(peer.address))
            base = self._round_trip(driver, "shared")
            for us in WINDOWS_US:
                p50, p99 = self._round_trip(driver, f"window_{us}")
                found[str(us)] = {"p50_us": p50 - base[0], "p99_us": p99 - base[0]}
                self.say(f"  {us:5} µs: waits {p50 - base[0]:7.0f} µs at p50, {p99 - base[0]:7.0f} µs at p99")
        self.facts["window"] = found

    def _round_trip(self, driver: Driver, model: str) -> tuple[float, float]:
        report = driver.run(Fixed([messages.identity(64, model).request]), seconds=self.effort.seconds / 2)
        if report.wrong:
            raise RuntimeError(f"{model}: {report}")
        return report.latency.p50, report.latency.p99

    def run_digits(self) -> None:
        """What batching gains for a real model, in both formats."""
        self.say("digits CNN, 64 requests in flight")
        try:
            found = digits.run(self.folder / "digits", self.effort.seconds, self.effort.rounds)
        except AbsentError as error:
            self.absent.append(str(error))
            self.say(f"  ABSENT: {error}")
            return
        for name, figures in found.items():
            self.say(f"  {name:22} {figures['rate']:8.0f} /s, {figures['cpu_us']:.0f} µs CPU")
        self.facts["digits"] = found


def run(only: set[str], chosen: set[str], effort: Effort) -> dict[str, Any]:
    """Run these parts with these servers (by default all) and return the results."""
    load_before = psutil.getloadavg()
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="inferd-bench-"))
    bench = Bench(effort, folder, chosen)
    parts: dict[str, Callable[[], None]] = {work.name: partial(bench.run_work, work) for work in works()}
    parts |= {
        "drivers": bench.run_second_drivers,
        "idle": bench.run_idle,
        "window": bench.run_window,
        "python_memory": bench.run_python_memory,
        "digits": bench.run_digits,
    }
    unknown = only - parts.keys()
    if unknown:
        raise SystemExit(f"unknown part: {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    try:
        for name, part in parts.items():
            if not only or name in only:
                part()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "minutes": round((time.monotonic() - started) / 60, 1),
        "machine": system.describe(),
        "load_average_before": load_before,
        "versions": bench.versions | system.versions(),
        "effort": asdict(effort),
        "rows": [asdict(row) | {"best": row.best} for row in bench.rows],
        "facts": bench.facts,
        "absent": bench.absent,
    }


def main() -> int:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one short round of each, results not kept")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="only these parts, results not kept")
    parser.add_argument("--server", nargs="+", default=[], metavar="NAME", help="only these servers, results not kept")
    parser.add_argument("--keep", action="store_true", help="keep the results of a quick or partial run too")
    arguments = parser.parse_args()
    results = run(set(arguments.only), set(arguments.server), QUICK if arguments.quick else Effort())
    text = table.markdown(results, {work.name: work.title for work in works()})
    print(text)
    if arguments.keep or not (arguments.quick or arguments.only or arguments.server):
        RESULTS.mkdir(exist_ok=True)
        stem = results["date"][:16].replace(":", "")
        (RESULTS / f"{stem}.json").write_text(json.dumps(results, indent=1) + "\n")
        (RESULTS / f"{stem}.md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
