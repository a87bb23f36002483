"""Datatypes by name and size; the inputs that the batch provides, and the outputs that the server keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import cast

from inferd.backends.api import SuppliedSpec, TensorSpec
from inferd_client.pb import model_config_pb2 as pb

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


Control = pb.ModelSequenceBatching.Control

END_REASON = "sequence_end_reason"
"""The model parameter that names the control input with the reason for a sequence's end."""

KINDS = {
    Control.CONTROL_SEQUENCE_START: "START",
    Control.CONTROL_SEQUENCE_READY: "READY",
    Control.CONTROL_SEQUENCE_END: "END",
    Control.CONTROL_SEQUENCE_CORRID: "CORRID",
}


def supplied_inputs(config: pb.ModelConfig) -> Iterator[SuppliedSpec]:
    """Inputs that the batch provides, in the configuration's order: about ragged inputs, controls, states."""
    for batch_input in config.batch_input:
        yield from _batch_input(config, batch_input)
    if config.HasField("sequence_batching"):
        for control_input in config.sequence_batching.control_input:
            for control in control_input.control[:1]:
                yield _control(control_input.name, control)
        if END_REASON in config.parameters:
            name = config.parameters[END_REASON].string_value
            yield SuppliedSpec("END_REASON", TensorSpec(name, "INT32", (1,)))
        for state in config.sequence_batching.state:
            tensor = TensorSpec(state.input_name, NAME_OF.get(state.data_type, ""), tuple(state.dims))
            yield SuppliedSpec("STATE", tensor, source=state.output_name)


def _batch_input(config: pb.ModelConfig, batch_input: pb.BatchInput) -> Iterator[SuppliedSpec]:
    kind = pb.BatchInput.Kind.Name(batch_input.kind)
    for source in batch_input.source_input[:1]:
        ranks = {tensor.name: len(tensor.dims) for tensor in config.input}
        dims = (ranks.get(source, 0),) if kind == "BATCH_ITEM_SHAPE" else ()
        for name in batch_input.target_name:
            yield SuppliedSpec(kind, TensorSpec(name, NAME_OF.get(batch_input.data_type, ""), dims), source=source)


def kept_outputs(config: pb.ModelConfig) -> Iterator[TensorSpec]:
    """Outputs that the server keeps and no request can ask for: states that are not among the outputs."""
    asked = {output.name for output in config.output}
    if config.HasField("sequence_batching"):
        for state in config.sequence_batching.state:
            if state.output_name not in asked:
                yield TensorSpec(state.output_name, NAME_OF.get(state.data_type, ""), tuple(state.dims))


def _control(name: str, control: pb.ModelSequenceBatching.Control) -> SuppliedSpec:
    kind = KINDS[control.kind]
    if kind == "CORRID":
        return SuppliedSpec(kind, TensorSpec(name, NAME_OF.get(control.data_type, ""), (1,)))
    for datatype, values in (
        ("INT32", control.int32_false_true),
        ("FP32", control.fp32_false_true),
        ("BOOL", control.bool_false_true),
    ):
        if len(values) == 2:
            return SuppliedSpec(kind, TensorSpec(name, datatype, (1,)), (values[0], values[1]))
    return SuppliedSpec(kind, TensorSpec(name, "", (1,)))  # of an incomplete configuration, which is refused
