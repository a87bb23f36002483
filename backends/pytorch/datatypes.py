"""PyTorch's element types by their v2 names."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TORCH_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "BOOL": "bool",
        "UINT8": "uint8",
        "UINT16": "uint16",
        "UINT32": "uint32",
        "UINT64": "uint64",
        "INT8": "int8",
        "INT16": "int16",
        "INT32": "int32",
        "INT64": "int64",
        "FP16": "float16",
        "FP32": "float32",
        "FP64": "float64",
        "BF16": "bfloat16",
    }
)
"""What PyTorch calls a v2 datatype; BYTES has no such type."""

V2_NAMES: Mapping[str, str] = MappingProxyType({name: v2 for v2, name in TORCH_TYPES.items()})
"""The reverse."""


def torch_type(datatype: str) -> torch.dtype:
    """The element type of a v2 datatype other than BYTES."""
    import torch

    found: torch.dtype = getattr(torch, TORCH_TYPES[datatype])
    return found
