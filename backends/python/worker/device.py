"""The memory of a GPU, through the CUDA driver, without a framework. The driver is loaded at the first use.

https://docs.nvidia.com/cuda/cuda-driver-api/
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from . import driver as _cuda
from .datatypes import SIZES
from .errors import TritonModelException

CUDA = 2  # DLPack's kDLCUDA
LAZY_ENABLE_PEER_ACCESS = 1

_driver: Any = None
_contexts: dict[int, ctypes.c_void_p] = {}
_lock = threading.Lock()


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


def copy_to_host(address: int, nbytes: int, device: int, target: int) -> None:
    """Copy memory of a GPU to the CPU's, after all work of the default stream.

    Args:
        address: on the GPU.
        nbytes: how much.
        device: the GPU's number.
        target: address on the CPU.

    Raises:
        TritonModelException: there is no driver, or it refuses; with its reason.
    """
    driver, context = _context(device)
    with _current(driver, context):
        _check(driver, driver.cuMemcpyDtoH_v2(ctypes.c_void_p(target), ctypes.c_uint64(address), nbytes))


# ---------------------------------------------------------------------------------------------------------------------
# Memory of other processes


class SharedMemory:
    """Memory that another process has exported, open in this one as long as this object lives.

    Attributes:
        address: where the handle points.

    Raises:
        TritonModelException: there is no driver, or it does not open the handle; with its reason.
    """

    __slots__ = ("__weakref__", "_context", "_driver", "address")

    def __init__(self, handle: bytes, device: int) -> None:
        self.address = 0
        self._driver, self._context = _context(device)
        found = ctypes.c_uint64()
        with _current(self._driver, self._context):
            opened = self._driver.cuIpcOpenMemHandle_v2(
                ctypes.byref(found), _Handle.from_buffer_copy(handle), LAZY_ENABLE_PEER_ACCESS
            )
        _check(self._driver, opened)
        self.address = found.value

    def synchronize(self) -> None:
        """Wait for all work on its GPU, so that nothing reads the memory any more."""
        with contextlib.suppress(TritonModelException), _current(self._driver, self._context):
            self._driver.cuCtxSynchronize()  # the model itself finds errors of its work

    def __del__(self) -> None:
        # Without a lock: this runs wherever the last reference is dropped.
        if self.address:
            self.synchronize()
            with contextlib.suppress(TritonModelException), _current(self._driver, self._context):
                self._driver.cuIpcCloseMemHandle(self.address)


_shared: weakref.WeakValueDictionary[tuple[bytes, int], SharedMemory] = weakref.WeakValueDictionary()
_opening = threading.Lock()


def _open(handle: bytes, device: int) -> SharedMemory:
    """The memory of a handle, shared by its concurrent users."""
    with _opening:
        memory = _shared.get((handle, device))
        if memory is None:
            memory = _shared[handle, device] = SharedMemory(handle, device)
        return memory


def synchronize_all() -> None:
    """Wait until no work reads open memory of other processes any more."""
    for memory in list(_shared.values()):
        memory.synchronize()


class SharedTensor:
    """A tensor in memory that another process has exported; the memory is opened when the address is first read.

    Args:
        handle: of the memory: a cudaIpcMemHandle_t.
        device: the GPU's number.
        offset: of the tensor, from where the handle points.
        datatype: Triton's number.
        shape: its dimensions; it is C-contiguous.

    Attributes:
        device: DLPack's device type and number.
    """

    __slots__ = ("__weakref__", "_handle", "_memory", "_offset", "datatype", "device", "nbytes", "shape")

    def __init__(self, handle: bytes, device: int, offset: int, datatype: int, shape: tuple[int, ...]) -> None:
        self._handle = handle
        self._offset = offset
        self._memory: SharedMemory | None = None
        self.datatype = datatype
        self.shape = shape
        self.device = (CUDA, device)
        self.nbytes = SIZES[datatype]
        for dim in shape:
            self.nbytes *= dim

    @property
    def address(self) -> int:
        """The address of the first element.

        Raises:
            TritonModelException: the memory cannot be opened.
        """
        if self._memory is None:
            try:
                self._memory = _open(self._handle, self.device[1])
            except TritonModelException as error:
                raise TritonModelException(
                    f"memory of GPU {self.device[1]} that a client shares cannot be opened: {error}"
                ) from None
        return self._memory.address + self._offset


# ---------------------------------------------------------------------------------------------------------------------
# The driver


def _context(device: int) -> tuple[Any, ctypes.c_void_p]:
    """The driver, and this GPU's context, which the runtime and the frameworks use, too."""
    global _driver
    with _lock:
        if _driver is None:
            _driver = _load(device)
        if device not in _contexts:
            context = ctypes.c_void_p()
            _check(_driver, _driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
            _contexts[device] = context
        return _driver, _contexts[device]


def _load(device: int) -> Any:
    try:
        driver = ctypes.CDLL(_cuda.library)
    except OSError:
        raise TritonModelException(
            f"a tensor is in the memory of GPU {device}, and the CUDA driver '{_cuda.library}' is not found"
        ) from None
    driver.cuMemcpyDtoH_v2.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t)
    driver.cuIpcOpenMemHandle_v2.argtypes = (ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint)
    driver.cuIpcCloseMemHandle.argtypes = (ctypes.c_uint64,)
    _check(driver, driver.cuInit(0))
    return driver


@contextlib.contextmanager
def _current(driver: Any, context: ctypes.c_void_p) -> Iterator[None]:
    """Makes the context the thread's current one, and restores the thread's own at the end."""
    _check(driver, driver.cuCtxPushCurrent_v2(context))
    try:
        yield
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def _check(driver: Any, result: int) -> None:
    if result:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(result, ctypes.byref(text))
        raise TritonModelException(f"the CUDA driver says: {(text.value or b'error').decode()} ({result})")
