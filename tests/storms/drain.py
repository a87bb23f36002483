"""SIGTERM with calls in flight, again and again: the server answers every accepted call, and ends cleanly.

    python -m tests.storms.drain                      50 times 8 connections with 16 calls each; a model takes 20 ms
    python -m tests.storms.drain --door grpcio --times 20
    python -m tests.storms.drain --slow --times 1000  slow readers behind a delaying proxy, up to 16 MiB (slow_drain.py)
    python -m tests.storms.drain --envoy 60           the same file: Envoy's connections end by their age

A connection keeps its calls in flight until the server says GOAWAY. What must hold, each time: no call is lost or
reset, every status is OK, every answer has its bytes, the server's exit status is 0 and it left no native object.
The summary is printed as JSON; the exit status is 0 when all of it holds.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import inferd, messages
from bench.repository import GATHER, Identity, write
from inferd_client.driver import Driver, Fixed
from tests.storms import slow_drain
from tests.storms.soak import LIVE_LINE

MODEL = Identity("drained", (("FP32", 1),), instances=2, parameters=GATHER | {"delay_us": "20000"})
EARLIEST, LATEST = 0.1, 0.4  # seconds into the load at which the signal comes


@dataclass(frozen=True, slots=True)
class Stop:
    """One server's end."""

    requests: int
    faults: tuple[str, ...]
    seconds: float  # from the signal to the end of the process


def stop_once(folder: Path, door: str, connections: int, in_flight: int, after: float) -> Stop:
    """Start a server, load it, stop it `after` seconds into the load, and judge."""
    log = folder / "log"
    server = inferd.start(write(folder / "models", [MODEL]), log, door=door)
    exchange = messages.identity(64, MODEL.name)
    ended: list[float] = []

    def terminate() -> None:
        begin = time.monotonic()
        status = server.stop()
        ended.extend((time.monotonic() - begin, status))

    with Driver(server.address, connections=connections) as driver:
        timer = threading.Timer(after, terminate)
        timer.start()
        report = driver.run(Fixed([exchange.request], [exchange.response]), in_flight=in_flight, seconds=after + 5)
        timer.join()
    seconds, status = ended
    live = LIVE_LINE.search(log.read_text(errors="replace"))
    faults = [f"{count} {what}" for what, count in (("lost", report.lost), ("reset", report.reset)) if count]
    faults += [f"{count} wrong: {reason}" for reason, count in report.wrong.items()]
    faults += [f"{count} with status {code}" for code, count in report.statuses.items() if code != 0]
    if status != 0:
        faults.append(f"the server ended with {status:g}")
    if live is None or any(json.loads(live[1]).values()):
        faults.append(f"native objects are left: {live and live[1]}")
    return Stop(report.requests, tuple(faults), seconds)


def main() -> int:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--door", choices=inferd.DOORS, default="native")
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--in-flight", type=int, default=16, help="on each connection")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--envoy", type=float, metavar="SECONDS")
    arguments = parser.parse_args()
    if arguments.slow or arguments.envoy:
        slow, seconds, seed = arguments.slow, arguments.envoy, arguments.seed
        found = slow_drain.run(arguments.times, seed) if slow else slow_drain.run_envoy(seconds, seed)
        print(json.dumps(found, indent=2))
        return 1 if found["lost"] else 0
    moments = random.Random(arguments.seed)
    stops = []
    with tempfile.TemporaryDirectory(prefix="inferd-drain-") as folder:
        for _ in range(arguments.times):
            after = moments.uniform(EARLIEST, LATEST)
            stops.append(stop_once(Path(folder), arguments.door, arguments.connections, arguments.in_flight, after))
    result: dict[str, Any] = {
        "door": arguments.door,
        "times": len(stops),
        "outstanding": arguments.connections * arguments.in_flight,
        "requests": sum(stop.requests for stop in stops),
        "slowest_stop_seconds": max(stop.seconds for stop in stops),
        "faults": [asdict(stop) for stop in stops if stop.faults],
    }
    print(json.dumps(result, indent=2))
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
