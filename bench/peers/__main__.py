"""Compare this server, in one run, with those that people would use instead of it.

    python -m bench.peers --install       the environments of servers in Python, under ~/.cache/inferd-peers
    python -m bench.peers                 25 minutes; writes bench/results/peers.json and docs/performance.md
    python -m bench.peers --only starts   the same for some rows or parts, which replace those of an earlier run
    python -m bench.peers --quick         one short round of everything, to see that it works; writes nothing
    python -m bench.peers --page          docs/performance.md and its pictures from bench/results/peers.json

bench/README.md has the method. Servers that are not installed are named and left out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import grpc
import psutil

from bench import messages, system
from bench.peers import comparison, environments, page
from bench.peers.base import AbsentError, Peer
from bench.peers.comparison import INFERD_C, NATIVE, PAIRS, RATES, TRITON_C, WAYS, Load, Round, Way
from bench.works import QUICK, Effort

T = TypeVar("T")
FAILURES = (AbsentError, RuntimeError, ValueError, OSError, grpc.RpcError)
"""Errors of one way under one load: that way is left out of the row, and named."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Comparison:
    """A run: the servers that are there, and what was found.

    Args:
        effort: of each row.
        folder: for the files of servers.
        only: keys of loads and names of parts; empty for all.
    """

    def __init__(self, effort: Effort, folder: Path, only: set[str]) -> None:
        self._effort = effort
        self._folder = folder
        self._only = only
        self._size = 0  # bytes of the tensors that the servers expect
        self._stack = ExitStack()
        self._peers: dict[type[Peer], Peer] = {}
        self._missing: set[type[Peer]] = set()
        self.absent: list[str] = []
        self.versions: dict[str, str] = {}

    def wants(self, part: str) -> bool:
        return not self._only or part in self._only

    def serving(self, ways: Sequence[Way], size: int) -> list[tuple[Way, Peer]]:
        """The ways whose server is there, each with that server. Servers run until the next call with another size.

        A server that is not there is named once.
        """
        if size != self._size:
            self.close()
            self._size = size
        for server in dict.fromkeys(way.server for way in ways):
            if server in self._peers or server in self._missing:
                continue
            folder = Path(tempfile.mkdtemp(prefix=f"{server.__name__}-", dir=self._folder))
            peer = server(messages.identity(size), folder)
            try:
                self._peers[server] = self._stack.enter_context(peer)
                self.versions.setdefault(peer.name, peer.version())
            except (AbsentError, RuntimeError) as error:
                self._missing.add(server)
                self._leave_out(f"{server.name}: {error}")
        return [(way, self._peers[way.server]) for way in ways if way.server in self._peers]

    def close(self) -> None:
        """Stop the servers."""
        self._stack.close()
        self._peers.clear()

    def _leave_out(self, text: str) -> None:
        if text not in self.absent:
            self.absent.append(text)
            say(f"  LEFT OUT: {text[:600]}")

    def compare(self, load: Load) -> dict[str, list[Round]]:
        """Measure a load: first, in turns, the ways whose servers rest between turns; then the others, each alone."""
        say(load.title)
        found: dict[str, list[Round]] = {}
        self._measure(load, [way for way in load.ways if way.server.rests], found)
        for way in load.ways:
            if not way.server.rests:
                self._measure(load, [way], found)
                self.close()
        for name, rounds in found.items():
            best = page.best([asdict(each) for each in rounds])
            say(
                f"  {name:28} {best['cpu_us']:9.1f} µs CPU {best['rate']:10,.0f} /s  p99 {best['p99_us'] or 0:9,.0f} µs"
            )
        return found

    def _measure(self, load: Load, ways: Sequence[Way], found: dict[str, list[Round]]) -> None:
        serving = self.serving(ways, load.size)
        for _ in range(self._effort.rounds):
            for way, peer in tuple(serving):
                try:
                    if way.name not in found:
                        comparison.check(peer, way, load)
                    found.setdefault(way.name, []).append(comparison.measure(peer, way, load, self._effort.seconds))
                except FAILURES as error:
                    serving.remove((way, peer))
                    self._leave_out(f"{load.title}: {way.name}: {error}")

    def curves(self) -> dict[str, list[dict[str, Any]]]:
        """Open loops at rising rates, for each way as long as it keeps up."""
        say("64 bytes, open loop")
        found: dict[str, list[dict[str, Any]]] = {}
        ways = [way for way in WAYS if way.server.speaks_grpc and way.server.rests and not way.unix]
        serving = self.serving(ways, 64)
        for rate in RATES:
            load = Load("open", f"{rate}/s", (), 8, 8, rate=rate)
            for way, peer in tuple(serving):
                try:
                    rounds = [
                        comparison.measure(peer, way, load, self._effort.seconds) for _ in range(self._effort.rounds)
                    ]
                except RuntimeError as error:
                    serving.remove((way, peer))
                    say(f"  {way.name} ends at {rate}/s: {str(error)[:200]}")
                    continue
                middle = sorted(rounds, key=lambda each: each.p99_us or 0.0)[len(rounds) // 2]
                if middle.kept_up:
                    found.setdefault(way.name, []).append({"offered": rate, **asdict(middle)})
                else:
                    serving.remove((way, peer))
        return found

    def each(self, title: str, ways: Sequence[Way], measure: Callable[[Peer, Way], T]) -> dict[str, T]:
        """A figure of each way, one after the other."""
        say(title)
        found: dict[str, T] = {}
        for way, peer in self.serving(ways, 64):
            found[way.name] = measure(peer, way)
            say(f"  {way.name:28} {found[way.name]}")
        return found

    def starts(self) -> dict[str, dict[str, float | None]]:
        """Start to the first answer, each server alone; the quicker of two starts."""
        say("from the start to the first answer")
        found: dict[str, dict[str, float | None]] = {}
        self.close()
        for way in (NATIVE, TRITON_C, *(way for way in WAYS if way.server not in (NATIVE.server, TRITON_C.server))):
            if not way.server.speaks_grpc:
                continue
            try:
                runs = [comparison.first_response(way, self._folder) for _ in range(2)]
            except FAILURES as error:
                self._leave_out(f"{way.name}: {error}")
                continue
            found[way.server.name] = min(runs, key=lambda each: each["seconds"] or 0.0)
            say(f"  {way.server.name:28} {found[way.server.name]}")
        return found

    def run(self, found: dict[str, Any]) -> None:
        """Measure; `found` gets each part as soon as it is there."""
        seconds = self._effort.seconds
        pair = (INFERD_C, TRITON_C)
        parts: dict[str, Callable[[], Any]] = {
            "curves": self.curves,
            "overload": lambda: self.each("overload", pair, lambda p, _: comparison.overload(p, 2 * seconds)),
            "loading": lambda: self.each(
                "while models load", PAIRS, lambda p, w: comparison.while_loading(p, w, 2 * seconds)
            ),
            "starts": self.starts,
        }
        found |= {
            "date": today(),
            "machine": system.describe(),
            "load_average_before": psutil.getloadavg(),
            "effort": asdict(self._effort),
        }
        for load in comparison.closed_loops():
            if self.wants(load.key):
                ways = {name: [asdict(each) for each in rounds] for name, rounds in self.compare(load).items()}
                found.setdefault("rows", {})[load.key] = {"title": load.title, "date": today(), "ways": ways}
        for name, part in parts.items():
            if self.wants(name):
                found[name] = part()
        found["versions"] = found.get("versions", {}) | self.versions | system.versions()
        found["absent"] = sorted({*found.get("absent", ()), *self.absent} if self._only else self.absent)


def today() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")


def main() -> int:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="bench.peers", description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--install", action="store_true", help="install the peers in Python, then end")
    parser.add_argument("--page", action="store_true", help="write the page from the recorded results, then end")
    parser.add_argument("--quick", action="store_true", help="one short round of each, results not kept")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="only these; others stay as recorded")
    parser.add_argument("--rounds", type=int, default=Effort().rounds)
    given = parser.parse_args()
    if given.install:
        failed = environments.install()
        print("not installed: " + ", ".join(failed) if failed else "all are installed")
        return bool(failed)
    if given.page:
        page.write(json.loads(page.RESULTS.read_text()))
        return 0
    folder = Path(tempfile.mkdtemp(prefix="inferd-peers-"))
    effort = QUICK if given.quick else replace(Effort(), rounds=given.rounds)
    run = Comparison(effort, folder, set(given.only))
    found: dict[str, Any] = {}
    if given.only and not given.quick and page.RESULTS.exists():
        found = json.loads(page.RESULTS.read_text())
    try:
        run.run(found)
    finally:
        run.close()
        shutil.rmtree(folder, ignore_errors=True)
        if not given.quick and "rows" in found:  # also those of a run that has failed later
            page.RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    if given.quick:
        print(json.dumps(found, indent=1))
        return 0
    page.write(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
