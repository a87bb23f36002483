"""sequence_batching: its rules, and the specification made of it.

Texts are those of Triton's core ("model_config_utils.cc", "sequence_batch_scheduler.cc").
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from inferd.backends.api import SequenceSpec, StateSpec
from inferd.server.engine.config.findings import Finding
from inferd.server.engine.config.parameters import of_server, wrong
from inferd.server.engine.config.tensors import END_REASON, NAME_OF, SIZE_OF
from inferd.server.engine.pbtxt.files import read_bytes
from inferd.server.engine.pbtxt.source import FieldPath, Source
from inferd.server.errors import ConfigError
from inferd_client.pb import model_config_pb2 as pb

Control = pb.ModelSequenceBatching.Control
State = pb.ModelSequenceBatching.State

INITIAL_STATES = "initial_state"
"""The folder of a model in which the files of initial states lie."""

MAX_STATE_BYTES = 1 << 30
MAX_CANDIDATES = 1 << 20
MAX_DELAY_US = 1 << 62

PARAMETERS = (
    "sequence_end_notice",
    END_REASON,
    "sequence_max_backlog",
    "sequence_ends_with_stream",
    "sequence_drain_seconds",
)
"""The model parameters that only models with sequence_batching have."""

CORRELATION_TYPES = (pb.TYPE_UINT64, pb.TYPE_INT64, pb.TYPE_UINT32, pb.TYPE_INT32, pb.TYPE_STRING)
ROOT: FieldPath = ("sequence_batching",)


# ---- rules ----------------------------------------------------------------------------------------------------------


def broken_sequence_rules(config: pb.ModelConfig) -> Iterator[Finding]:
    """One finding for each rule that sequence_batching breaks."""
    if not config.HasField("sequence_batching"):
        for key in PARAMETERS:
            if key in config.parameters:
                yield Finding(("parameters", key), f"parameter '{key}' needs 'sequence_batching'", "remove it")
        return
    yield from _controls(config)
    yield from _names(config)
    yield from _strategy(config)
    for index, state in enumerate(config.sequence_batching.state):
        yield from _state(config, state, (*ROOT, "state", index))
    yield from _notice(config)


def _controls(config: pb.ModelConfig) -> Iterator[Finding]:
    kinds: Counter[int] = Counter()
    for index, control_input in enumerate(config.sequence_batching.control_input):
        path = (*ROOT, "control_input", index)
        if not control_input.name:
            yield Finding(path, "sequence batching control tensor must have a name")
        if len(control_input.control) != 1:
            many = "is specified for multiple control kinds" if control_input.control else "must specify a control kind"
            yield Finding(path, f"sequence batching control tensor '{control_input.name}' {many}")
        for control in control_input.control:
            kinds[control.kind] += 1
            if kinds[control.kind] == 2:
                yield Finding(path, f"sequence batching specifies multiple {Control.Kind.Name(control.kind)} tensors")
            yield from _control(control, (*path, "control", 0))


def _control(control: pb.ModelSequenceBatching.Control, path: FieldPath) -> Iterator[Finding]:
    kind = Control.Kind.Name(control.kind)
    pairs = {
        name: len(getattr(control, name))
        for name in ("int32_false_true", "fp32_false_true", "bool_false_true")
        if getattr(control, name)
    }
    either = "'int32_false_true', 'fp32_false_true'"
    if control.kind == Control.CONTROL_SEQUENCE_CORRID:
        if pairs:
            text = f"sequence batching must not specify either {either} or 'bool_false_true' for {kind}"
            yield Finding(path, text, "write data_type instead")
        if control.data_type not in CORRELATION_TYPES:
            allowed = ", ".join(pb.DataType.Name(number) for number in CORRELATION_TYPES)
            yield Finding(path, f"unexpected data type for control {kind}", f"allowed data types are {allowed}")
    elif not pairs:
        text = f"sequence batching must specify either {either} or 'bool_false_true' for {kind}"
        yield Finding(path, text, "write int32_false_true: [ 0, 1 ]")
    elif len(pairs) > 1:
        yield Finding(path, f"sequence batching specifies more than one from {either} and 'bool_false_true' for {kind}")
    else:
        [(name, count)] = pairs.items()
        if count != 2:
            text = f"sequence batching control '{name}' must have exactly 2 entries for {kind}"
            yield Finding((*path, name), text, f"got {count}")


def _names(config: pb.ModelConfig) -> Iterator[Finding]:
    """Check that every tensor has one source: a request, a control or a state."""
    batching = config.sequence_batching
    inputs = [tensor.name for tensor in config.input]
    inputs += [control.name for control in batching.control_input]
    inputs += [state.input_name for state in batching.state]
    if END_REASON in config.parameters:
        inputs.append(config.parameters[END_REASON].string_value)
    for name, count in Counter(inputs).items():
        if count > 1 and name:
            text = f"'{name}' is given {count} times among inputs, control inputs, states and {END_REASON}"
            yield Finding(ROOT, text)
    for name, count in Counter(state.output_name for state in batching.state).items():
        if count > 1 and name:
            yield Finding((*ROOT, "state"), f"{count} states have the 'output_name' '{name}'")


def _strategy(config: pb.ModelConfig) -> Iterator[Finding]:
    batching = config.sequence_batching
    oldest = (*ROOT, "oldest")
    for index, size in enumerate(batching.oldest.preferred_batch_size):
        path = (*oldest, "preferred_batch_size", index)
        if size <= 0:
            yield Finding(path, "sequence batching preferred batch size must be positive", f"got {size}")
        elif size > config.max_batch_size:
            text = f"sequence batching preferred batch size must be <= max batch size {config.max_batch_size}"
            yield Finding(path, text, f"got {size}")
    if not 0 <= batching.oldest.max_candidate_sequences <= MAX_CANDIDATES:
        text = f"sequence batching max_candidate_sequences must be in range [0, {MAX_CANDIDATES}]"
        yield Finding((*oldest, "max_candidate_sequences"), text, f"got {batching.oldest.max_candidate_sequences}")
    if not 0 <= batching.direct.minimum_slot_utilization <= 1:
        text = "sequence batching minimum slot utilization must be in range (0.0, 1.0]"
        got = f"got {batching.direct.minimum_slot_utilization:g}"
        yield Finding((*ROOT, "direct", "minimum_slot_utilization"), text, got)
    for path, value in (
        ((*ROOT, "max_sequence_idle_microseconds"), batching.max_sequence_idle_microseconds),
        ((*oldest, "max_queue_delay_microseconds"), batching.oldest.max_queue_delay_microseconds),
        ((*ROOT, "direct", "max_queue_delay_microseconds"), batching.direct.max_queue_delay_microseconds),
    ):
        if value > MAX_DELAY_US:
            yield Finding(path, f"{path[-1]} must be <= {MAX_DELAY_US}")


def _state(config: pb.ModelConfig, state: pb.ModelSequenceBatching.State, path: FieldPath) -> Iterator[Finding]:
    which = f"state '{state.input_name}'"
    if not state.input_name or not state.output_name:
        yield Finding(path, "a state must specify 'input_name' and 'output_name'")
    if state.data_type not in NAME_OF:
        yield Finding(path, f"{which} must specify 'data_type'")
        return
    if not state.dims:
        yield Finding(path, f"{which} must specify 'dims'")
    for dim in state.dims:
        if dim < 1 and dim != -1:
            text = f"{which} dimension must be integer >= 1, or -1 to indicate a variable-size dimension"
            yield Finding((*path, "dims"), text, f"got {dim}")
    dims = state.initial_state[0].dims if state.initial_state else state.dims
    if math.prod(max(1, dim) for dim in dims) * SIZE_OF.get(NAME_OF[state.data_type], 4) > MAX_STATE_BYTES:
        yield Finding((*path, "dims"), f"{which} must begin with at most {MAX_STATE_BYTES} bytes")
    for output in config.output:
        if output.name == state.output_name and output.data_type != state.data_type:
            yield Finding(path, f"{which} and output '{output.name}' must have the same data_type")
    if state.use_growable_memory and not state.use_same_buffer_for_input_output:
        text = (
            "In order to 'use_growable_memory', you must also enable 'use_same_buffer_for_input_output' for state "
            f"input name '{state.input_name}'"
        )
        yield Finding((*path, "use_growable_memory"), text)
    if len(state.initial_state) > 1:
        text = f"initial_state field for state input '{state.input_name}' must contain exactly one or zero element"
        yield Finding((*path, "initial_state"), text, f"found {len(state.initial_state)} elements")
    elif state.initial_state:
        yield from _initial_state(state, state.initial_state[0], (*path, "initial_state", 0))


def _initial_state(
    state: pb.ModelSequenceBatching.State, initial: pb.ModelSequenceBatching.InitialState, path: FieldPath
) -> Iterator[Finding]:
    name = state.input_name
    if initial.data_type != state.data_type:
        text = f"The data type used for 'initial_state' field of state '{name}' does not match the state data type"
        yield Finding((*path, "data_type"), text)
    if not initial.name:
        yield Finding(path, f"Field 'name' must be set when using initial_state for state input '{name}'")
    if len(initial.dims) != len(state.dims):
        text = (
            "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input "
            f"'{name}'. {len(initial.dims)} != {len(state.dims)}"
        )
        yield Finding(path, text)
    for given, wanted in zip(initial.dims, state.dims, strict=False):
        if given < 1:
            yield Finding(path, f"'initial_state' field for state input name '{name}' contains variable dimensions")
        elif wanted not in (-1, given):
            text = f"'initial_state' dim for input name '{name}' doesn't match 'state' dim description"
            yield Finding(path, text, f"{given} != {wanted}")
    if initial.WhichOneof("state_data") is None:
        yield Finding(path, f"initial_state setting expects state '{name}' to have state_data set")


def _notice(config: pb.ModelConfig) -> Iterator[Finding]:
    controls = config.sequence_batching.control_input
    kinds = {control.kind for control_input in controls for control in control_input.control}
    notices = not any(wrong(config)) and of_server(config)["sequence_end_notice"]
    if notices and Control.CONTROL_SEQUENCE_END not in kinds and END_REASON not in config.parameters:
        text = "parameter 'sequence_end_notice' needs a control input CONTROL_SEQUENCE_END or the parameter"
        yield Finding(("parameters", "sequence_end_notice"), f"{text} '{END_REASON}'")
    if END_REASON in config.parameters and not config.parameters[END_REASON].string_value:
        yield Finding(("parameters", END_REASON), f"parameter '{END_REASON}' must name an input of the model")


# ---- specification --------------------------------------------------------------------------------------------------


def sequence_spec(config: pb.ModelConfig, model_dir: Path, source: Source) -> SequenceSpec | None:
    """The specification of sequence_batching and its parameters; None without it.

    Raises:
        ConfigError: the file of an initial state cannot be read, or is too short.
    """
    if not config.HasField("sequence_batching"):
        return None
    batching = config.sequence_batching
    own = of_server(config)
    direct = not batching.HasField("oldest")
    strategy = batching.direct if direct else batching.oldest
    return SequenceSpec(
        direct=direct,
        iterative=batching.iterative_sequence,
        max_idle_us=batching.max_sequence_idle_microseconds,
        max_queue_delay_us=strategy.max_queue_delay_microseconds,
        min_slot_utilization=batching.direct.minimum_slot_utilization,
        max_candidates=batching.oldest.max_candidate_sequences,
        preferred_sizes=tuple(batching.oldest.preferred_batch_size),
        states=tuple(
            _state_spec(state, model_dir, source.at(*ROOT, "state", index, "initial_state"))
            for index, state in enumerate(batching.state)
        ),
        max_backlog=own["sequence_max_backlog"],
        drain_seconds=own["sequence_drain_seconds"],
        notices_end=own["sequence_end_notice"],
        ends_with_stream=own["sequence_ends_with_stream"],
    )


def _state_spec(state: pb.ModelSequenceBatching.State, model_dir: Path, where: str) -> StateSpec:
    initial = state.initial_state[0] if state.initial_state else None
    dims = tuple(initial.dims) if initial else tuple(max(1, dim) for dim in state.dims)
    datatype = NAME_OF.get(state.data_type, "BOOL")
    # A string is its length in four bytes, and its bytes. Without an initial state, Triton leaves the memory
    # uninitialised.
    data = bytes(math.prod(dims) * SIZE_OF.get(datatype, 4))
    if initial is not None and initial.data_file:
        try:
            data = _read_initial(model_dir, initial.data_file, datatype, math.prod(dims))
        except ConfigError as error:
            raise ConfigError(f"{where}: initial state of '{state.input_name}': {error}") from None
    return StateSpec(data, dims, state.use_same_buffer_for_input_output, state.use_growable_memory)


def _read_initial(model_dir: Path, name: str, datatype: str, elements: int) -> bytes:
    """The file's data, whose first bytes are the state: as in Triton it may have more.

    Raises:
        ConfigError: the file cannot be read, or is shorter.
    """
    data = read_bytes(model_dir / INITIAL_STATES, name, model_dir, MAX_STATE_BYTES)
    if datatype == "BYTES":
        return data[: _strings_size(data, elements, name)]
    size = elements * SIZE_OF[datatype]
    if len(data) < size:
        raise ConfigError(
            f"initial_state setting expects {size} bytes, but the data provided from {name} only has {len(data)} bytes"
        )
    return data[:size]


def _strings_size(data: bytes, elements: int, name: str) -> int:
    at = 0
    for _ in range(elements):
        at += 4 + int.from_bytes(data[at : at + 4], "little")
        if at > len(data):
            raise ConfigError(f"initial_state setting expects {elements} strings, but {name} holds fewer")
    return at
