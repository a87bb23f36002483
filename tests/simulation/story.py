"""What happens in a simulation, as lines for people."""

from __future__ import annotations

from collections import deque

from tests.simulation.world import START_NS


class Story:
    """Keeps the last lines, or all of them.

    Args:
        keep: so many; 0 for all, negative for none.
    """

    def __init__(self, keep: int) -> None:
        self.lines: deque[tuple[int, str, str]] = deque(maxlen=keep or None if keep >= 0 else 0)
        self.on = keep >= 0
        self.now = 0

    def tell(self, who: str, what: str) -> None:
        """One line, of now."""
        if self.on:
            self.lines.append((self.now, who, what))

    def text(self) -> str:
        """All lines that are kept, with the microseconds since the beginning in front."""
        return "\n".join(f"{(at - START_NS) / 1000:14.3f}  {who:<14} {what}" for at, who, what in self.lines)
