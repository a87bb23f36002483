from typing import Any, TypedDict

from _native.scheduling.lane import LaneHandle

class Learnt(TypedDict):
    gap_ns: int
    fixed_ns: int
    row_ns: int
    target: int
    waited: tuple[int, int]

class QueueLane(LaneHandle):
    def __init__(self, spec: Any, version: int, *, max_queue: int = 0, held: int = 0) -> None: ...
    def outlook(self) -> Learnt | None: ...
    def nudge(self) -> None: ...
