"""The printed and written results of a run."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inferd.server.observe.escaping import visible
from inferd.server.tools.perf.measuring import PARTS, Level
from inferd.server.tools.tables import table

BAR = 50
ROWS = 16
UNITS = {"concurrency": "in flight", "rate": "requests/s due", "periodic_concurrency": "requests in periods"}
"""The unit of a level, by kind."""
SERVER = {
    "queue": "Server Queue",
    "input": "Server Compute Input",
    "compute": "Server Compute Infer",
    "output": "Server Compute Output",
}
"""By part of a request's time in the server, perf_analyzer's column."""
TOKENS = {"time_to_first_token": "time to first token", "inter_token_latency": "inter-token latency"}
SHARES = ("mean", "p50", "p90", "p95", "p99", "max")


def level_table(levels: Sequence[Level]) -> str:
    """A row for each level."""
    kind = UNITS[levels[0].kind] if levels else "in flight"
    named = len({each.model for each in levels}) > 1
    head = ["model"] if named else []
    head += [kind, "requests/s", "inferences/s", "mean", "p50", "p90", "p95", "p99", "p99.9", "max"]
    servers, batches = any(each.server for each in levels), any(each.batch for each in levels)
    cpus = any(each.server_cpu for each in levels)
    head += [*PARTS] if servers else []
    head += ["batch"] if batches else []
    head += ["client CPU"] + (["server CPU"] if cpus else []) + [""]
    rows = []
    for each in levels:
        times = (each.mean, each.p50, each.p90, each.p95, each.p99, each.p999, each.max)
        row = [each.model] if named else []
        row += [f"{each.level:g}", f"{each.rate:.1f}", f"{each.inferences:.1f}", *(f"{value:.0f}" for value in times)]
        row += [f"{each.server[part]:.0f}" if each.server else "-" for part in PARTS] if servers else []
        row += [f"{each.batch:.1f}"] if batches else []
        row += [f"{each.client_cpu:.1f}"] + ([f"{each.server_cpu:.1f}"] if cpus else [])
        row += ["" if each.stable else "not stable"]
        rows.append(row)
    return table(head, rows, ("l" if named else "r") + "r" * (len(head) - 2))


def remarks(levels: Sequence[Level]) -> list[str]:
    """Remarks below the table."""
    found = ["Times in microseconds; queue to output are the server's own statistics of a request."]
    named = len({each.model for each in levels}) > 1
    for each in levels:
        where = f"At {each.level:g}" + (f", {each.model}" if named else "")
        if each.errors:
            counted = ", ".join(f"{calls} {name}" for name, calls in sorted(each.errors.items()))
            found.append(
                f"{where}, calls that failed: {counted}."
                + (f" One of them: {visible(each.sample)}" if each.sample else "")
            )
        if each.driver_busy:
            found.append(f"{where}: this program used a whole core: it may have been slower than the server.")
        for name, shown in TOKENS.items():
            if values := getattr(each, name):
                said = ", ".join(f"{key} {values[key]:.0f}" for key in SHARES)
                found.append(f"{where}, {shown}: {said}.")
        if each.output_token_throughput:
            found.append(
                f"{where}: {each.output_token_throughput:.1f} tokens/s; each response with tensors counts as one."
            )
        if each.goodput is not None:
            found.append(f"{where}: goodput {each.goodput:.1f} requests/s.")
    return found


def histogram_text(level: Level) -> str:
    """Bars of latencies, in steps of a constant ratio."""
    total = sum(calls for _, calls in level.histogram)
    if not total:
        return ""
    low, high = max(level.histogram[0][0], 0.1), max(level.histogram[-1][0], 0.2)
    ratio = max((high / low) ** (1 / ROWS), 1.02)
    counts = [0] * (ROWS + 1)
    for bound, calls in level.histogram:
        counts[min(ROWS, max(0, int(math.log(max(bound, low) / low) / math.log(ratio))))] += calls
    while counts and counts[-1] == 0:
        counts.pop()
    most = max(counts)
    lines = [f"latencies of {level.model} at {level.level:g}, {total} calls, up to so many microseconds:"]
    for i, calls in enumerate(counts):
        bar = "█" * round(calls / most * BAR) or ("▏" if calls else "")
        share = f"  {bar} {calls / total:.1%}" if calls else ""
        lines.append(f"{low * ratio ** (i + 1):10.0f}{share}")
    return "\n".join(lines)


def write(path: Path, levels: Sequence[Level], facts: dict[str, Any]) -> None:
    """Write a file of the run, in the format of its suffix."""
    if path.suffix == ".json":
        path.write_text(json.dumps({**facts, "levels": [each.as_dict() for each in levels]}, indent=1) + "\n")
        return
    rows = [_columns(each) for each in levels]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0] if rows else [])
        writer.writeheader()
        writer.writerows(rows)


def _columns(level: Level) -> dict[str, Any]:
    """A level for a .csv: perf_analyzer's columns in its order and units, then further ones."""
    own = sum(level.server.values())
    found: dict[str, Any] = {"Request Rate" if level.kind == "rate" else "Concurrency": f"{level.level:g}"}
    found["Inferences/Second"] = f"{level.inferences:.6g}"
    times = {"Client Send": 0, "Network+Server Send/Recv": max(level.mean - own, 0.0)}
    times |= {title: level.server.get(part, 0.0) for part, title in SERVER.items()}
    times |= {"Client Recv": 0}
    times |= {f"p{share} latency": getattr(level, f"p{share}") for share in (50, 90, 95, 99)}
    times |= {"Avg latency": level.mean}
    found |= {title: f"{value:.0f}" for title, value in times.items()}
    more = ("model", "kind", "stable", "requests", "rate", "p999", "max", "batch", "client_cpu", "server_cpu")
    found |= {name: getattr(level, name) for name in more}
    found["errors"] = sum(level.errors.values())
    for name in TOKENS:
        found |= {f"{name}_{share}": getattr(level, name).get(share, "") for share in SHARES}
    return found | {"output_token_throughput": level.output_token_throughput, "goodput": level.goodput}
