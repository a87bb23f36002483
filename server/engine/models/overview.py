"""The models for the log: a line while they are loaded, and a table afterwards; the repository index for clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from inferd._native.protobuf.listing import encode_index
from inferd.server.engine.housekeeping.threads import LARGE, slices
from inferd.server.engine.models.registry import LOADING, IndexEntry, Models
from inferd.server.engine.models.version import LoadedVersion

SHOWN = 8
"""How many names of models a line has at most."""


def progress(models: Models) -> str:
    """How many versions are loaded, and which are loading now."""
    entries = [(name, *each) for name, state in models.items() for each in state.versions.items()]
    loaded = sum(entry.loaded is not None for _, _, entry in entries)
    names = [f"'{name}' version {version}" for name, version, entry in entries if entry.state == LOADING]
    shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
    return f"{loaded} loaded, {len(names)} to go: {shown}" if names else f"{loaded} loaded"


def table(models: Models) -> list[str]:
    """A line for each version: model, version, status, seconds of its load, and its instances by device."""
    rows = [("model", "version", "status", "seconds", "instances")]
    for entry in models.index():
        found = [each for each in models.versions(entry.name) if str(each.version) == entry.version]
        seconds, where = (f"{found[0].seconds:.2f}", _placement(found[0])) if found else ("", "")
        rows.append((entry.name, entry.version, entry.state or "UNAVAILABLE", seconds, where))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _placement(version: LoadedVersion) -> str:
    """The version's instances as text, such as "2 on CPU, 1 on GPU 0"."""
    counts = Counter(f"GPU {each.device}" if each.kind == "GPU" else "CPU" for each in version.spec.instances)
    return ", ".join(f"{count} on {where}" for where, count in sorted(counts.items())) or "those of its steps"


async def encoded_index(entries: Iterable[IndexEntry]) -> bytes:
    """Encode the entries as a RepositoryIndexResponse."""
    return b"".join([encode_index(part) async for part in slices(entries, LARGE)])
