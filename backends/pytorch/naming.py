"""Matches configured tensors with arguments of forward() and elements of its result.

TorchScript records argument names but no output names, so a configuration uses one of three conventions:

1. `<name>__<index>`: the index is the position, counted from 0 without gaps.
2. The names of forward()'s arguments; for inputs only.
3. Otherwise the order in the configuration is the position.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from inferd.backends.api import BackendError

INDEXED = re.compile(r".*__(\d+)", re.DOTALL)


def input_positions(model: str, names: Sequence[str], arguments: Sequence[str]) -> list[int]:
    """The position in forward() of each configured input.

    Args:
        model: its name, for messages.
        names: the configured inputs.
        arguments: the arguments of forward(), without self.

    Raises:
        BackendError: the names mix conventions or leave gaps, or there are more inputs than arguments.
    """
    if len(names) > len(arguments):
        raise BackendError(
            f"model '{model}' is configured with {len(names)} inputs, but forward() takes {len(arguments)}: "
            f"{', '.join(arguments)}"
        )
    indexed = _indexes(names)
    if all(index is not None for index in indexed):
        return _without_gaps(model, "input", names, indexed)
    if all(name in arguments for name in names):
        return [arguments.index(name) for name in names]
    return _in_order(model, "input", names, indexed)


def output_positions(model: str, names: Sequence[str]) -> list[int]:
    """The position in the result of forward() of each configured output.

    Raises:
        BackendError: the names mix conventions or leave gaps.
    """
    indexed = _indexes(names)
    if all(index is not None for index in indexed):
        return _without_gaps(model, "output", names, indexed)
    return _in_order(model, "output", names, indexed)


def _indexes(names: Sequence[str]) -> list[int | None]:
    return [int(match[1]) if (match := INDEXED.fullmatch(name)) else None for name in names]


def _without_gaps(model: str, kind: str, names: Sequence[str], indexed: Sequence[int | None]) -> list[int]:
    positions = [index for index in indexed if index is not None]
    for name, index in zip(names, positions, strict=True):
        if index >= len(names) or positions.count(index) > 1:
            raise BackendError(
                f"model '{model}': {kind} '{name}' does not follow the <name>__<index> naming convention: the indexes "
                f"of {len(names)} {kind}s are 0 to {len(names) - 1}, each once"
            )
    return positions


def _in_order(model: str, kind: str, names: Sequence[str], indexed: Sequence[int | None]) -> list[int]:
    for name, index in zip(names, indexed, strict=True):
        if index is None and any(other is not None for other in indexed):
            raise BackendError(
                f"model '{model}': {kind} '{name}' does not follow the <name>__<index> naming convention, "
                f"but other {kind}s do"
            )
    return list(range(len(names)))
