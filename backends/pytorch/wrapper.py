"""Reads the inputs of an AOTInductor package's library from the C++ source in the package.

The library tells only the number of its inputs, and checks nothing: it computes addresses from the sizes for which it
was compiled. PyTorch's generated source contains the checks of a debug mode. From these, this module reads datatypes,
ranks, sizes, and which sizes must be equal.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inferd.backends.api import BackendError
from inferd.backends.pytorch.datatypes import V2_NAMES

MAX_RANK = 16  # dimensions of a tensor, the batch dimension included
UNBOUNDED = (1 << 62) - 1
SMALLEST_VARIABLE = 2
"""The lower bound that torch.export gives every variable dimension, because it handles the sizes 0 and 1 separately.
The library takes size 1, too."""

_NAME = re.compile(r'inputs_info_\[(\d+)\]\.name = "(\w+)";')
_CHECK = re.compile(r"static void check_input_(\d+)\((.*?)\n}\n", re.DOTALL)
_DATATYPE = re.compile(r"expected_dtype = aoti_torch_dtype_(\w+)\(\)")
_FIXED = re.compile(r"if \((\d+) != \w+_size\[(\d+)\]\)")
_LOWEST = re.compile(r"if \(\w+_size\[(\d+)\] < (\d+)\)")
_HIGHEST = re.compile(r"if \(\w+_size\[(\d+)\] > (\d+)\)")
_STRIDE = re.compile(r"\w+_stride\[(\d+)\]")
_LAYOUT = re.compile(r'assert_size_stride\((\w+), \{(.*?)\}, \{(.*?)\}, "input"\)')


@dataclass(frozen=True, slots=True)
class Dimension:
    """The sizes that one dimension may have.

    Attributes:
        symbol: dimensions with the same symbol, also of other inputs, vary together; empty: this one varies alone.
        factor: with a symbol, the dimension is factor * symbol + offset.
        offset: see factor.
    """

    lowest: int
    highest: int
    symbol: str = ""
    factor: int = 1
    offset: int = 0

    @property
    def varies(self) -> bool:
        """Whether it may have more than one size."""
        return self.lowest != self.highest


@dataclass(frozen=True, slots=True)
class ExpectedInput:
    """An input as the library was compiled for it, contiguous."""

    datatype: str
    dims: tuple[Dimension, ...]


def expected_inputs(source: str) -> tuple[ExpectedInput, ...] | None:
    """The inputs in the order of the library; None for a source of an unknown form.

    Raises:
        BackendError: the server cannot give or check an input of the library; the text says why.
    """
    names = {int(index): name for index, name in _NAME.findall(source)}
    checks = {int(index): body for index, body in _CHECK.findall(source)}
    layouts = {name: (sizes, strides) for name, sizes, strides in _LAYOUT.findall(source)}
    if sorted(names) != list(range(len(names))) or names.keys() != checks.keys():
        return None
    return tuple(_expected(index, checks[index], layouts.get(names[index])) for index in range(len(names)))


def _expected(index: int, check: str, layout: tuple[str, str] | None) -> ExpectedInput:
    found = _DATATYPE.search(check)
    if found is None or found[1] not in V2_NAMES:
        raise BackendError(f"input {index} has the datatype {found[1] if found else 'unknown'}, which cannot be served")
    lowest = {int(dim): int(size) for dim, size in _LOWEST.findall(check)}
    highest = {int(dim): int(size) for dim, size in _HIGHEST.findall(check)}
    for size, dim in _FIXED.findall(check):
        lowest[int(dim)] = highest[int(dim)] = int(size)
    if layout is None:  # the model does not use this input
        dims = {*lowest, *highest, *(int(dim) for dim in _STRIDE.findall(check))}
        sizes = [_Form("", 1, 0)] * (max(dims) + 1 if dims else 0)
    else:
        sizes = _contiguous(index, *layout)
    if len(sizes) > MAX_RANK:
        raise BackendError(f"input {index} has {len(sizes)} dimensions: at most {MAX_RANK} can be served")
    return ExpectedInput(
        V2_NAMES[found[1]], tuple(_dimension(form, lowest, highest, dim) for dim, form in enumerate(sizes))
    )


@dataclass(frozen=True, slots=True)
class _Form:
    """The size factor * symbol + offset. Constant and unknown sizes have no symbol; a constant has factor 0."""

    symbol: str
    factor: int
    offset: int


def _dimension(form: _Form, lowest: Mapping[int, int], highest: Mapping[int, int], dim: int) -> Dimension:
    if form.symbol == "" and form.factor == 0:
        return Dimension(form.offset, form.offset)
    low = lowest.get(dim, 1)
    if low != highest.get(dim) and low <= SMALLEST_VARIABLE * form.factor + form.offset:
        low = max(1, form.factor + form.offset)
    return Dimension(low, highest.get(dim, UNBOUNDED), form.symbol, form.factor, form.offset)


def _contiguous(index: int, sizes: str, strides: str) -> list[_Form]:
    """The sizes of an input that is contiguous for all sizes."""
    forms = [_form(index, text) for text in _elements(sizes)]
    values = {form.symbol: 1009 + 2 * number for number, form in enumerate(forms) if form.symbol}
    expected, stride = [], 1
    for text in reversed(_elements(sizes)):
        expected.append(stride)
        stride *= _value(text, values)
    given = [_value(text, values) for text in _elements(strides)]
    if given != expected[::-1]:
        raise BackendError(
            f"input {index} was exported with the strides {{{strides}}} for the sizes {{{sizes}}}, and is given "
            "contiguous: export it with a contiguous example"
        )
    return forms


def _elements(text: str) -> list[str]:
    return [re.sub(r"(\d)L\b", r"\1", element).strip() for element in text.split(",") if element.strip()]


def _form(index: int, text: str) -> _Form:
    symbols = sorted(set(re.findall(r"[A-Za-z_]\w*", text)))
    if not symbols:
        return _Form("", 0, _value(text, {}))
    offset, first, second = (_value(text, dict.fromkeys(symbols, number)) for number in (0, 1, 2))
    if len(symbols) > 1 or second - first != first - offset or first <= offset:
        raise BackendError(
            f"input {index} has a dimension of size {text}, computed from others in a way that cannot be checked for "
            "each request: export it with a fixed dimension, or one of its own"
        )
    return _Form(symbols[0], first - offset, offset)


def _value(text: str, symbols: Mapping[str, int]) -> int:
    """An expression of numbers and symbols.

    Raises:
        BackendError: the expression has another form.
    """

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name) if name in symbols:
                return symbols[name]
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return value(left) * value(right)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return value(left) + value(right)
            case ast.BinOp(left=left, op=ast.Sub(), right=right):
                return value(left) - value(right)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
        raise BackendError(f"a dimension has the size {text}, which cannot be checked for each request")

    try:
        return value(ast.parse(text, mode="eval").body)
    except SyntaxError:
        raise BackendError(f"a dimension has the size {text}, which cannot be checked for each request") from None


def mismatch(expected: Sequence[ExpectedInput], shapes: Sequence[Sequence[int]]) -> str:
    """The error in the shapes of one call, as "dimension 1 of input 0 is 5, ..."; empty without one.

    `_aoti` makes the same check natively; this one is for calls from Python.
    """
    symbols: dict[str, int] = {}
    for plain in (True, False):  # a dimension that is a symbol itself comes before those computed from it
        for index, (each, shape) in enumerate(zip(expected, shapes, strict=True)):
            if len(shape) != len(each.dims):
                return f"input {index} has {len(shape)} dimensions, the compiled model takes {len(each.dims)}"
            for axis, (dim, size) in enumerate(zip(each.dims, shape, strict=True)):
                where = f"dimension {axis} of input {index} is {size}, the compiled model takes"
                if not dim.lowest <= size <= dim.highest:
                    return f"{where} {dim.lowest} to {dim.highest} there"
                if not dim.symbol or plain != (dim.factor == 1 and dim.offset == 0):
                    continue
                value = symbols.setdefault(dim.symbol, (size - dim.offset) // dim.factor)
                if size != dim.factor * value + dim.offset:
                    return f"{where} {dim.factor * value + dim.offset} there, beside the other inputs"
    return ""
