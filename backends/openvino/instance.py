"""Instances: each has an infer request that reads and writes the batch's tensors in place."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inferd.backends.api import AsyncInstance, BackendError, ModelSpec, RequestError
from inferd.backends.openvino.graph import Graph
from inferd.backends.openvino.options import PADDING, reason
from inferd.backends.openvino.signature import Port, by_name

if TYPE_CHECKING:
    import openvino

    from inferd._native.execution.python_batch import Batch
    from inferd._native.execution.view import View


MOST_PADDED = 64 << 20
"""OpenVINO stores every string of a tensor at the length of the longest. A tensor that becomes more than four times as
large may have at most this many bytes; otherwise one long element among many short ones could take all memory."""


@dataclass(frozen=True, slots=True)
class Given:
    """An input of the compiled model."""

    index: int
    name: str
    datatype: str
    scalar: bool  # configured as [1], because a configuration cannot say "no dimensions"


@dataclass(frozen=True, slots=True)
class Made:
    """An output of the compiled model.

    Attributes:
        index: among the model's outputs; -1: the output is the input `like` itself.
        like: the name of that input, or of an earlier output that is the same tensor; "" for neither.
        shape: without the batch dimension; None if it depends on data.
    """

    index: int
    name: str
    datatype: str
    scalar: bool
    shape: tuple[int, ...] | None = None
    like: str = ""


def plan_inputs(spec: ModelSpec, ports: Sequence[Port]) -> tuple[Given, ...]:
    """The input of the model for each configured input."""
    known = by_name(ports)
    return tuple(
        Given(known[tensor.name].index, tensor.name, tensor.datatype, known[tensor.name].shape == ())
        for tensor in spec.model_inputs
    )


def plan_outputs(
    model: openvino.Model, spec: ModelSpec, inputs: Sequence[Port], outputs: Sequence[Port]
) -> tuple[Made, ...]:
    """How the instance takes each configured output.

    OpenVINO keeps one tensor for two outputs of one operator, and for an output that is an input. Only one of the two
    can be placed.
    """
    names = {port.index: tensor.name for tensor in spec.model_inputs for port in [by_name(inputs)[tensor.name]]}
    known = by_name(outputs)
    seen: dict[tuple[str, int], str] = {}
    found = []
    for tensor in spec.model_outputs:
        port = known[tensor.name]
        result = model.outputs[port.index]
        origin = result.get_node().input_value(0)
        scalar = port.shape == ()
        key = (origin.get_node().get_name(), origin.get_index())
        if origin.get_node().get_type_name() == "Parameter":
            like = names[model.get_parameter_index(origin.get_node())]
            found.append(Made(-1, tensor.name, tensor.datatype, scalar, like=like))
        elif key in seen:
            found.append(Made(port.index, tensor.name, tensor.datatype, scalar, like=seen[key]))
        else:
            seen[key] = tensor.name
            shape = _fixed(result, bool(spec.max_batch_size))
            found.append(Made(port.index, tensor.name, tensor.datatype, scalar, shape))
    return tuple(found)


def _fixed(result: openvino.Output, batches: bool) -> tuple[int, ...] | None:
    partial = result.get_partial_shape()
    if partial.rank.is_dynamic or (batches and not len(partial)):
        return None
    dims = list(partial)[1:] if batches else list(partial)
    return None if any(dim.is_dynamic for dim in dims) else tuple(dim.get_length() for dim in dims)


@dataclass(frozen=True, slots=True)
class _Run:
    """The state of a run.

    Attributes:
        fed: inputs by name; the request itself does not keep their memory.
        made: outputs by name: the memory for them.
        rows: of the batch, if the run has more rows; None: it has as many.
        inputs, outputs: the request's tensors, by index.
        mends: `Graph.mends` when the run was begun.
    """

    fed: dict[str, Any]
    made: dict[str, Any]
    rows: int | None
    inputs: dict[int, openvino.Tensor]
    outputs: dict[int, openvino.Tensor]
    mends: int


class OpenVinoInstance(AsyncInstance):
    """Runs an infer request of its own.

    Args:
        graph: the compiled model.
        inputs: the model's inputs, in any order.
        outputs: the configured outputs, in any order.
        batches: whether the model has a batch dimension.
        rows: the number of rows that every run must have; 0: any number.
        padding: whether smaller batches are filled up.
        stoppable: whether a run may be cancelled.
    """

    writes_inputs = False
    isolates_failures = True

    def __init__(
        self,
        graph: Graph,
        inputs: Sequence[Given],
        outputs: Sequence[Made],
        *,
        batches: bool,
        rows: int,
        padding: bool,
        stoppable: bool,
    ) -> None:
        import openvino

        self._openvino = openvino
        self._graph = graph
        self._make_request()
        self._inputs = inputs
        self._outputs = outputs
        self._batches = batches
        self._rows = rows
        self._padding = padding
        self.stoppable = stoppable
        self._stopped = False
        self._run: _Run | None = None
        ports = graph.compiled.outputs
        self._elements = {made.index: ports[made.index].get_element_type() for made in outputs}

    def _make_request(self) -> None:
        self._compiled = self._graph.compiled
        self._request = self._compiled.create_infer_request()
        self._states = self._request.query_state()

    def begin(self, batch: Batch) -> None:
        """Start a run of the request for the whole batch."""
        import numpy as np

        rows = batch.rows
        short = self._rows and self._rows != rows
        if short and not self._padding:
            raise RequestError(
                f"expected requests with batch size '{self._rows}', got '{rows}': this error can be avoided by setting "
                f"'{PADDING}' parameter in model configuration to 'YES' at a performance cost"
            )
        fed: dict[str, Any] = {}
        inputs: dict[int, openvino.Tensor] = {}
        outputs: dict[int, openvino.Tensor] = {}
        try:
            self._graph.look()
            for given in self._inputs:
                array = _array(given, batch.input(given.name))
                fed[given.name] = array
                if short:
                    array = np.concatenate([array, np.zeros((self._rows - rows, *array.shape[1:]), array.dtype)])
                inputs[given.index] = self._tensor(array, given.datatype)
            made = {}
            for output in self._outputs:
                if not output.like:
                    made[output.name] = self._place(batch, output, self._rows or rows, outputs)
            run = _Run(fed, made, rows if short else None, inputs, outputs, self._graph.mends)
            self._start(run)
            self._run = run
        except RuntimeError as error:
            raise BackendError(f"openvino error: {reason(error)}") from error
        if self._stopped:  # `stop` came before the run began
            with suppress(RuntimeError):  # on failure the run continues, over memory that `end` gives back
                self._request.cancel()

    def _start(self, run: _Run) -> None:
        if self._compiled is not self._graph.compiled:
            self._make_request()
        for index, tensor in run.inputs.items():
            self._request.set_input_tensor(index, tensor)
        for index, tensor in run.outputs.items():
            self._request.set_output_tensor(index, tensor)
        for state in self._states:  # left by the batch before, which had other clients
            state.reset()
        # not `infer()`: with a single thread nothing can cancel that, and it hides an error of the model, so that
        # the results of the run before would be sent
        self._request.start_async()

    def end(self, batch: Batch) -> None:
        """Wait for the run, and set its results."""
        run, self._run = self._run, None
        assert run is not None
        try:
            self._finish(run)
        except RuntimeError as error:
            self._graph.spoil()
            raise BackendError(f"openvino error: {reason(error)}") from error
        for output in self._outputs:
            if batch.wants(output.name):
                whole = run.fed[output.like].copy() if output.index < 0 else self._result(run.made, output)
                _hand_over(batch, output, whole if run.rows is None else whole[: run.rows])

    def _finish(self, run: _Run) -> None:
        """Wait for the run, and repeat it if another run has failed meanwhile."""
        try:
            self._request.wait()
        except RuntimeError:
            self._graph.look()
            if run.mends == self._graph.mends:
                raise
        else:
            self._graph.look()
            if run.mends == self._graph.mends:
                return
        self._start(run)
        self._request.wait()

    def _tensor(self, array: Any, datatype: str) -> openvino.Tensor:
        """A tensor over the array's memory, which must last until the run is over; strings are copied."""
        if datatype == "BYTES":
            return self._openvino.Tensor(array)
        if datatype == "BF16":
            array = array.view("u2")  # numpy has no type for it
        if not array.flags.writeable:  # OpenVINO takes writeable arrays only, and writes to no input
            array = _as_writable(array)
        if datatype == "BF16":
            return self._openvino.Tensor(array, list(array.shape), self._openvino.Type.bf16)
        return self._openvino.Tensor(array, shared_memory=True)

    def _place(self, batch: Batch, output: Made, rows: int, tensors: dict[int, openvino.Tensor]) -> Any:
        """The memory for an output: new memory, or the place that the client chose.

        Args:
            tensors: gets the request's tensor, by the output's index.

        Returns:
            An array; or a tensor that gets its memory when the shape is known; or None for strings.
        """
        import numpy as np

        element = self._elements[output.index]
        if output.datatype == "BYTES":
            return None
        if output.shape is None:
            partial = 0 if output.scalar else 1
            tensor = self._openvino.Tensor(element, [0] * max(partial, self._rank(output)))
            tensors[output.index] = tensor
            return tensor
        shape = (rows, *output.shape) if self._batches else output.shape
        place = batch.place(output.name) if batch.placed and not output.scalar and not self._padding else None
        dtype = np.dtype("u2") if output.datatype == "BF16" else element.to_dtype()
        array = np.empty(shape, dtype) if place is None else place.numpy().view(dtype)
        if array.shape != shape:
            array = np.empty(shape, dtype)
        tensors[output.index] = self._openvino.Tensor(array, list(shape), element)
        return array

    def _rank(self, output: Made) -> int:
        return len(self._request.model_outputs[output.index].get_partial_shape())

    def _result(self, made: dict[str, Any], output: Made) -> Any:
        name = output.like or output.name
        if output.datatype == "BYTES":
            return self._request.get_output_tensor(output.index).bytes_data
        found = made[name]
        return found.data if isinstance(found, self._openvino.Tensor) else found

    def stop(self) -> None:
        """End the run before its next operator."""
        self._stopped = True
        self._request.cancel()

    def resume(self) -> None:
        """See Instance."""
        self._stopped = False


