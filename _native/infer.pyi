from collections.abc import Callable

from _native.bridge import BridgeHandle
from _native.connection import Endpoint
from _native.table import ModelTable

class Ticket:
    def cancel(self) -> None: ...

class InferService:
    def __init__(self, table: ModelTable, bridge: BridgeHandle) -> None: ...
    def install(self, endpoint: Endpoint) -> None: ...
    def submit(
        self,
        message: bytes,
        deliver: Callable[[int, str, bytes | None], None],
        *,
        timeout_ns: int = -1,
        stream: bool = False,
    ) -> Ticket: ...
