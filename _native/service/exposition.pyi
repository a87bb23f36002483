from collections.abc import Sequence

from inferd._native.request.lane import LaneHandle

KINDS: dict[str, int]

class ModelMetrics:
    def __init__(self, versions: list[tuple[LaneHandle, bytes, bool, bool, bool]]) -> None: ...
    def read(self) -> None: ...
    def illustrate(self, index: int, exemplars: list[tuple[int, bytes]]) -> None: ...
    def render(
        self,
        kind: str,
        name: bytes,
        unit: int,
        bounds: Sequence[int],
        point: bool,
        first: int = 0,
        last: int | None = None,
    ) -> bytes: ...
