from collections.abc import Sequence
from ssl import SSLContext
from types import TracebackType
from typing import Self

from inferd_client.driver.report import Progress, Report
from inferd_client.driver.workload import Workload

INFER_PATH: str

class Driver:
    address: str
    def __init__(
        self,
        address: str,
        *,
        connections: int = 1,
        window: int = ...,
        max_frame_size: int = 16384,
        context: SSLContext | None = None,
        busy_poll: bool = False,
    ) -> None: ...
    def run(
        self,
        workload: Workload,
        *,
        in_flight: int = 1,
        more: int = 0,
        requests: int = 0,
        seconds: float = 0.0,
        rate: float = 0.0,
        scattered: bool = False,
        gaps: Sequence[float] = (),
        listed: bool = False,
        path: str = ...,
        method: str = "POST",
        headers: Sequence[tuple[bytes, bytes]] = (),
        cancel_fraction: float = 0.0,
        deadline_fraction: float = 0.0,
        deadline_us: tuple[int, int] = ...,
        seed: int = 1,
        stall_seconds: float = 30.0,
    ) -> Report: ...
    def interrupted(self) -> Report | None: ...
    @property
    def progress(self) -> Progress: ...
    @property
    def alive(self) -> int: ...
    def idle(self, seconds: float) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None: ...
