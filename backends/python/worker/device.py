"""Copies from the memory of a GPU, through the CUDA driver: no framework is needed for that.

https://docs.nvidia.com/cuda/cuda-driver-api/
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from .errors import TritonModelException

_driver: Any = None
_contexts: dict[int, ctypes.c_void_p] = {}
_lock = threading.Lock()


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
    _check(driver, driver.cuCtxPushCurrent_v2(context))
    try:
        _check(driver, driver.cuMemcpyDtoH_v2(ctypes.c_void_p(target), ctypes.c_uint64(address), nbytes))
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def _context(device: int) -> tuple[Any, ctypes.c_void_p]:
    """The driver, and the context that the runtime and the frameworks use on this GPU."""
    global _driver
    with _lock:
        if _driver is None:
            try:
                driver = ctypes.CDLL("libcuda.so.1")
            except OSError:
                raise TritonModelException(
                    f"a tensor is in the memory of GPU {device}, and the CUDA driver to copy it with is not found"
                ) from None
            driver.cuMemcpyDtoH_v2.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t)
            _check(driver, driver.cuInit(0))
            _driver = driver
        if device not in _contexts:
            context = ctypes.c_void_p()
            _check(_driver, _driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
            _contexts[device] = context
        return _driver, _contexts[device]


def _check(driver: Any, result: int) -> None:
    if result:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(result, ctypes.byref(text))
        raise TritonModelException(f"the CUDA driver says: {(text.value or b'error').decode()} ({result})")
