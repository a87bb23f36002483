from typing import NamedTuple

DISABLED: str
SYSTEM: int
CUDA: int
SHARED: int
NONE: int

class RegionError(Exception):
    status: int
    def __init__(self, status: int, text: str) -> None: ...

class RegionStatus(NamedTuple):
    kind: int
    name: str
    key: str
    offset: int
    byte_size: int
    device: int

class Regions:
    def __init__(
        self,
        *,
        max_count: int,
        max_byte_size: int,
        scope_count: int | None = None,
        scope_byte_size: int | None = None,
    ) -> None: ...
    def add_system(
        self,
        scope: int,
        name: str,
        key: str,
        fd: int,
        offset: int,
        byte_size: int,
        *,
        trusted: bool,
        writable: bool,
        reopened: bool = False,
        owner: int = 0,
    ) -> None: ...
    def remove(self, scope: int, kind: int, name: str) -> bool: ...
    def remove_owned(self, owner: int) -> int: ...
    def remove_all(self, scope: int, kind: int) -> int: ...
    def close(self) -> None: ...
    def find(self, scope: int, name: str) -> RegionStatus | None: ...
    def entries(self, scope: int, kind: int) -> list[RegionStatus]: ...
    @property
    def count(self) -> int: ...
    @property
    def byte_size(self) -> int: ...

class Use:
    def __init__(self, regions: Regions, scope: int, name: str) -> None: ...
    def leave(self) -> None: ...
    def refusal(self, offset: int, byte_size: int) -> str: ...
    def read(self, offset: int, size: int) -> bytes | None: ...
    def write(self, offset: int, data: bytes) -> bool: ...
