from collections.abc import Callable
from typing import Any, TypedDict

from inferd._native.request.lane import LaneHandle
from inferd._native.scheduling.limiter import RateLimiter

class Learnt(TypedDict):
    gap_ns: int
    fixed_ns: int
    row_ns: int
    target: int
    waited: tuple[int, int]

class QueueLane(LaneHandle):
    def __init__(
        self, spec: Any, version: int, *, max_queue: int = 0, held: int = 0, limiter: RateLimiter | None = None
    ) -> None: ...
    def await_first(self, first: Callable[[], object] | None) -> None: ...
    def predictor(self) -> Learnt | None: ...
