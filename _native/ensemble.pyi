from typing import Any

from _native.infer import InferService
from _native.lane import LaneHandle

class EnsembleLane(LaneHandle):
    def __init__(self, spec: Any, version: int, service: InferService, *, max_queue: int = 0) -> None: ...
