"""Tables of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from inferd.server.observe.escaping import visible


def table(head: Sequence[str], rows: Iterable[Sequence[object]], right: str = "") -> str:
    """A table whose columns are as wide as their cells. Control characters are escaped.

    Args:
        head: names of the columns.
        rows: their cells.
        right: for each column "r" to align it right, "l" to align it left.
    """
    cells = [[visible(str(cell)).replace("\n", " ") for cell in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = []
    for row in cells:
        parts = [
            cell.rjust(width) if right[i : i + 1] == "r" else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)
