from _native.memory.resource import Memory

class PooledMemory(Memory):
    def reserve(self, size: int) -> bool: ...

class SharedMemory(PooledMemory):
    def __init__(self, limit: int, slab_size: int = ...) -> None: ...
