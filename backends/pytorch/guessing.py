"""Guesses the unrecorded inputs and outputs of a TorchScript archive: by its operators, and by running it.

The first operator that uses an argument often has weights, whose shape tells that of the argument: the channels of a
convolution, the features of a layer. An embedding looks up integers. Open shapes are tried with zeros, in batches of
two sizes. The first shapes on which the module runs are only a guess: it may run on shapes for which it was not made.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from inferd.backends.api import BackendError, Signature, TensorSpec
from inferd.backends.pytorch.datatypes import V2_NAMES, torch_type
from inferd.backends.pytorch.forward import ANY, STRINGS, TENSOR, TENSORS_BY_NAME, text_of

if TYPE_CHECKING:
    import torch

SIZES = (8, 32, 224, 28, 299, 512, 1)
"""Sizes to try for open dimensions, until the module runs."""
MOST_TRIED = 12
"""How many combinations of kinds of inputs are tried."""
MOST_OPERATORS = 12
"""The most operators between an argument and the one that determines its shape."""
KEEPS_SHAPE = {
    f"aten::{name}"
    for name in ("add", "clone", "contiguous", "detach", "div", "dropout", "float", "flatten", "mul", "relu", "relu_",
                 "sigmoid", "sub", "tanh", "to")
}  # fmt: skip
"""Operators behind which the next operator still tells the shape of the argument."""
FLOATS, NUMBERS, PICTURE = ("FP32", (-1,)), ("INT64", (-1,)), ("FP32", (3, -1, -1))
INSTEAD = "say what it takes with --input NAME:DATATYPE:SIZE,SIZE, once for each, without the batch"

Kind = tuple[str, tuple[int, ...]]
"""A datatype, and dimensions without the batch's."""


class Run(NamedTuple):
    """Results of a module: datatypes and shapes."""

    datatypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


def guess(model: str, module: torch.jit.ScriptModule, known: Sequence[TensorSpec], *, whole: bool) -> Signature:
    """Guess the inputs and outputs of a module.

    Args:
        model: its name, for messages.
        known: inputs, by the names of forward()'s arguments, or the keys of its dictionary.
        whole: `known` has all dimensions, and no batch is tried.

    Raises:
        BackendError: forward() runs on nothing that is tried, or cannot be served.
    """
    arguments = list(module.forward.schema.arguments)[1:]  # without self
    by_name = len(arguments) == 1 and text_of(arguments[0].type) == TENSORS_BY_NAME
    names = [spec.name for spec in known]
    if by_name:
        if not known:
            raise BackendError(f"model '{model}': forward() takes a dictionary, whose keys are not told: {INSTEAD}")
    else:
        given = {spec.name: spec for spec in known}
        for name in sorted(given.keys() - {argument.name for argument in arguments}):
            raise BackendError(f"model '{model}': forward() has no argument '{name}': {_listed(arguments)}")
        arguments = [each for each in arguments if each.name in given or not each.has_default_value()]
        names = [argument.name for argument in arguments]
    choices = _choices(model, module, arguments, known, by_name)
    said = "nothing was tried"
    for chosen in itertools.islice(itertools.product(*choices), MOST_TRIED):
        found, problem = _tried(module, names, chosen, by_name, whole)
        if found is not None:
            return found
        said = problem or said
    raise BackendError(f"model '{model}': forward() ran on nothing that was tried: {INSTEAD}; {said}")


def _listed(arguments: Sequence[Any]) -> str:
    return f"it takes {', '.join(argument.name for argument in arguments)}"


def _choices(
    model: str, module: torch.jit.ScriptModule, arguments: Sequence[Any], known: Sequence[TensorSpec], by_name: bool
) -> list[list[Kind]]:
    """The kinds that each input may have, the likeliest first."""
    given = {spec.name: (spec.datatype, spec.dims) for spec in known}
    if by_name:
        return [[kind] for kind in given.values()]
    told = _told_by_operators(module)
    numbers_first = any(kind[0] == "INT64" for kind in told.values())
    others = [NUMBERS, FLOATS, PICTURE] if numbers_first else [FLOATS, NUMBERS, PICTURE]
    choices = []
    for argument in arguments:
        kind = text_of(argument.type)
        if argument.name in given:
            choices.append([given[argument.name]])
        elif kind == STRINGS:
            choices.append([("BYTES", (1,))])
        elif kind in (TENSOR, ANY):
            first = [told[argument.name]] if argument.name in told else []
            choices.append([*first, *(each for each in others if each not in first)])
        else:
            raise BackendError(f"model '{model}': forward() takes '{argument.name}' of type {kind}, which no input is")
    return choices


# ---- by its operators -----------------------------------------------------------------------------------------------


def _told_by_operators(module: torch.jit.ScriptModule) -> dict[str, Kind]:
    """The kinds of arguments by name, as far as the first operators that use them determine the kinds."""
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated upstream, as the format is
            graph = torch.jit.freeze(module).graph
    except RuntimeError:
        return {}  # its weights look like its other attributes
    names = [argument.name for argument in list(module.forward.schema.arguments)[1:]]
    found = {}
    for name, value in zip(names, list(graph.inputs())[1:], strict=False):
        kind = next(_behind(value, MOST_OPERATORS), None)
        if kind is not None:
            found[name] = kind
    return found


def _behind(value: Any, steps: int) -> Iterator[Kind]:
    for use in value.uses():
        kind = _told_by(use.user, use.offset)
        if kind is not None:
            yield kind
        elif steps and use.user.kind() in KEEPS_SHAPE and use.offset == 0:
            yield from _behind(use.user.output(), steps - 1)