def _array(given: Given, view: View | None) -> Any:
    """An input as numpy array.

    Raises:
        RequestError: a string tensor has an element that OpenVINO would cut, or elements of too different lengths.
    """
    assert view is not None  # no input is optional
    if given.datatype != "BYTES":
        array = view.numpy()
        return array.reshape(()) if given.scalar else array
    import numpy as np

    strings = view.strings()
    if any(text.endswith(b"\0") for text in strings):
        raise RequestError(f"input '{given.name}' has an element with a zero byte at its end, which would get lost")
    longest = max(map(len, strings), default=0)
    if longest * len(strings) > max(MOST_PADDED, 4 * sum(map(len, strings))):
        raise RequestError(
            f"input '{given.name}' has elements of too different lengths: the longest has {longest} bytes, and "
            f"OpenVINO takes all {len(strings)} at that length"
        )
    array = np.array(strings, dtype=np.bytes_) if strings else np.empty(0, "S1")
    return array.reshape(() if given.scalar else view.shape)


def _hand_over(batch: Batch, output: Made, array: Any) -> None:
    if output.scalar:
        array = array.reshape(1)
    if output.datatype == "BYTES":
        batch.set_bytes_output(output.name, array.reshape(-1).tolist(), array.shape)
    elif output.datatype == "BF16":
        batch.set_output(output.name, array.view("u2"))
    else:
        batch.set_output(output.name, array)


def _as_writable(array: Any) -> Any:
    """A writeable array over the same memory, which the original array keeps alive.

    By ctypes: an object with `__array_interface__` takes three times as long.
    """
    import numpy as np

    if not array.size:
        return array.copy()
    memory = (ctypes.c_char * array.nbytes).from_address(array.__array_interface__["data"][0])
    memory.array = array
    return np.ndarray(array.shape, array.dtype, memory)
