"""The file of a configuration with the line of each field, for errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from inferd.server.engine.pbtxt.reader import DuplicateKey, FieldPath, Positions, locate
from inferd_client.pb import model_config_pb2 as pb

__all__ = ["NOWHERE", "FieldPath", "Source"]


@dataclass(slots=True)
class Source:
    """A configuration file and the line of every field in it, found on first use."""

    path: Path | str  # a text if it is no path of this machine
    text: str = ""
    from_client: bool = False  # the configuration came with a client's load request
    _positions: Positions | None = None

    @property
    def lines(self) -> dict[FieldPath, int]:
        """By field."""
        return self._found().lines

    @property
    def duplicates(self) -> list[DuplicateKey]:
        """Keys of maps that were written twice."""
        return self._found().duplicates

    def _found(self) -> Positions:
        if self._positions is None:
            self._positions = locate(self.text, pb.ModelConfig())
        return self._positions

    def has(self, *path: str | int) -> bool:
        """Whether the field was written, even with its default value."""
        return str(path[0]) in self.text and path in self.lines

    def keep(self, name: str, indexes: Sequence[int]) -> None:
        """Keep only these values, ascending, of a repeated field: the others were removed from the configuration."""
        now = {index: place for place, index in enumerate(indexes)}
        lines: dict[FieldPath, int] = {}
        for path, line in self.lines.items():
            if path[0] != name or len(path) == 1:
                lines[path] = line
            elif isinstance(path[1], int) and path[1] in now:
                lines[(name, now[path[1]], *path[2:])] = line
        self._found().lines = lines

    def at(self, *path: str | int) -> str:
        """`file:line` of the field or of its nearest written parent; the file alone if there is none."""
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.path}:{self.lines[path]}" if path else str(self.path)


NOWHERE = Source(Path("config.pbtxt"))
"""For a configuration that came from no file."""
