"""The output of `inferd top` as text: a line about the server, and a row for each model."""

from __future__ import annotations

from inferd.server.observe.escaping import visible
from inferd.server.tools.rates import ModelRates, Rates

COLUMNS = ("model", "req/s", "p50", "p99", "queue", "compute", "batch", "pending", "busy", "fail/s")


def table(rates: Rates) -> list[str]:
    """The lines of a table."""
    rows = [COLUMNS, *(cells(each) for each in rates.models)]
    widths = [max(len(row[index]) for row in rows) for index in range(len(COLUMNS))]
    lines = [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return [summary(rates), "", *lines]


def summary(rates: Rates) -> str:
    """One line about the server."""
    server = rates.server
    parts = []
    if "cpu" in server:
        parts.append(f"cpu {server['cpu']:.2f}")
    if "resident_bytes" in server:
        parts.append(f"memory {size(server['resident_bytes'])}")
    counts = [name for name in ("connections", "open_calls", "inflight") if name in server]
    parts += [f"{name.replace('_', ' ')} {server[name]:.0f}" for name in counts]
    if "received_bytes" in server:
        parts.append(f"in {size(server['received_bytes'])}/s out {size(server['sent_bytes'])}/s")
    if "refused" in server:
        parts.append(f"refused {server['refused']:.1f}/s")
    return "  ".join(parts) or "a server that tells of its models only"


def cells(each: ModelRates) -> tuple[str, ...]:
    """A row, without control characters, which a server may have put into names."""
    p99 = each.mean_us if each.p99_us is None else each.p99_us
    return (
        visible(each.model if each.version == "1" else f"{each.model}/{each.version}").replace("\n", " "),
        f"{each.requests:.1f}",
        duration(each.p50_us),
        duration(p99),
        duration(each.queue_us),
        duration(each.compute_us),
        "-" if each.batch is None else f"{each.batch:.1f}",
        "-" if each.pending is None else f"{each.pending:.0f}",
        "-" if each.busy is None else f"{each.busy:.0%}",
        f"{each.failures:.1f}",
    )


def duration(us: float | None) -> str:
    if us is None:
        return "-"
    if us < 1000:
        return f"{us:.0f} us"
    return f"{us / 1000:.1f} ms" if us < 1_000_000 else f"{us / 1e6:.1f} s"


def size(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"
