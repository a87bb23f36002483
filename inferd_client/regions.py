"""Arrays in shared memory that a server has registered: `with client.shared(arrays) as region`."""

from __future__ import annotations

import contextlib
import math
import os
import uuid
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from inferd_client._requests import InferInput, InferRequestedOutput, host_array
from inferd_client.utils import InferenceServerException, np_to_triton_dtype, raise_error

if TYPE_CHECKING:
    import numpy as np

ALIGNMENT = 64
"""Bytes; each array begins at a multiple of this."""


class Registry(Protocol):
    """The methods of a client that regions need; see `inferd_client.grpc.InferenceServerClient`."""

    def register_system_shared_memory(self, name: str, key: str, byte_size: int) -> Any:
        """Register a shared memory object."""

    def unregister_system_shared_memory(self, name: str) -> Any:
        """Unregister it."""

    def register_cuda_shared_memory(self, name: str, raw_handle: bytes, device_id: int, byte_size: int) -> Any:
        """Register memory of a device."""

    def unregister_cuda_shared_memory(self, name: str) -> Any:
        """Unregister it."""


class SharedArrays:
    """Arrays in one shared region: the server reads and writes tensors there, and nothing is sent.

        with client.shared({"image": pixels, "probabilities": ((1, 10), "float32")}) as region:
            client.infer("digits", [region.input("image")], outputs=[region.output("probabilities")])
            region["probabilities"]  # a view of what the model wrote

    The server reads the arrays' content at the time of a request, so they can be refilled between requests.

    Args:
        client: a client of the server, which must run on this machine and allow regions of clients.
        arrays: arrays by name. Each is an array, a tensor of any framework that speaks DLPack, or a pair (shape,
            dtype), which is an array for an output.
        name: the name of the region; None: a new name.

    Raises:
        InferenceServerException: an array has a datatype that cannot be shared, or the server refuses the region.
    """

    def __init__(self, client: Registry, arrays: Mapping[str, Any], name: str | None = None) -> None:
        import numpy as np

        self.name = name or f"inferd-client-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._client = client
        self._given: dict[str, np.ndarray] = {}
        self._places: dict[str, tuple[int, tuple[int, ...], np.dtype[Any]]] = {}
        self._arrays: dict[str, np.ndarray] = {}
        end = 0
        for key, given in arrays.items():
            if isinstance(given, tuple):
                shape, kind = tuple(given[0]), np.dtype(given[1])
            else:
                self._given[key] = host_array(given)
                shape, kind = self._given[key].shape, self._given[key].dtype
            if kind.kind in "OSU":
                raise_error(f"{key!r}: strings have no fixed size, so they cannot be shared")
            if np_to_triton_dtype(kind) is None:
                raise_error(f"{key!r}: the protocol has no datatype for {kind}, so it cannot be shared")
            kind = kind.newbyteorder("<")
            self._places[key] = (end, shape, kind)
            if key in self._given:
                self._given[key] = self._given[key].astype(kind, copy=False)
            size = kind.itemsize * math.prod(shape)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        self.byte_size = max(end, ALIGNMENT)

    def __enter__(self) -> Self:
        import numpy as np

        from inferd_client.utils.shared_memory import MappedObject

        self._object = MappedObject(self.name, create=True, size=self.byte_size)
        try:
            for key, (offset, shape, kind) in self._places.items():
                array: np.ndarray = np.ndarray(shape, kind, buffer=self._object.buf, offset=offset)
                if key in self._given:
                    array[...] = self._given[key]
                self._arrays[key] = array
            self._client.register_system_shared_memory(self.name, f"/{self.name}", self.byte_size)
        except BaseException:
            self._remove()
            raise
        return self

    def _unregister(self) -> None:
        self._client.unregister_system_shared_memory(self.name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with contextlib.suppress(InferenceServerException):  # the region or the server is gone
                self._unregister()
        finally:
            self._remove()

    def _remove(self) -> None:
        self._arrays.clear()
        self._object.unlink()
        self._object.close()

    def __getitem__(self, name: str) -> Any:
        """A view of an array in the region."""
        return self._arrays[name]

    def _place(self, name: str) -> tuple[int, int, list[int], str]:
        offset, shape, kind = self._places[name]
        size = kind.itemsize
        for each in shape:
            size *= each
        return offset, size, list(shape), str(np_to_triton_dtype(kind))

    def input(self, name: str, array: str | None = None) -> InferInput:
        """The input `name`, with the array `array` as content, by default the one named as the input."""
        offset, size, shape, datatype = self._place(array or name)
        return InferInput(name, shape, datatype).set_shared_memory(self.name, size, offset)

    def output(self, name: str, array: str | None = None) -> InferRequestedOutput:
        """The output `name`, which the server writes to the array `array`, by default the one named as the output."""
        offset, size, _, _ = self._place(array or name)
        wanted = InferRequestedOutput(name)
        wanted.set_shared_memory(self.name, size, offset)
        return wanted


class DeviceArrays(SharedArrays):
    """Arrays in one region of a CUDA device's memory; needs cuda-bindings. Otherwise as SharedArrays.

        with client.shared({"image": pixels, "probabilities": ((1, 10), "float32")}, device=0) as region:
            client.infer("digits", [region.input("image")], outputs=[region.output("probabilities")])
            torch.from_dlpack(region["probabilities"])  # a view of what the model wrote

    Args:
        client, arrays, name: see SharedArrays; the arrays are copied to the device.
        device: its number.

    Raises:
        CudaSharedMemoryException: there is no such device, or no memory on it.
        RuntimeError: cuda-bindings is not installed.
    """

    def __init__(self, client: Registry, arrays: Mapping[str, Any], name: str | None = None, device: int = 0) -> None:
        from inferd_client.utils import cuda_shared_memory

        super().__init__(client, arrays, name)
        self._cuda = cuda_shared_memory
        self._device = device

    def __enter__(self) -> Self:
        self._region = self._cuda.create_shared_memory_region(self.name, self.byte_size, self._device)
        try:
            for key, array in self._given.items():
                self._cuda.set_shared_memory_region(self._region, [array], self._places[key][0])
            handle = self._cuda.get_raw_handle(self._region)
            self._client.register_cuda_shared_memory(self.name, handle, self._device, self.byte_size)
        except BaseException:
            self._remove()
            raise
        return self

    def _unregister(self) -> None:
        self._client.unregister_cuda_shared_memory(self.name)

    def _remove(self) -> None:
        self._cuda.destroy_shared_memory_region(self._region)

    def __getitem__(self, name: str) -> Any:
        """A view of an array in the region, which speaks DLPack."""
        offset, _, shape, datatype = self._place(name)
        return self._cuda.as_shared_memory_tensor(self._region, datatype, shape, offset)

    def numpy(self, name: str) -> np.ndarray:
        """A copy of an array in the region."""
        offset, shape, kind = self._places[name]
        copied: np.ndarray = self._cuda.get_contents_as_numpy(self._region, kind, shape, offset)
        return copied
