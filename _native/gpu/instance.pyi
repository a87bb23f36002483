from collections.abc import Sequence

from inferd._native.cuda.memory import DevicePool, PageLocked
from inferd._native.execution.loop import ExecutionLoop
from inferd._native.request.lane import LaneHandle
from inferd._native.scheduling.limiter import ClaimHandle

class GpuLoop(ExecutionLoop):
    def __init__(
        self,
        lane: LaneHandle,
        instance: object,
        name: str,
        index: int,
        claim: ClaimHandle | None,
        spec: object,
        pinned: PageLocked,
        pool: DevicePool,
    ) -> None: ...
    @property
    def held(self) -> int: ...
    @property
    def busy_ns(self) -> int: ...
    @property
    def running(self) -> int: ...
    def capture(self, specs: Sequence[object]) -> None: ...
