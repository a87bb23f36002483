from inferd._native.memory.resource import Memory

class PooledMemory(Memory):
    def reserve(self, size: int) -> bool: ...
