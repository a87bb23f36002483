"""A model configuration as JSON text, in the form in which Triton passes it to Python models.

It is protobuf's JSON with the field names of model_config.proto and with defaults, except that 64-bit integers are
numbers: models compare and index with them.
"""

from __future__ import annotations

import json
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor

from server.pb import model_config_pb2 as pb

_WIDE = frozenset(
    {
        FieldDescriptor.TYPE_INT64,
        FieldDescriptor.TYPE_UINT64,
        FieldDescriptor.TYPE_SINT64,
        FieldDescriptor.TYPE_FIXED64,
        FieldDescriptor.TYPE_SFIXED64,
    }
)


def config_to_json(config: pb.ModelConfig) -> str:
    """The configuration as an object in JSON text."""
    found = json_format.MessageToDict(
        config, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return json.dumps(_with_numbers(found, config.DESCRIPTOR))


def config_from_json(text: str) -> pb.ModelConfig:
    """The opposite.

    Raises:
        ValueError: it is not a model configuration.
    """
    try:
        return json_format.Parse(text, pb.ModelConfig())
    except json_format.ParseError as error:
        raise ValueError(str(error)) from error


def _with_numbers(message: dict[str, Any], descriptor: Any) -> dict[str, Any]:
    for field in descriptor.fields:
        if field.name in message:
            message[field.name] = _value(message[field.name], field)
    return message


def _value(value: Any, field: FieldDescriptor) -> Any:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        return {key: _value(item, kind.fields_by_name["value"]) for key, item in value.items()}
    if isinstance(value, list):
        return [_one(item, field) for item in value]
    return _one(value, field)


def _one(value: Any, field: FieldDescriptor) -> Any:
    if field.message_type is not None:
        return _with_numbers(value, field.message_type)
    return int(value) if field.type in _WIDE else value
