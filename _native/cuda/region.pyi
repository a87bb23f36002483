from inferd._native.memory.shm import Regions

def add_cuda(
    regions: Regions,
    scope: int,
    name: str,
    handle: bytes,
    device: int,
    byte_size: int,
    *,
    trusted: bool,
    owner: int = 0,
) -> None: ...
