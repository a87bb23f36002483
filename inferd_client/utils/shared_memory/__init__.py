"""System shared memory, with the names of `tritonclient.utils.shared_memory`.

Regions are objects of POSIX shared memory. A process that creates an object removes it with its last handle to it.
"""

from __future__ import annotations

import contextlib
import os
import struct
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker, shared_memory
from typing import Any

__all__ = [
    "SharedMemoryException",
    "SharedMemoryRegion",
    "create_shared_memory_region",
    "destroy_shared_memory_region",
    "get_contents_as_numpy",
    "mapped_shared_memory_regions",
    "set_shared_memory_region",
]


class SharedMemoryException(Exception):
    """A region cannot be made or used."""


@dataclass
class _Mapped:
    """A mapped object: how many handles this process has to it, and whether this process created it."""

    handles: int = 0
    created: bool = False


_mapped: dict[str, _Mapped] = {}


class SharedMemoryRegion:
    """A mapped region.

    Args:
        triton_shm_name: the name that the server is told.
        shm_key: the name of the object of POSIX shared memory.
    """

    def __init__(self, triton_shm_name: str, shm_key: str) -> None:
        self._triton_shm_name = triton_shm_name
        self._shm_key = shm_key
        self._mpsm_handle: Any = None


class MappedObject(shared_memory.SharedMemory):
    """A mapped object. When it is closed, its memory stays mapped as long as there are views of it."""

    _fd: int

    def close(self) -> None:
        """Release the object."""
        self._buf = self._mmap = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _opened(key: str) -> shared_memory.SharedMemory:
    """Open an existing object. Only the resource tracker of the process that created it may remove it."""
    found = MappedObject(key)
    if key not in _mapped or not _mapped[key].created:
        resource_tracker.unregister(found._name, "shared_memory")  # type: ignore[attr-defined]
    return found


def create_shared_memory_region(
    triton_shm_name: str, shm_key: str, byte_size: int, create_only: bool = False
) -> SharedMemoryRegion:
    """Map the object with a key, and create it if it does not exist; with `create_only`, it must not exist.

    Raises:
        SharedMemoryException: the object cannot be created or opened.
    """
    region = SharedMemoryRegion(triton_shm_name, shm_key)
    created = False
    try:
        if not create_only:
            with contextlib.suppress(FileNotFoundError):
                region._mpsm_handle = _opened(shm_key)
        if region._mpsm_handle is None:
            region._mpsm_handle = MappedObject(shm_key, create=True, size=byte_size)
            created = True
    except (OSError, ValueError) as error:
        raise SharedMemoryException(f"unable to create the shared memory region: {error}") from error
    known = _mapped.setdefault(shm_key, _Mapped())
    known.handles += 1
    known.created |= created
    if byte_size > region._mpsm_handle.size:
        warnings.warn(
            f"reusing shared memory region with key '{shm_key}', region size is {region._mpsm_handle.size} instead of "
            f"requested {byte_size}",
            stacklevel=2,
        )
    return region


def _memory(region: SharedMemoryRegion) -> Any:
    if region._mpsm_handle.buf is None:
        raise SharedMemoryException(f"the region {region._triton_shm_name!r} was destroyed")
    return region._mpsm_handle.buf


def set_shared_memory_region(shm_handle: SharedMemoryRegion, input_values: Sequence[Any], offset: int = 0) -> None:
    """Copy arrays into the region, one behind the other. An array of objects must be one of `serialize_byte_tensor`.

    Raises:
        SharedMemoryException: the arrays do not fit, a value is no array, or the region was destroyed.
    """
    import numpy as np

    if not isinstance(input_values, list | tuple):
        raise SharedMemoryException("input_values must be specified as a list/tuple of numpy arrays")
    if not all(isinstance(value, np.ndarray) for value in input_values):
        raise SharedMemoryException("each element of input_values must be a numpy array")
    memory = _memory(shm_handle)
    for value in input_values:
        data = value.tobytes() if value.nbytes < 4096 else None
        if value.dtype == np.object_:
            data = value.item() if value.size else b""
        size = len(data) if data is not None else value.nbytes
        if offset < 0 or offset + size > len(memory):
            raise SharedMemoryException(
                f"unable to set the shared memory region: {size} bytes at offset {offset} do not fit into {len(memory)}"
            )
        if data is not None:
            memory[offset : offset + size] = data
        else:
            np.ndarray(value.shape, value.dtype, buffer=memory, offset=offset)[...] = value
        offset += size


def get_contents_as_numpy(shm_handle: SharedMemoryRegion, datatype: Any, shape: Sequence[int], offset: int = 0) -> Any:
    """A tensor in the region: a view of its memory, except strings, which are copied.

    Raises:
        SharedMemoryException: the tensor exceeds the region, or the region was destroyed.
    """
    import numpy as np

    memory = _memory(shm_handle)
    if np.dtype(datatype).kind not in "OS":
        try:
            return np.ndarray(shape, datatype, buffer=memory, offset=offset)
        except (TypeError, ValueError) as error:
            raise SharedMemoryException(f"the region holds no such tensor: {error}") from None
    return strings_at(memory, offset, shape)


def strings_at(memory: Any, offset: int, shape: Sequence[int]) -> Any:
    """A tensor of strings from memory where each has its size before it.

    Raises:
        SharedMemoryException: the memory holds no such tensor.
    """
    import numpy as np

    out = np.empty(int(np.prod(shape)), dtype=np.object_)
    try:
        for i in range(out.size):
            (size,) = struct.unpack_from("<I", memory, offset)
            if size > (there := len(memory) - offset - 4):
                raise SharedMemoryException(f"the region holds no such tensor: string {i} of {size} bytes, not {there}")
            out[i] = bytes(memory[offset + 4 : offset + 4 + size])
            offset += 4 + size
    except struct.error as error:
        raise SharedMemoryException(f"the region holds no such tensor: {error}") from None
    return out.reshape(shape)


def mapped_shared_memory_regions() -> list[str]:
    """The keys of mapped objects."""
    return list(_mapped)


def destroy_shared_memory_region(shm_handle: SharedMemoryRegion) -> None:
    """Unmap a region; its memory stays as long as there are views of it.

    The last handle removes an object that this process created.

    Raises:
        SharedMemoryException: the region was destroyed before.
    """
    _memory(shm_handle)
    key = shm_handle._shm_key
    known = _mapped[key]
    known.handles -= 1
    try:
        if known.handles == 0 and known.created:
            shm_handle._mpsm_handle.unlink()
    finally:
        if known.handles == 0:
            del _mapped[key]
        shm_handle._mpsm_handle.close()
