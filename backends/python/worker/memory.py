"""The memory in which the outputs of a call to another model are wanted."""

from __future__ import annotations

from .errors import ErrorCode


class MemoryType(ErrorCode):
    """A kind of memory: an int with a name."""

    TRITONSERVER_MEMORY_CPU: MemoryType
    TRITONSERVER_MEMORY_GPU: MemoryType

    def __repr__(self) -> str:
        return f"MemoryType.{self.name}"


DEFAULT = MemoryType(-1, "DEFAULT")
"""The called model's choice."""
CPU = MemoryType(0, "TRITONSERVER_MEMORY_CPU")
GPU = MemoryType(1, "TRITONSERVER_MEMORY_GPU")
MemoryType.TRITONSERVER_MEMORY_CPU = CPU
MemoryType.TRITONSERVER_MEMORY_GPU = GPU


class PreferredMemory:
    """The memory in which the outputs of a call to another model are wanted.

    Args:
        preferred_memory_type: TRITONSERVER_MEMORY_CPU or TRITONSERVER_MEMORY_GPU.
        preferred_device_id: the number of the GPU.
    """

    __slots__ = ("device_id", "memory_type")

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        if not isinstance(preferred_memory_type, MemoryType):
            raise TypeError(
                "PreferredMemory expects TRITONSERVER_MEMORY_CPU or TRITONSERVER_MEMORY_GPU, got "
                f"{preferred_memory_type!r}"
            )
        self.memory_type = preferred_memory_type
        self.device_id = int(preferred_device_id)


ANY_MEMORY = PreferredMemory(DEFAULT)
