from typing import Any

from inferd._native.request.lane import LaneHandle
from inferd._native.service.infer import InferService

class EnsembleLane(LaneHandle):
    def __init__(self, spec: Any, version: int, service: InferService, *, max_queue: int = 0) -> None: ...
