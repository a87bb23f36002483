from typing import Any, TypedDict

Pair = tuple[int, int]

class Counters(TypedDict):
    last_inference_ms: int
    inference_count: int
    execution_count: int
    success: Pair
    fail: Pair
    queue: Pair
    compute_input: Pair
    compute_infer: Pair
    compute_output: Pair
    batches: list[tuple[int, Pair, Pair, Pair]]

class LaneHandle:
    def __init__(self, spec: Any, version: int, *, max_queue: int = 0) -> None: ...
    def close(self) -> None: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def pending(self) -> int: ...
    def statistics(self) -> Counters: ...

class PolicyProbe:
    def __init__(self, spec: Any) -> None: ...
    def push(self, rows: int, now: int) -> None: ...
    def plan(self, now: int) -> tuple[int, int, int]: ...
    def take(self, count: int) -> list[int]: ...