def _told_by(node: Any, offset: int) -> Kind | None:
    """The kind that an operator requires of its operand of this number."""

    def constant(index: int) -> Any:
        return list(node.inputs())[index].toIValue()

    kind = node.kind().removeprefix("aten::")
    if kind == "embedding" and offset == 1:
        return NUMBERS
    place = {"linear": 1, "addmm": 2, "matmul": 1, "mm": 1, "batch_norm": 3}.get(kind)
    if kind.startswith("conv") or kind == "_convolution":
        place = 1
    weights = constant(place) if place is not None and offset == (1 if kind == "addmm" else 0) else None
    if weights is None or str(weights.dtype).removeprefix("torch.") not in V2_NAMES:
        return None
    datatype = V2_NAMES[str(weights.dtype).removeprefix("torch.")]
    if kind == "linear":
        return datatype, (weights.shape[1],)
    if kind in ("addmm", "matmul", "mm"):
        return (datatype, (weights.shape[0],)) if weights.dim() == 2 else None
    if kind == "batch_norm":
        return datatype, (weights.shape[0], -1, -1)
    groups, transposed = (constant(8), constant(6)) if kind in ("_convolution", "convolution") else (constant(6), False)
    channels = weights.shape[0] if transposed else weights.shape[1] * (groups or 1)
    return datatype, (channels, *[-1] * (weights.dim() - 2))


# ---- by running it --------------------------------------------------------------------------------------------------


def _tried(
    module: torch.jit.ScriptModule, names: Sequence[str], kinds: Sequence[Kind], by_name: bool, whole: bool
) -> tuple[Signature | None, str]:
    """The signature if inputs of these kinds are right, else the error of the last run."""
    problem = ""

    def run(rows: int, size: int) -> Run | None:
        nonlocal problem
        head = (rows,) if rows else ()
        shapes = [(*head, *(size if each < 0 else each for each in dims)) for _, dims in kinds]
        try:
            return _run(module, names, kinds, shapes, by_name)
        except Exception as error:  # also torch.jit.Error, for what the script itself raises
            told = ", ".join(
                f"{name} {kind[0]} {list(shape)}" for name, kind, shape in zip(names, kinds, shapes, strict=True)
            )
            lines = str(error).strip().splitlines() or [type(error).__name__]
            problem = f"on zeros as {told} it said: {lines[-1]}"
            return None

    is_open = any(size < 0 for _, dims in kinds for size in dims)
    for rows in (0,) if whole else (2, 1):
        for size in SIZES if is_open else SIZES[:1]:
            if (first := run(rows, size)) is None:
                continue
            other = run(rows, size * 2) if is_open else None  # a division may absorb one more element
            dims = [tuple(size if each < 0 and other is None else each for each in dims) for _, dims in kinds]
            more = run(rows + 1, size) if rows else None
            if len({tuple(map(len, each.shapes)) for each in (first, other, more) if each is not None}) > 1:
                problem = "on other sizes it returned other numbers of tensors or dimensions"
                continue
            return _signature(names, kinds, dims, rows, first, other, more), ""
    return None, problem


def _run(
    module: torch.jit.ScriptModule,
    names: Sequence[str],
    kinds: Sequence[Kind],
    shapes: Sequence[tuple[int, ...]],
    by_name: bool,
) -> Run:
    import torch

    values: list[Any] = []
    for (datatype, _), shape in zip(kinds, shapes, strict=True):
        values.append([""] * shape[0] if datatype == "BYTES" else torch.zeros(shape, dtype=torch_type(datatype)))
    with torch.inference_mode():
        if by_name:
            result = module(dict(zip(names, values, strict=True)))
        else:
            result = module.forward(**dict(zip(names, values, strict=True)))
    text = isinstance(result, list) and result and isinstance(result[0], str)
    elements = [result] if text or not isinstance(result, tuple | list) else list(result)
    datatypes, found = [], []
    for element in elements:
        if isinstance(element, torch.Tensor):
            if str(element.dtype).removeprefix("torch.") not in V2_NAMES:
                raise ValueError(f"forward() returns {element.dtype}, which the protocol does not have")
            datatypes.append(V2_NAMES[str(element.dtype).removeprefix("torch.")])
            found.append(tuple(element.shape))
        elif isinstance(element, list) and all(isinstance(each, str) for each in element):
            datatypes.append("BYTES")
            found.append((len(element), 1))
        else:
            raise ValueError(f"forward() returns a {type(element).__name__}, which no output is")
    return Run(tuple(datatypes), tuple(found))


def _signature(
    names: Sequence[str],
    kinds: Sequence[Kind],
    dims: Sequence[tuple[int, ...]],
    rows: int,
    first: Run,
    other: Run | None,
    more: Run | None,
) -> Signature:
    """The signature from three runs: the first, with `rows` rows (0: no batch), one with other open sizes, one with
    another row."""
    batches = more is not None and all(
        before[:1] == (rows,) and after == (rows + 1, *before[1:])
        for before, after in zip(first.shapes, more.shapes, strict=True)
    )
    outputs = []
    for number, shape in enumerate(first.shapes):
        sizes = list(shape)
        for run in filter(None, (other, None if batches else more)):
            again = run.shapes[number]
            sizes = [size if same == size else -1 for size, same in zip(sizes, again, strict=True)]
        if first.datatypes[number] == "BYTES" and not batches:
            sizes = [-1]  # a list of texts
        outputs.append(TensorSpec(f"OUTPUT__{number}", first.datatypes[number], tuple(sizes[1:] if batches else sizes)))
    head: tuple[int, ...] = () if batches or not rows else (-1 if more is not None else rows,)
    inputs = []
    for name, (datatype, _), each in zip(names, kinds, dims, strict=True):
        whole = (-1,) if datatype == "BYTES" and not batches else (*head, *each)
        inputs.append(TensorSpec(name, datatype, whole))
    return Signature(tuple(inputs), tuple(outputs), batches)
