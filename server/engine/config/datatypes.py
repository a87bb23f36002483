"""The datatypes of config.pbtxt and those of the v2 protocol."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import cast

from inferd.server.pb import model_config_pb2 as pb

_BY_SIZE = {
    1: ("BOOL", "UINT8", "INT8"),
    2: ("UINT16", "INT16", "FP16", "BF16"),
    4: ("UINT32", "INT32", "FP32"),
    8: ("UINT64", "INT64", "FP64"),
}

TYPE_OF: Mapping[str, pb.DataType] = MappingProxyType(
    {
        "BYTES" if number == pb.TYPE_STRING else name.removeprefix("TYPE_"): cast(pb.DataType, number)
        for name, number in pb.DataType.items()
        if number != pb.TYPE_INVALID
    }
)
""" "FP32" → pb.TYPE_FP32, "BYTES" → pb.TYPE_STRING."""

NAME_OF: Mapping[int, str] = MappingProxyType({number: name for name, number in TYPE_OF.items()})
"""The opposite: pb.TYPE_FP32 → "FP32"."""

SIZE_OF: Mapping[str, int] = MappingProxyType(
    {name: size for size, names in _BY_SIZE.items() for name in names},
)
"""Bytes of one element; BYTES, whose elements carry their own length, is not in it."""
