from collections.abc import Sequence

from _native.cuda.memory import DevicePool, PageLocked
from _native.scheduling.lane import LaneHandle
from _native.scheduling.limiter import ClaimHandle

class GpuLoop:
    def __init__(
        self,
        lane: LaneHandle,
        instance: object,
        spec: object,
        name: str,
        index: int,
        pinned: PageLocked,
        pool: DevicePool,
        claim: ClaimHandle | None = None,
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def held(self) -> int: ...
    def capture(self, specs: Sequence[object]) -> None: ...
    def prepare(self) -> None: ...
    def rehearse(self, tensors: dict[str, tuple[tuple[int, ...], bytes]], count: int) -> None: ...
    def retire(self) -> None: ...
    def run(self) -> None: ...
