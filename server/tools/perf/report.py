"""The printed and written results of a run."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from server.tools.perf.measuring import PARTS, Level
from server.tools.tables import table

BAR = 50
ROWS = 16


def level_table(levels: Sequence[Level]) -> str:
    """A row for each level."""
    kind = "requests/s due" if levels and levels[0].kind == "rate" else "in flight"
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
                f"{where}, calls that failed: {counted}." + (f" One of them: {each.sample}" if each.sample else "")
            )
        if each.driver_busy:
            found.append(f"{where}: this program used a whole core: it may have been slower than the server.")
        for name, values in (("first answer", each.first), ("between answers", each.between)):
            if values:
                said = ", ".join(f"{key} {values[key]:.0f}" for key in ("mean", "p50", "p95", "p99", "max"))
                found.append(f"{where}, {name}: {said}.")
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
    names = ["model", "kind", "level", "stable", "requests", "rate", "inferences"]
    names += ["mean", "p50", "p90", "p95", "p99", "p999", "max"]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*names, *PARTS, "batch", "client_cpu", "server_cpu", "errors"])
        for each in levels:
            row = [getattr(each, name) for name in names]
            row += [each.server.get(part, "") for part in PARTS]
            writer.writerow([*row, each.batch, each.client_cpu, each.server_cpu, sum(each.errors.values())])
