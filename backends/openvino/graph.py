"""The compiled model of an instance, and its repair after a failed run.

OpenVINO's CPU plugin keeps the shapes of the last run of each stream, and does not recompute a shape whose inputs look
the same. A run that fails while it computes a shape leaves some of them half changed: then the same wrong request is
answered with tensors of an earlier shape, and a correct request of the same shape fails, until other shapes come
(2026.4). So after each failure the stream is *mended*: it executes empty tensors and tensors of one element, which
change all shapes twice. If the model refuses these, it is compiled again. Runs begun before that are void.

One cannot choose the stream that executes a run. So if a compiled model has several streams, each instance compiles the
model for itself after the first failure, with a single stream.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import openvino

log = logging.getLogger("inferd.openvino")

LENGTHS = (0, 1)
"""Sizes of the variable dimensions of the tensors that mend a stream. Their elements, which may be dims, have the same
values."""


class Shared:
    """The compiled model that the instances of a version begin with.

    Args:
        compiled: the model.
        compile_alone: compiles it once more, with a single stream.
        streams: how many streams it has; 0: the device does not tell.
        dynamic: whether it has shapes that only a run decides.

    Attributes:
        spoiled: whether a run has failed. If there are several streams, the model must then not be run any more.
    """

    def __init__(
        self,
        compiled: openvino.CompiledModel,
        compile_alone: Callable[[], openvino.CompiledModel],
        streams: int,
        dynamic: bool,
    ) -> None:
        self.compiled = compiled
        self.compile_alone = compile_alone
        self.streams = streams
        self.dynamic = dynamic
        self.spoiled = False


class Graph:
    """The compiled model of one instance and its alternate.

    Attributes:
        compiled: the model.
        mends: how often it was spoiled or compiled again. A run that began before the last time is void.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._alone = shared.streams == 1
        self._spoiled = False
        self.compiled = shared.compiled
        self.mends = 0

    def spoil(self) -> None:
        """A run has failed."""
        if self._shared.dynamic:
            self._spoiled = True
            self._shared.spoiled = True
            self.mends += 1

    def look(self) -> None:
        """Mend the stream if a run has failed, also one of another instance. Call this before and after each run.

        Raises:
            RuntimeError: the model cannot be compiled again.
        """
        if self._alone and not self._spoiled:
            return
        if not self._shared.spoiled or (self._alone and all(self._takes(length) for length in LENGTHS)):
            self._spoiled = False
            return
        log.info("a model is compiled again, because a run of it has failed")
        self.compiled = self._shared.compile_alone()
        self._alone = True
        self._spoiled = False
        self.mends += 1

    def _takes(self, length: int) -> bool:
        """Run the model with tensors whose variable dimensions have this length; False if it refuses."""
        request = self.compiled.create_infer_request()
        try:
            for index, port in enumerate(self.compiled.inputs):
                request.set_input_tensor(index, _tensor(port, length))
            request.start_async()
            request.wait()
        except RuntimeError:
            return False
        return True


def _tensor(port: Any, length: int) -> openvino.Tensor:
    import openvino

    dims = list(port.get_partial_shape())
    shape = [max(length, dim.get_min_length()) if dim.is_dynamic else dim.get_length() for dim in dims]
    tensor = openvino.Tensor(port.get_element_type(), shape)
    if port.get_element_type() != openvino.Type.string:
        tensor.data.fill(length)
    return tensor
