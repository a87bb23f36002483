"""A Batch in numpy, so that backends are tested without lanes and requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

NUMPY_TYPES = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
    "BF16": ml_dtypes.bfloat16,
    "BYTES": np.object_,
}


class FakeView:
    """Stands in for inferd._native.execution.view.View, over an array; the elements of a BYTES tensor are bytes."""

    def __init__(self, array: np.ndarray, datatype: str) -> None:
        assert array.dtype == NUMPY_TYPES[datatype]
        self.array = array
        self.datatype = datatype
        self.shape = array.shape

    def numpy(self) -> np.ndarray:
        return self.array

    def strings(self) -> list[bytes]:
        assert self.datatype == "BYTES"
        return list(self.array.reshape(-1))

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **options: Any) -> Any:
        if self.datatype == "BYTES":
            raise BufferError("a BYTES tensor cannot be exchanged by DLPack")
        if self.datatype == "BF16":
            import torch  # numpy exports no bfloat16

            return torch.from_numpy(self.array.view(np.uint16)).view(torch.bfloat16).__dlpack__()
        return self.array.__dlpack__()


class FakeBatch:
    """Stands in for inferd._native.execution.python_batch.Batch.

    Args:
        inputs: arrays by name, None for an optional input that is left out.
        outputs: datatypes of the model's outputs by name.
        wanted: the outputs that are asked for; all by default.
        rows: of a model with a batch dimension, which every output is then checked for; 0 without one.
        places: memory of the client for outputs.
    """

    instance_name = "fake_0"
    request_count = 1

    def __init__(
        self,
        inputs: Mapping[str, np.ndarray | None],
        outputs: Mapping[str, str],
        wanted: Sequence[str] | None = None,
        rows: int = 0,
        places: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self.places = places or {}
        self.rows = rows or 1
        self.batches = rows > 0
        self.inputs = inputs
        self.datatypes = outputs
        self.wanted = set(outputs if wanted is None else wanted)
        self.outputs: dict[str, np.ndarray] = {}
        self.handed_over: dict[str, Any] = {}  # what the backend gave, as it gave it

    def input(self, name: str) -> FakeView | None:
        array = self.inputs[name]
        if array is None:
            return None
        datatype = next(v2 for v2, dtype in NUMPY_TYPES.items() if array.dtype == dtype)
        return FakeView(array, datatype)

    def wants(self, name: str) -> bool:
        assert name in self.datatypes
        return name in self.wanted

    @property
    def placed(self) -> bool:
        return bool(self.places)

    def place(self, name: str, shape: Any = None) -> FakeView | None:
        return FakeView(self.places[name], self.datatypes[name]) if name in self.places else None

    def set_output(self, name: str, array: Any) -> None:
        datatype = self.datatypes[name]
        self.handed_over[name] = array
        if not isinstance(array, np.ndarray):
            array = self._from_dlpack(array, datatype)
        if datatype == "BF16" and array.dtype == np.uint16:
            array = array.view(ml_dtypes.bfloat16)
        if array.dtype != NUMPY_TYPES[datatype]:
            raise ValueError(f"output '{name}' must be {datatype}, got {array.dtype}")
        if not array.flags.c_contiguous:
            raise ValueError(f"output '{name}' must be C-contiguous")
        self._keep(name, array)

    def set_bytes_output(self, name: str, elements: Sequence[bytes | str], shape: Sequence[int]) -> None:
        assert self.datatypes[name] == "BYTES"
        encoded = [element.encode() if isinstance(element, str) else bytes(element) for element in elements]
        array = np.empty(len(encoded), dtype=object)
        array[:] = encoded
        self._keep(name, array.reshape(tuple(shape)))

    def _keep(self, name: str, array: np.ndarray) -> None:
        if self.batches and array.shape[:1] != (self.rows,):
            raise ValueError(f"output '{name}' must have the batch dimension {self.rows} first, got {array.shape}")
        self.outputs[name] = array

    @staticmethod
    def _from_dlpack(tensor: Any, datatype: str) -> np.ndarray:
        if datatype == "BF16":
            import torch

            return tensor.view(torch.uint16).numpy()
        return np.from_dlpack(tensor)
