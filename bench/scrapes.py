"""What scrapes of a server with many models cost other clients.

    python -m bench.scrapes                     500 models, a scrape each second, 6 rounds of 5 s of each kind in turn

Small requests come in a closed loop; the latencies are those of a probe that makes one call after the other. A scrape
requests OpenMetrics, as Prometheus does.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from bench import inferd, messages
from bench.overload import OK, Probe
from bench.processes import free_port
from bench.repository import Identity, write
from inferd_client.driver import Driver, Fixed

ACCEPT = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
REQUEST = messages.identity(64, "stub").request
KINDS = ("without", "with")


class Scraper:
    """Scrapes each second, inside a `with` block."""

    def __init__(self, url: str) -> None:
        self._request = urllib.request.Request(url, headers={"Accept": ACCEPT})
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scraper")
        self.seconds: list[float] = []
        self.size = 0

    def _run(self) -> None:
        while not self._stop.wait(1.0):
            start = time.perf_counter()
            with urllib.request.urlopen(self._request, timeout=30) as answer:
                self.size = len(answer.read())
            self.seconds.append(time.perf_counter() - start)

    def __enter__(self) -> Scraper:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()


def quantile(values: list[float], which: float) -> float:
    return sorted(values)[int(len(values) * which)] if values else float("nan")


def load(address: str, seconds: float) -> tuple[float, list[float]]:
    """Answers per second, and the probe's latencies in milliseconds."""
    probe = Probe(address)
    with Driver(address, connections=4) as driver, probe:
        report = driver.run(Fixed([REQUEST]), seconds=seconds, in_flight=8)
    return report.statuses.get(OK, 0) / report.seconds, probe.latencies.get(OK, [])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--models", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=5.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        names = ["stub", *(f"m{number}" for number in range(given.models - 1))]
        write(root / "models", [Identity(name, (("FP32", 1),), max_batch_size=8) for name in names])
        port = free_port()
        options = ("--metrics-port", str(port))
        server = inferd.start(root / "models", root / "log", options=options, patience=300.0)
        rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
        latencies: dict[str, list[float]] = {kind: [] for kind in KINDS}
        scrapes: list[float] = []
        size = 0
        try:
            for _ in range(given.rounds):
                for kind in KINDS:
                    if kind == "with":
                        with Scraper(f"http://127.0.0.1:{port}/metrics") as scraper:
                            rate, found = load(server.address, given.seconds)
                        scrapes += scraper.seconds
                        size = scraper.size
                    else:
                        rate, found = load(server.address, given.seconds)
                    rates[kind].append(rate)
                    latencies[kind] += found
        finally:
            server.stop()
    median = quantile(scrapes, 0.5)
    print(f"{given.models} models, a page of {size / 1e6:.1f} MB, {len(scrapes)} scrapes of {median:.3f} s")
    print("| scraper | answers/s | p50 ms | p99 ms | p99.9 ms | probes |\n|---|---|---|---|---|---|")
    for kind in KINDS:
        found = latencies[kind]
        shown = " | ".join(f"{quantile(found, which):.2f}" for which in (0.5, 0.99, 0.999))
        print(f"| {kind} | {sum(rates[kind]) / len(rates[kind]):,.0f} | {shown} | {len(found)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
