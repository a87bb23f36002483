from typing import Any

from _native.lane import LaneHandle

class QueueLane(LaneHandle):
    def __init__(self, spec: Any, version: int, *, max_queue: int = 0, held: int = 0) -> None: ...
    def nudge(self) -> None: ...
