"""Reads a model's file, and gives it the configuration's shapes and datatypes before it is compiled."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from inferd.backends.api import BackendError, ModelSource, ModelSpec
from inferd.backends.openvino.options import CPU, FIXED_BATCH, MODEL_FILE, PADDING, Options, failed, reason
from inferd.backends.openvino.signature import ELEMENTS, Port, by_name

if TYPE_CHECKING:
    import openvino

log = logging.getLogger("inferd.openvino")

WIDE = frozenset({"INT64", "UINT64"})
"""Datatypes that the plugin for CPUs computes with half of their bits."""


def make_core() -> openvino.Core:
    """A runtime that reads files into memory.

    By default it would map them, and a mapped file that is shortened or overwritten ends the process (SIGBUS).

    Raises:
        BackendError: the package is not whole.
    """
    try:
        import openvino

        core = openvino.Core()
    except Exception as error:  # an incomplete installation may raise anything at import
        raise BackendError(f"OpenVINO does not start: {type(error).__name__}: {reason(error)}") from error
    core.set_property({"ENABLE_MMAP": False})
    return core


def read_model(source: ModelSource, core: openvino.Core, usual: str = MODEL_FILE) -> openvino.Model:
    """Read the model's file, or the folder of a SavedModel.

    Raises:
        BackendError: there is none, or no frontend of OpenVINO reads it.
    """
    path = find_model(source, usual)
    try:
        return core.read_model(path)
    except RuntimeError as error:
        raise failed(source.spec, f"reading '{path}'", error) from error


def find_model(source: ModelSource, usual: str = MODEL_FILE) -> Path:
    """Where the model lies.

    Raises:
        BackendError: it is not there.
    """
    path = source.model_file(usual)
    if path.is_dir() and (path / path.name).is_file():
        path = path / path.name  # a folder of the model's name, with the model and its weights
    if not path.exists():
        raise source.not_found(path)
    return path


def shape_model(
    model: openvino.Model, spec: ModelSpec, inputs: Sequence[Port], outputs: Sequence[Port], options: Options
) -> int:
    """Give the model the shapes for which it is compiled.

    Returns:
        The rows that every batch must have; 0 where they vary, or the model has no batch dimension.

    Raises:
        BackendError: the model cannot have them.
    """
    if not spec.max_batch_size:
        if options.reshape:
            _reshape(model, spec, inputs, None, options)
        return 0
    if not options.fixed_batch:
        try:
            _reshape(model, spec, inputs, -1, options)
        except BackendError as error:
            log.info("model '%s' has no variable batch size: %s", spec.name, error)
        else:
            if _first_dims(model, spec, outputs) == {-1}:
                return 0
            log.info("model '%s' has no variable batch size, as its outputs have none", spec.name)
    rows = spec.max_batch_size
    _reshape(model, spec, inputs, rows, options)
    if _first_dims(model, spec, outputs) - {rows, -1}:
        raise BackendError(
            f"model '{spec.name}': model does not support batching while non-zero max_batch_size is specified: with "
            f"{rows} rows in, its outputs have another first dimension"
        )
    if not options.padding:
        log.warning(
            "model '%s' executes batches of %d rows only: smaller ones are refused, unless %s is YES",
            spec.name,
            rows,
            PADDING,
        )
    return rows


def _reshape(
    model: openvino.Model, spec: ModelSpec, inputs: Sequence[Port], rows: int | None, options: Options
) -> None:
    """Reshape the inputs. `rows` is their first dimension: -1 for any number, None for a model without batches."""
    import openvino

    known = by_name(inputs)
    shapes = {}
    for tensor in spec.model_inputs:
        port = known[tensor.name]
        first = () if rows is None else (rows,)
        if options.reshape or port.shape is None:
            shapes[port.index] = openvino.PartialShape([*first, *tensor.dims])
        elif rows is not None:
            whole = model.inputs[port.index].get_partial_shape()  # with bounds, which `shape` leaves out
            shapes[port.index] = openvino.PartialShape([openvino.Dimension(rows), *list(whole)[1:]])
    if not shapes:
        return
    try:
        model.reshape(shapes)
    except RuntimeError as error:
        raise failed(spec, "giving the inputs the shapes of the configuration", error) from error


def _first_dims(model: openvino.Model, spec: ModelSpec, outputs: Sequence[Port]) -> set[int]:
    known = by_name(outputs)
    found = set()
    for tensor in spec.model_outputs:
        partial = model.outputs[known[tensor.name].index].get_partial_shape()
        if partial.rank.is_dynamic or not len(partial) or partial[0].is_dynamic:
            found.add(-1)
        else:
            found.add(partial[0].get_length())
    return found


def convert_types(
    model: openvino.Model, spec: ModelSpec, inputs: Sequence[Port], outputs: Sequence[Port]
) -> openvino.Model:
    """The model with the datatypes of the configuration, by conversions at its ends."""
    import openvino
    from openvino import preprocess

    changes = preprocess.PrePostProcessor(model)
    changed = False
    for tensors, ports, end in (
        (spec.model_inputs, by_name(inputs), changes.input),
        (spec.model_outputs, by_name(outputs), changes.output),
    ):
        for tensor in tensors:
            port = ports[tensor.name]
            if port.datatype != tensor.datatype:
                log.info("model '%s': '%s' is %s in the file and converted from or to %s", spec.name, tensor.name,
                         port.element, tensor.datatype)  # fmt: skip
                end(port.index).tensor().set_element_type(getattr(openvino.Type, ELEMENTS[tensor.datatype]))
                changed = True
    if not changed:
        return model
    try:
        return changes.build()
    except RuntimeError as error:
        raise failed(spec, "converting to the datatypes of the configuration", error) from error


def compile_model(
    model: openvino.Model, spec: ModelSpec, core: openvino.Core, options: Options
) -> openvino.CompiledModel:
    """Compile the model for its device.

    Raises:
        BackendError: OpenVINO refuses the model or a property.
    """
    wide = [tensor.name for tensor in (*spec.model_inputs, *spec.model_outputs) if tensor.datatype in WIDE]
    if wide and options.device == CPU:
        log.warning(
            "model '%s': OpenVINO computes integers of 64 bits with 32 on CPUs, so what is beyond +-2^31 of %s is cut",
            spec.name,
            ", ".join(map(repr, dict.fromkeys(wide))),
        )
    try:
        return core.compile_model(model, options.device, dict(options.properties))
    except RuntimeError as error:
        hint = ""
        if spec.max_batch_size and not options.fixed_batch:
            hint = f"; a model that takes no variable batch size may do with {FIXED_BATCH} YES"
        raise BackendError(f"{failed(spec, f'compiling for {options.device}', error)}{hint}") from error
