"""Memory for outputs whose shape only the execution determines."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Protocol

from inferd.backends.api import BackendError

if TYPE_CHECKING:
    from inferd._native.gpu.batch import GpuBatch

ALIGNMENT = 256  # of an instance's memory


Scrap = Callable[[str, int], int]
"""Allocates memory for an output that is not configured: takes name and bytes, returns the address."""


class OutputAllocator(Protocol):
    """An IOutputAllocator of TensorRT's that gives a batch's own memory."""

    shapes: dict[str, tuple[int, ...]]  # of outputs, as far as the execution has told them
    problem: Exception | None  # why there was no memory

    def begin(self, batch: GpuBatch, scrap: Scrap, configured: Collection[str]) -> None:
        """Allocate for this batch, which the model executes next.

        Args:
            scrap: allocates for outputs that are not configured.
            configured: names of the configured outputs.
        """

    def end(self) -> None:
        """The batch was submitted: allocate no more for it."""


def make_allocator(module: Any) -> OutputAllocator:
    """An allocator for one context; `module` is the imported TensorRT."""

    class Allocator(module.IOutputAllocator):  # type: ignore[misc]  # the class is known at run time only
        def __init__(self) -> None:
            module.IOutputAllocator.__init__(self)
            self.shapes: dict[str, tuple[int, ...]] = {}
            self.problem: Exception | None = None
            self._give: Callable[[str, int], int] | None = None

        def begin(self, batch: GpuBatch, scrap: Scrap, configured: Collection[str]) -> None:
            self.problem = None
            self.shapes.clear()
            self._give = lambda name, size: batch.output_memory(name, size) if name in configured else scrap(name, size)

        def end(self) -> None:
            self._give = None

        # TensorRT would print an exception of these methods and lose it. Address 0 makes the execution fail.
        def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int:  # noqa: ARG002
            try:
                if self._give is None or alignment > ALIGNMENT:
                    raise BackendError(
                        f"there is no memory for output '{tensor_name}' at multiples of {alignment} bytes"
                    )
                return self._give(tensor_name, size)
            except Exception as error:
                self.problem = error
                return 0

        def reallocate_output_async(
            self,
            tensor_name: str,
            memory: int,
            size: int,
            alignment: int,
            stream: int,  # noqa: ARG002
        ) -> int:
            return self.reallocate_output(tensor_name, memory, size, alignment)

        def notify_shape(self, tensor_name: str, shape: Any) -> None:
            self.shapes[tensor_name] = tuple(shape)

    return Allocator()
