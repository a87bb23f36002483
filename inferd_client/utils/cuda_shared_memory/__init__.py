"""CUDA shared memory, with the names of `tritonclient.utils.cuda_shared_memory`; needs cuda-bindings.

A region is memory of a device, which this process allocates. The server opens it by the handle that
`client.register_cuda_shared_memory(name, get_raw_handle(region), device_id, byte_size)` sends.
"""

from __future__ import annotations

import base64
import ctypes
import math
import threading
from collections.abc import Sequence
from typing import Any

from inferd_client.utils.cuda_shared_memory import _dlpack
from inferd_client.utils.cuda_shared_memory._driver import CudaSharedMemoryException, call, on
from inferd_client.utils.shared_memory import SharedMemoryException, strings_at

__all__ = [
    "CudaSharedMemoryException",
    "CudaSharedMemoryRegion",
    "allocated_shared_memory_regions",
    "as_shared_memory_tensor",
    "create_shared_memory_region",
    "destroy_shared_memory_region",
    "get_contents_as_numpy",
    "get_raw_handle",
    "set_shared_memory_region",
    "set_shared_memory_region_from_dlpack",
]

HANDLE_SIZE = 64
"""Bytes of a handle by which another process opens the memory."""

allocated_shm_regions: list[CudaSharedMemoryRegion] = []
"""The regions that were created and not destroyed."""


