"""Preferred batch sizes: those that a configuration names, of all that Triton's defaults would write into it."""

from __future__ import annotations

from collections.abc import Iterable


def named_sizes(sizes: Iterable[int], largest: int) -> tuple[int, ...]:
    """The preferred sizes that say something, ascending; none, if only the largest batch is preferred.

    A batch waits for the largest size anyway: as the only preferred size, which Triton's default is, it adds nothing.
    """
    named = sorted(set(sizes))
    return () if named == [largest] else tuple(named)
