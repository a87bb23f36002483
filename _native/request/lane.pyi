from collections.abc import Sequence
from typing import TypedDict

from inferd._native.memory.arena import ArenaHandle

Pair = tuple[int, int]

class Counters(TypedDict):
    last_inference_ms: int
    inference_count: int
    execution_count: int
    success: Pair
    fail: Pair
    failures: dict[str, Pair]
    queue: Pair
    compute_input: Pair
    compute_infer: Pair
    compute_output: Pair
    cache_hit: Pair
    cache_miss: Pair
    queue_times: list[tuple[int | None, int]]
    batches: list[tuple[int, Pair, Pair, Pair]]
    responses: list[dict[str, Pair]]

class LaneHandle:
    def set_bounds(self, ns: Sequence[int]) -> None: ...
    def receive_into(self, arena: ArenaHandle) -> None: ...
    def close(self) -> None: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def pending(self) -> int: ...
    def statistics(self) -> Counters: ...
    @property
    def last_used_ns(self) -> int: ...
    def totals(self) -> tuple[int, int, int]: ...