class CudaSharedMemoryRegion:
    """Memory of a device.

    Args:
        triton_shm_name: the name that the server is told.
        cuda_shm_handle: the handle by which other processes open the memory.
        base_addr: the address of the first byte.
        byte_size: the size of the memory.
        device_id: the number of the device.
    """

    def __init__(
        self, triton_shm_name: str, cuda_shm_handle: bytes, base_addr: int, byte_size: int, device_id: int
    ) -> None:
        self._triton_shm_name = triton_shm_name
        self._cuda_shm_handle = cuda_shm_handle
        self._base_addr = base_addr
        self._byte_size = byte_size
        self._device_id = device_id
        self._lock = threading.Lock()
        self._users = 1  # the creator, and the tensors that `as_shared_memory_tensor` gave away

    def _use(self) -> None:
        with self._lock:
            if self._users == 0:
                raise CudaSharedMemoryException(f"region '{self._triton_shm_name}' was destroyed")
            self._users += 1

    def _leave(self) -> None:
        """A user is done; the last one frees the memory."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
        with on(self._device_id):
            call("cuMemFree", self._base_addr)


def create_shared_memory_region(triton_shm_name: str, byte_size: int, device_id: int) -> CudaSharedMemoryRegion:
    """Allocate a region on a device.

    Raises:
        CudaSharedMemoryException: the driver refuses, or there is none.
    """
    with on(device_id):
        address = int(call("cuMemAlloc", byte_size))
        try:
            handle = call("cuIpcGetMemHandle", address)
        except CudaSharedMemoryException:
            call("cuMemFree", address)
            raise
    raw = ctypes.string_at(handle.getPtr(), HANDLE_SIZE)
    region = CudaSharedMemoryRegion(triton_shm_name, raw, address, byte_size, device_id)
    allocated_shm_regions.append(region)
    return region


def get_raw_handle(cuda_shm_handle: CudaSharedMemoryRegion) -> bytes:
    """The handle by which another process opens the region, in Base64."""
    return base64.b64encode(cuda_shm_handle._cuda_shm_handle)


def _place(region: CudaSharedMemoryRegion, offset: int, size: int) -> int:
    """The address of `size` bytes in the region.

    Raises:
        CudaSharedMemoryException: the bytes exceed the region, or it was destroyed.
    """
    if region._users == 0:
        raise CudaSharedMemoryException(f"region '{region._triton_shm_name}' was destroyed")
    if offset < 0 or offset + size > region._byte_size:
        raise CudaSharedMemoryException(
            f"region '{region._triton_shm_name}' has {region._byte_size} bytes: {size} at offset {offset} do not fit"
        )
    return region._base_addr + offset


def set_shared_memory_region(
    cuda_shm_handle: CudaSharedMemoryRegion, input_values: Sequence[Any], offset: int = 0
) -> None:
    """Copy arrays into the region, one behind the other. An array of objects must be one of `serialize_byte_tensor`.

    Raises:
        CudaSharedMemoryException: the arrays do not fit, or a value is no array.
    """
    import numpy as np

    if not isinstance(input_values, list | tuple) or not all(isinstance(each, np.ndarray) for each in input_values):
        raise CudaSharedMemoryException("input_values must be specified as a list/tuple of numpy arrays")
    for value in input_values:
        if value.dtype == np.object_:
            contiguous = np.frombuffer(value.item() if value.size else b"", np.uint8)
        else:
            contiguous = np.ascontiguousarray(value)
        _set(cuda_shm_handle, contiguous, offset)
        offset += contiguous.nbytes


def set_shared_memory_region_from_dlpack(cuda_shm_handle: CudaSharedMemoryRegion, input_values: Sequence[Any]) -> None:
    """Copy tensors that speak DLPack into the region, one behind the other; from the host's memory or a CUDA device's.

    Raises:
        CudaSharedMemoryException: the tensors do not fit, or one is not contiguous, or in another kind of memory.
    """
    from inferd_client._requests import host_array

    offset = 0
    for value in input_values:
        kind = value.__dlpack_device__()[0]
        if kind in (_dlpack.CPU, _dlpack.CUDA_HOST):
            array = host_array(value)
            if not array.flags.c_contiguous:
                raise CudaSharedMemoryException("the tensor is not contiguous: call contiguous() first")
            _set(cuda_shm_handle, array, offset)
            offset += array.nbytes
        elif kind == _dlpack.CUDA:
            with on(cuda_shm_handle._device_id) as stream:
                try:
                    found = _dlpack.taken(value, int(stream))
                except ValueError as error:
                    raise CudaSharedMemoryException(str(error)) from None
                place = _place(cuda_shm_handle, offset, found.size)
                call("cuMemcpyDtoDAsync", place, found.address, found.size, stream)
                call("cuStreamSynchronize", stream)
            offset += found.size
        else:
            raise CudaSharedMemoryException(f"DLPack device type {kind} is not supported")


def _set(region: CudaSharedMemoryRegion, array: Any, offset: int) -> None:
    """Copy a contiguous array to the region.

    Raises:
        CudaSharedMemoryException: the array does not fit.
    """
    if array.nbytes:
        with on(region._device_id) as stream:
            call("cuMemcpyHtoDAsync", _place(region, offset, array.nbytes), array.ctypes.data, array.nbytes, stream)
            call("cuStreamSynchronize", stream)


def get_contents_as_numpy(
    cuda_shm_handle: CudaSharedMemoryRegion, datatype: Any, shape: Sequence[int], offset: int = 0
) -> Any:
    """A copy of a tensor in the region.

    Raises:
        CudaSharedMemoryException: the region is not that large.
    """
    import numpy as np

    strings = np.dtype(datatype).kind in "OS"
    out = np.empty(cuda_shm_handle._byte_size - offset, np.uint8) if strings else np.empty(shape, datatype)
    if out.nbytes:
        with on(cuda_shm_handle._device_id) as stream:
            place = _place(cuda_shm_handle, offset, out.nbytes)
            call("cuMemcpyDtoHAsync", out.ctypes.data, place, out.nbytes, stream)
            call("cuStreamSynchronize", stream)
    if not strings:
        return out
    try:
        return strings_at(out.data, 0, shape)
    except SharedMemoryException as error:
        raise CudaSharedMemoryException(str(error)) from None


class _Shared:
    """A tensor in a region that `from_dlpack` takes."""

    def __init__(self, region: CudaSharedMemoryRegion, datatype: str, shape: Sequence[int], offset: int) -> None:
        self._region = region
        self._datatype = datatype
        self._shape = tuple(shape)
        size = math.prod(self._shape) * _dlpack.KINDS[datatype][1] // 8
        self._address = _place(region, offset, size)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _dlpack.CUDA, self._region._device_id

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        self._region._use()
        return _dlpack.given(self._address, self._region._device_id, self._datatype, self._shape, self._region._leave)


def as_shared_memory_tensor(
    cuda_shm_handle: CudaSharedMemoryRegion, datatype: str, shape: Sequence[int], offset: int = 0
) -> Any:
    """A tensor in the region, for `from_dlpack`: a view, which keeps the memory after the region is destroyed.

    Raises:
        CudaSharedMemoryException: the region is not that large, or DLPack has no such datatype.
    """
    if datatype not in _dlpack.KINDS:
        raise CudaSharedMemoryException(f"DLPack has no datatype {datatype}")
    return _Shared(cuda_shm_handle, datatype, shape, offset)


def allocated_shared_memory_regions() -> list[CudaSharedMemoryRegion]:
    """The regions that were created and not destroyed."""
    return allocated_shm_regions


def destroy_shared_memory_region(cuda_shm_handle: CudaSharedMemoryRegion) -> None:
    """Free the region, as soon as no tensor of `as_shared_memory_tensor` is left.

    Raises:
        CudaSharedMemoryException: the driver refuses.
        ValueError: the region was destroyed before.
    """
    allocated_shm_regions.remove(cuda_shm_handle)
    cuda_shm_handle._leave()
