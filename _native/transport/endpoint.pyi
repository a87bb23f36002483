from collections.abc import Callable

from _native.timers import TimersHandle
from _native.transport.call import Call
from _native.transport.workers import Workers

EVENT_PING: str
EVENT_REFUSED: str

class ReceiveBuffer:
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Endpoint:
    on_dirty: Callable[[], None] | None
    @property
    def timers(self) -> TimersHandle: ...
    clock: Callable[[], float] | None
    def __init__(
        self,
        on_call: Callable[[Call], None],
        *,
        max_message: int = 0,
        max_streams: int = 256,
        spare_frames: int = 10_000,
        max_inflated: int = 0,
        native_level: int = 0,
        workers: Workers | None = None,
        max_held: int = 0,
        receive_timeout: float = 0.0,
        send_timeout: float = 0.0,
        timers: TimersHandle | None = None,
    ) -> None: ...
    @property
    def direct(self) -> int: ...
    @property
    def held(self) -> int: ...
    def calls(self) -> dict[str, tuple[int, list[int]]]: ...
    @property
    def resets(self) -> int: ...
    def expire(self) -> None: ...
    def receive_buffer(self) -> ReceiveBuffer: ...
    @property
    def ledger(self) -> dict[str, int]: ...
    @property
    def departed(self) -> int: ...
    def ledger_agrees(self) -> bool: ...
    def flush_dirty(self) -> None: ...
    def collect_jobs(self) -> None: ...

class InterceptorHandle:
    def __init__(self) -> None: ...
