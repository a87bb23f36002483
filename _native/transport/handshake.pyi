from collections.abc import Callable

from inferd._native.transport.io_thread import IoThreads
from inferd._native.transport.tls import TlsContext, TlsSession

class Handshake(TlsSession):
    def __init__(
        self, thread: IoThreads, context: TlsContext, fd: int, client: int, on_over: Callable[[], None]
    ) -> None: ...
    def abort(self) -> None: ...
    @property
    def done(self) -> bool: ...
    @property
    def failure(self) -> str | None: ...
