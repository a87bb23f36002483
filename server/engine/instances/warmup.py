"""Warm-up: the samples of a model as tensors, and their execution by an instance."""

from __future__ import annotations

import asyncio
import logging
import math
import time

import numpy as np

from inferd._native.execution.instance import InstanceLoop
from inferd._native.gpu.instance import GpuLoop
from inferd._native.request.lane import LaneHandle
from inferd._native.service.infer import InferService
from inferd.backends.api import BackendError, ModelSpec, WarmupInput, WarmupSpec
from inferd.server.engine.config.tensors import SIZE_OF

log = logging.getLogger("inferd.engine")

FLOATS = {"FP16": "<f2", "FP32": "<f4", "FP64": "<f8"}
SMALL = 2  # random integers are below this: as indices they fit into small tables, too


class Halt:
    """Whether a load is to end early. The event loop makes and sets it; any thread checks it between the requests of a
    warm-up.
    """

    __slots__ = ("_set", "_why")

    def __init__(self) -> None:
        self._why = ""
        self._set: asyncio.Event | None = None  # for waiting tasks

    @property
    def is_set(self) -> bool:
        """Whether the load is to end."""
        return bool(self._why)

    def set(self, why: str) -> None:
        """Have the load fail at its next check, for this reason."""
        self._why = why
        if self._set is not None:
            self._set.set()

    async def wait(self) -> None:
        """Return when the load is to end."""
        if self._set is None:
            self._set = asyncio.Event()
        if not self._why:
            await self._set.wait()

    def check(self) -> None:
        """Raise BackendError if the load is to end."""
        if self._why:
            raise BackendError(self._why)


def warm_up(loop: InstanceLoop | GpuLoop, spec: ModelSpec, instance: str, halt: Halt) -> None:
    """Execute the samples of a model by an instance, on the instance's thread.

    Raises:
        BackendError: a sample fails, and the text has its name; or `halt` is set.
    """
    begin = time.monotonic()
    for sample in spec.warmup:
        tensors = tensors_of(sample, spec)
        try:
            for _ in range(sample.count):
                halt.check()
                loop.warm_up(tensors, sample.batch_size)
        except ValueError as error:
            raise BackendError(f"failed to run warmup sample '{sample.name}': {error}") from error
    if spec.warmup:
        log.info("instance %s is warm after %.2f s", instance, time.monotonic() - begin)


async def warm_up_ensemble(service: InferService, lane: LaneHandle, spec: ModelSpec, halt: Halt) -> None:
    """Execute the samples of an ensemble by the models of its steps, on the loop.

    Raises:
        BackendError: a sample fails, and the text has its name; or `halt` is set.
    """
    for sample in spec.warmup:
        tensors = tensors_of(sample, spec)
        try:
            for _ in range(sample.count):
                halt.check()
                done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
                service.warm_up(lane, tensors, sample.batch_size, done.set_result)
                if problem := await done:
                    raise ValueError(problem)
        except ValueError as error:
            raise BackendError(f"failed to run warmup sample '{sample.name}': {error}") from error


def tensors_of(sample: WarmupSpec, spec: ModelSpec) -> dict[str, tuple[tuple[int, ...], bytes]]:
    """Shape and bytes of each input of one request: one row, if the model has a batch dimension."""
    batching = {tensor.name for tensor in spec.inputs if spec.max_batch_size > 0 and not tensor.shape_tensor}
    return {
        name: ((1, *data.dims) if name in batching else data.dims, _bytes(data)) for name, data in sample.inputs.items()
    }


def _bytes(data: WarmupInput) -> bytes:
    elements = math.prod(data.dims)
    if data.file is not None:
        whole = data.file.read_bytes()
        return whole[: elements * SIZE_OF[data.datatype]] if data.datatype in SIZE_OF else whole
    if data.datatype == "BYTES":
        return bytes(4 * elements)  # empty strings, also where random data are configured, as in Triton
    if data.data == "random":
        return _random(data.datatype, elements)
    return bytes(elements * SIZE_OF[data.datatype])


def _random(datatype: str, elements: int) -> bytes:
    random = np.random.default_rng(elements)
    if datatype in FLOATS:
        return random.random(elements).astype(FLOATS[datatype]).tobytes()
    if datatype == "BF16":  # the upper half of FP32
        return (random.random(elements).astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    size = SIZE_OF[datatype]
    return random.integers(0, SMALL, elements).astype(f"<u{size}").tobytes()
