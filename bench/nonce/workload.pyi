from collections.abc import Iterable

from bench.repository import Identity
from inferd_client.driver import Workload

DATATYPES: tuple[tuple[str, int, int, bool], ...]

class NonceWorkload(Workload):
    def __init__(
        self,
        models: Iterable[Identity],
        *,
        fault_fraction: float = 0.05,
        large_fraction: float = 0.01,
        large_elements: int = 4096,
        early_us: int = 0,
    ) -> None: ...
    def request(self, nonce: int) -> bytes: ...
    def verdict(self, nonce: int, response: bytes, grpc_status: int = 0) -> int: ...
