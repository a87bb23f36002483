"""The requests of an execution as one batch, and the batch's outputs as their responses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton_python_backend_utils as pb_utils


class Batches:
    """Makes batches and responses as a model's configuration says.

    Args:
        config: of the model, complete.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.batching = int(config.get("max_batch_size", 0)) > 0
        self._ragged = {each["name"] for each in config.get("input", ()) if each.get("allow_ragged_batch")}
        self._supplied = [
            (name, each["kind"], each["source_input"][0], _dtype(each["data_type"]))
            for each in config.get("batch_input", ())
            for name in each["target_name"]
        ]
        self._scattered = {
            name: each["source_input"][0] for each in config.get("batch_output", ()) for name in each["target_name"]
        }

    def execute(self, requests: list[Any], run: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """The responses to the requests, which are one group; without a batch dimension, each is a group of its own.

        The requests of a group that fails are executed once more, each alone: one request's content fails no other.

        Args:
            run: executes a group.

        Raises:
            Exception: that of the only request.
        """
        if len(requests) == 1:
            return run(requests)
        if self.batching:
            try:
                return run(requests)
            except Exception as error:
                pb_utils.Logger.log_warn(
                    f"a batch of {len(requests)} requests failed, and is executed request by request: {error}"
                )
        return [_alone(request, run) for request in requests]

    def gather(self, requests: list[Any]) -> tuple[dict[str, Any], list[int]]:
        """The inputs of a group as arrays by name, and how many rows each of its requests has."""
        tensors = [{tensor.name(): tensor.as_numpy() for tensor in request.inputs()} for request in requests]
        if len(requests) == 1 and not self._ragged:
            arrays = tensors[0]
            return arrays, [_rows(arrays) if self.batching else 0]
        import numpy as np

        rows = [_rows(each) for each in tensors]
        supplied = {name for name, _, _, _ in self._supplied}
        arrays = {}
        for name in tensors[0]:
            if name in supplied:
                continue
            parts = [each[name] for each in tensors]
            arrays[name] = np.concatenate([part.reshape(-1) for part in parts] if name in self._ragged else parts)
        for name, kind, source, dtype in self._supplied:
            arrays[name] = tell(kind, [each[source].shape for each in tensors], dtype)
        return arrays, rows

    def scatter(self, requests: list[Any], rows: list[int], outputs: dict[str, Any]) -> list[Any]:
        """A response for each request of a group.

        Args:
            outputs: arrays, or tensors of a framework with DLPack, by name; for the whole group.

        Raises:
            TritonModelException: an output has another number of rows than the group.
        """
        if not self.batching:
            return [pb_utils.InferenceResponse([_tensor(name, value) for name, value in outputs.items()])]
        parts: list[list[Any]] = [[] for _ in requests]
        for name, value in outputs.items():
            cut = self._cut_by_shapes if name in self._scattered else _cut
            for part, piece in zip(parts, cut(name, value, requests, rows)):
                part.append(_tensor(name, piece))
        return [pb_utils.InferenceResponse(part) for part in parts]

    def _cut_by_shapes(self, name: str, value: Any, requests: list[Any], _: list[int]) -> list[Any]:
        pieces, at = [], 0
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, self._scattered[name])
            shape = tuple(given.shape())
            size = 1
            for dim in shape:
                size *= dim
            pieces.append(value[at : at + size].reshape(shape))
            at += size
        if at != value.shape[0]:
            raise pb_utils.TritonModelException(
                f"output '{name}' has {value.shape[0]} elements, but the batch's requests have {at}"
            )
        return pieces


def _alone(request: Any, run: Callable[[list[Any]], list[Any]]) -> Any:
    try:
        return run([request])[0]
    except Exception as error:
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))


def _cut(name: str, value: Any, _: list[Any], rows: list[int]) -> list[Any]:
    whole = tuple(value.shape)
    if whole[:1] != (sum(rows),):
        raise pb_utils.TritonModelException(
            f"output '{name}' must have the batch dimension {sum(rows)} first, got shape {list(whole)}"
        )
    if len(rows) == 1:
        return [value]
    pieces, at = [], 0
    for count in rows:
        pieces.append(value[at : at + count])
        at += count
    return pieces


def _rows(arrays: dict[str, Any]) -> int:
    return int(next(iter(arrays.values())).shape[0])


def _dtype(data_type: str) -> Any:
    return pb_utils.triton_string_to_numpy(data_type)


def _tensor(name: str, value: Any) -> Any:
    return pb_utils.Tensor.from_dlpack(name, value) if hasattr(value, "layout") else pb_utils.Tensor(name, value)


def tell(kind: str, shapes: list[tuple[int, ...]], dtype: Any) -> Any:
    """The value of a batch input, which describes a ragged input.

    Args:
        kind: of the configuration's `BatchInput`.
        shapes: of the ragged input in each request, the batch dimension in front.
    """
    import numpy as np

    counts = [int(np.prod(shape)) for shape in shapes]
    if kind == "BATCH_ELEMENT_COUNT":
        return np.array(counts, dtype)
    if kind == "BATCH_ACCUMULATED_ELEMENT_COUNT":
        return np.cumsum(counts).astype(dtype)
    if kind == "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO":
        return np.concatenate([[0], np.cumsum(counts)]).astype(dtype)
    if kind == "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE":
        return np.zeros(max(counts), dtype)
    items = [shape[1:] for shape in shapes for _ in range(shape[0])]
    if kind == "BATCH_ITEM_SHAPE":
        return np.array(items, dtype)
    return np.array(items, dtype).reshape(-1)  # BATCH_ITEM_SHAPE_FLATTEN
