"""The signature of a package of AOTInductor, found by running its library on zeros."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from inferd.backends.api import Signature, TensorSpec
from inferd.backends.pytorch.inductor import load_library
from inferd.backends.pytorch.package import Package
from inferd.backends.pytorch.wrapper import SMALLEST_VARIABLE, Dimension, ExpectedInput
from inferd.backends.temporary import TemporaryFolder

if TYPE_CHECKING:
    from inferd.backends.pytorch._aoti import Library


class _Zeros(NamedTuple):
    """An input for a trial."""

    datatype: str
    shape: tuple[int, ...]
    memory: bytes

    @property
    def pointer(self) -> int:
        import numpy as np

        return int(np.frombuffer(self.memory, np.uint8).ctypes.data)


def inspect_package(package: Package) -> Signature | None:
    """The signature of a package for the CPU. The package describes its inputs; two runs on zeros show its outputs.

    None for a package that does not describe its inputs, or that only PyTorch's loader can run.
    """
    from inferd.backends.pytorch._shim import AotiError

    if package.inputs is None or package.obstacle or package.device != "cpu":
        return None
    with TemporaryFolder("aoti") as folder:
        try:
            library = load_library(package.unpack(folder), "cpu", 1)
            small, large = (_trial(library, package.inputs, step) for step in (0, 1))
        except AotiError:
            return None
        del library
    outputs = [
        (datatype, tuple(a if a == b else -1 for a, b in zip(first, second, strict=True)))
        for (datatype, first), (_, second) in zip(small, large, strict=True)
    ]
    inputs = [(each.datatype, tuple(-1 if d.varies else d.lowest for d in each.dims)) for each in package.inputs]
    batches = all(dims[:1] == (-1,) for _, dims in (*inputs, *outputs))
    return Signature(_named("INPUT", inputs, batches), _named("OUTPUT", outputs, batches), batches)


def _named(prefix: str, tensors: Sequence[tuple[str, tuple[int, ...]]], batches: bool) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(f"{prefix}__{index}", datatype, dims[1:] if batches else dims or (1,))
        for index, (datatype, dims) in enumerate(tensors)
    )


def _trial(library: Library, expected: Sequence[ExpectedInput], step: int) -> list[tuple[str, tuple[int, ...]]]:
    """Datatypes and shapes of the outputs where every variable dimension is `step` above its smallest good size."""
    smallest: dict[str, int] = {}
    for dim in (dim for each in expected for dim in each.dims if dim.symbol):
        least = -(-(dim.lowest - dim.offset) // dim.factor)
        smallest[dim.symbol] = max(smallest.get(dim.symbol, SMALLEST_VARIABLE), least)

    def size(dim: Dimension) -> int:
        if not dim.varies:
            return dim.lowest
        if not dim.symbol:
            return min(max(dim.lowest, SMALLEST_VARIABLE) + step, dim.highest)
        return dim.factor * (smallest[dim.symbol] + step) + dim.offset

    inputs = []
    for each in expected:
        shape = tuple(size(dim) for dim in each.dims)
        count = 8
        for length in shape:
            count *= length
        inputs.append(_Zeros(each.datatype, shape, bytes(count)))
    return [(result.datatype, result.shape) for result in library.run(inputs)]
