"""Tensors of a model that no request contains: inputs that the batch provides, and outputs that the server keeps."""

from __future__ import annotations

from collections.abc import Iterator

from inferd.backends.api import SuppliedSpec, TensorSpec
from inferd.server.engine.config.datatypes import NAME_OF
from inferd.server.pb import model_config_pb2 as pb

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
