"""The datatypes of config.pbtxt and those of the v2 protocol."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import cast

from server.pb import model_config_pb2 as pb

TYPE_OF: Mapping[str, pb.DataType] = MappingProxyType(
    {
        "BYTES" if number == pb.TYPE_STRING else name.removeprefix("TYPE_"): cast(pb.DataType, number)
        for name, number in pb.DataType.items()
        if number != pb.TYPE_INVALID
    }
)
""" "FP32" → pb.TYPE_FP32, "BYTES" → pb.TYPE_STRING."""

NAME_OF: Mapping[int, str] = MappingProxyType({number: name for name, number in TYPE_OF.items()})
"""The way back."""
