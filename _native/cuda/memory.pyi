from inferd._native.cuda.device import Device
from inferd._native.memory.pool import PooledMemory

class DriverMemory(PooledMemory):
    @property
    def fallback_count(self) -> int: ...

class PageLocked(DriverMemory):
    def __init__(self, device: Device, limit: int) -> None: ...
    @property
    def numa_node(self) -> int: ...

class DevicePool(DriverMemory):
    def __init__(self, device: Device, limit: int) -> None: ...
