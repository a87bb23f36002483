"""The classification extension in numpy: the oracle of `_native/tensors/classify.pyx`."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from inferd._native.tensors.classify import classify_tensor

DTYPES = {
    "UINT8": "u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8",
    "INT8": "i1", "INT16": "<i2", "INT32": "<i4", "INT64": "<i8",
    "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip


def order(row: np.ndarray) -> list[int]:
    """Indices by falling value, NaN last, equal ones by index."""

    def key(index: int) -> tuple[int, float, int]:
        value = row[index].item()
        return (1, 0, index) if value != value else (0, -value, index)

    return sorted(range(len(row)), key=key)


def texts(array: np.ndarray, k: int, labels: Sequence[str] = ()) -> list[str]:
    """What the `k` highest of each row are to be called."""
    found = []
    for row in array:
        for index in order(row)[:k]:
            value = "nan" if row[index] != row[index] else f"{row[index]:f}" if array.dtype.kind == "f" else row[index]
            label = f":{labels[index]}" if index < len(labels) and labels[index] else ""
            found.append(f"{value}:{index}{label}")
    return found


def ours(array: np.ndarray, k: int, labels: Sequence[str] = ()) -> list[str]:
    """What the server calls them."""
    name = next(n for n, d in DTYPES.items() if np.dtype(d) == array.dtype)
    content = classify_tensor(array.tobytes(), name, *array.shape, k, labels)
    found = []
    while content:
        (size,) = struct.unpack_from("<I", content)
        found.append(content[4 : 4 + size].decode())
        content = content[4 + size :]
    return found
