from collections.abc import Callable

from _native.access import Judge
from _native.bridge import BridgeHandle
from _native.connection import Endpoint
from _native.table import ModelTable

class Ticket:
    @property
    def reason(self) -> str: ...
    @property
    def done(self) -> bool: ...
    def cancel(self) -> None: ...

class InferService:
    def __init__(self, table: ModelTable, bridge: BridgeHandle, *, max_inflight: int = 0) -> None: ...
    @property
    def in_house(self) -> int: ...
    def guard(self, judge: Judge) -> None: ...
    def set_load_report(self, encoded: bytes) -> None: ...
    def install(self, endpoint: Endpoint) -> None: ...
    def submit(
        self,
        message: bytes,
        deliver: Callable[[int, str, bytes | None], None],
        *,
        timeout_ns: int = -1,
        stream: bool = False,
        caller: int = 0,
    ) -> Ticket: ...
