"""The CUDA driver, by cuda-bindings. For each device: its primary context and one stream, on which callers wait."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

try:
    driver: Any = importlib.import_module("cuda.bindings.driver")
except ImportError as error:
    raise RuntimeError(
        'CUDA shared memory needs cuda-bindings: pip install "inferd-client[cuda]", or cuda-bindings, or cuda-python'
    ) from error

NON_BLOCKING = 1
"""A flag of streams: work on the default stream does not wait for them."""


class CudaSharedMemoryException(RuntimeError):
    """A region cannot be made or used, or the driver refuses."""

    def __init__(self, msg: str) -> None:
        super().__init__(msg)
        self._msg = msg


def call(function: str, *arguments: Any) -> Any:
    """Call a function of the driver; return its results without the status.

    Raises:
        CudaSharedMemoryException: the function fails, or there is no driver.
    """
    try:
        status, *found = getattr(driver, function)(*arguments)
    except RuntimeError as error:
        raise CudaSharedMemoryException(f"{function}: this machine has no CUDA driver: {error}") from None
    if int(status) != 0:
        raise CudaSharedMemoryException(f"{function}: {getattr(status, 'name', status)}")
    return found[0] if len(found) == 1 else found


@dataclass(frozen=True, slots=True)
class _Device:
    context: Any
    stream: Any


_devices: dict[int, _Device] = {}
_making = threading.Lock()


def _device(number: int) -> _Device:
    with _making:
        if number not in _devices:
            call("cuInit", 0)
            context = call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", number))
            call("cuCtxPushCurrent", context)
            try:
                _devices[number] = _Device(context, call("cuStreamCreateWithPriority", NON_BLOCKING, 0))
            finally:
                call("cuCtxPopCurrent")
        return _devices[number]


@contextmanager
def on(number: int) -> Iterator[Any]:
    """Make a device the thread's current one; yields its stream.

    Raises:
        CudaSharedMemoryException: there is no such device.
    """
    device = _device(number)
    call("cuCtxPushCurrent", device.context)
    try:
        yield device.stream
    finally:
        call("cuCtxPopCurrent")
