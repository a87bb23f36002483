"""Compare this tree with another one of this project in one run: rows of the benchmark table, in turn, round by round.

    python -m bench.beside FOLDER                     the other tree, built, with an environment in .venv
    python -m bench.beside FOLDER --only small python_chain [--rounds 7] [--seconds 2]

Each figure is the median of the rounds; of CPU the best round is shown, too. Other work on the machine disturbs both
trees alike.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from bench.peers import Inferd, InferdPython
from bench.works import Effort, Measure, Work, measure, workload, works
from inferd_client.driver import Driver


def run(work: Work, trees: dict[str, Path | None], folder: Path, effort: Effort) -> dict[str, list[Measure]]:
    """The rounds of a load, by tree."""
    kind = InferdPython if InferdPython in work.servers else Inferd
    found: dict[str, list[Measure]] = {name: [] for name in trees}
    with ExitStack() as stack:
        peers = {}
        for name, tree in trees.items():
            peer = kind(work.exchange, Path(tempfile.mkdtemp(dir=folder)))
            peer.tree = tree
            peers[name] = stack.enter_context(peer)
        loads = {name: workload(peer, work.exchange) for name, peer in peers.items()}
        for _ in range(effort.rounds):
            for name, peer in peers.items():
                with Driver(peer.address, connections=work.connections) as driver:
                    found[name].append(measure(peer, driver, loads[name], work.in_flight, effort))
    return found


def line(title: str, name: str, rounds: list[Measure], base: list[Measure]) -> str:
    cpu, before = (statistics.median(m.cpu_us for m in some) for some in (rounds, base))
    change = f" ({100 * (cpu / before - 1):+.1f} %)" if rounds is not base else ""
    cells = [f"{cpu:.2f}{change}", f"{min(m.cpu_us for m in rounds):.2f}"]
    cells += [
        f"{statistics.median(getattr(m, figure) for m in rounds):,.0f}" for figure in ("rate", "p50_us", "p99_us")
    ]
    return f"| {title} | {name} | {' | '.join(cells)} |"


def main() -> int:
    loads = {work.name: work for work in works() if Inferd in work.servers or InferdPython in work.servers}
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("tree", type=Path)
    parser.add_argument("--only", nargs="+", choices=loads, default=list(loads))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0)
    given = parser.parse_args()
    effort = Effort(seconds=given.seconds, rounds=given.rounds)
    trees = {"base": given.tree.resolve(), "now": None}
    print(f"load average {os.getloadavg()[0]:.1f}, {len(os.sched_getaffinity(0))} cores\n")
    print("| load | tree | CPU a request, µs, median | best | requests/s | p50, µs | p99, µs |")
    print("|---|---|---:|---:|---:|---:|---:|", flush=True)
    with tempfile.TemporaryDirectory(prefix="inferd-beside-") as folder:
        for name in given.only:
            found = run(loads[name], trees, Path(folder), effort)
            for tree, rounds in found.items():
                print(line(loads[name].title, tree, rounds, found["base"]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
