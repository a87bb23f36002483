"""One loaded version of a model: its lane, its instances and their threads."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from _native.ensemble import EnsembleLane
from _native.infer import InferService
from _native.instance import InstanceLoop
from _native.lane import LaneHandle
from _native.queue import QueueLane
from _native.sequencer import SequenceLane
from backends.api import Backend, Instance, InstanceSpec, Model, ModelSource, ModelSpec
from server.engine.warmup import warm_up
from server.pb import grpc_service_pb2 as pb
from server.pb import model_config_pb2

log = logging.getLogger("inferd.engine")

CHECK_SECONDS: Final = 5.0
"""How long a model may take to say whether it is ready."""

_DURATIONS: Final = (
    "success",
    "fail",
    "queue",
    "compute_input",
    "compute_infer",
    "compute_output",
    "cache_hit",
    "cache_miss",
)


class LoadedVersion:
    """A version that serves requests from its lane until it is closed.

    Made, and closed, outside the event loop: both take as long as the framework takes.

    Args:
        config: what the ModelConfig RPC answers.
        backend: of the model; None for an ensemble.
        source: where the version lies.
        service: through which an ensemble's steps go.
        max_queue: requests that may wait; 0 for any number.

    The environment variable TRITONSERVER_DELAY_SCHEDULER, a hook of Triton's tests, holds the first batch of every
    model with dynamic batching back until so many requests wait.

    Raises:
        BackendError: the model does not load.
    """

    def __init__(
        self,
        config: model_config_pb2.ModelConfig,
        backend: Backend | None,
        source: ModelSource,
        service: InferService,
        max_queue: int = 0,
    ) -> None:
        self.config = config
        self.spec: ModelSpec = source.spec
        self.version = source.version
        self._model: Model | None = backend.load(source) if backend else None
        self.lane = _make_lane(source, service, max_queue)
        self._threads: list[threading.Thread] = []
        self._instances: list[Instance] = []
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:
        return self.spec.name

    def _start(self) -> None:
        started = []
        for index, spec in enumerate(self.spec.instances):
            ready: Future[None] = Future()
            thread = threading.Thread(target=self._run, args=(index, spec, ready), name=spec.name, daemon=True)
            self._threads.append(thread)
            started.append(ready)
            thread.start()
        for ready in started:
            ready.result()
        self.lane.forget_statistics()  # warm-up is no traffic

    def _run(self, index: int, spec: InstanceSpec, ready: Future[None]) -> None:
        # the instance is made, used and closed on one thread: frameworks keep state by thread
        try:
            assert self._model is not None  # an ensemble has no instances
            instance = self._model.create_instance(spec)
        except BaseException as error:
            ready.set_exception(error)
            return
        try:
            loop = InstanceLoop(self.lane, instance, spec.name, index)
            loop.prepare()
            warm_up(loop, self.spec, spec.name)
        except BaseException as error:
            instance.close()
            ready.set_exception(error)
            return
        self._instances.append(instance)
        ready.set_result(None)
        loop.run()
        try:
            instance.close()
        except Exception:
            log.exception("instance %s did not close", spec.name)

    def close(self) -> None:
        """Refuse further requests, finish those that are queued, and free the model."""
        self.lane.close()
        for instance in self._instances:
            instance.drain()
        for thread in self._threads:
            thread.join()
        if self._model is None:
            return
        try:
            self._model.close()
        except Exception:
            log.exception("model %s version %d did not close", self.name, self.version)

    @property
    def ready(self) -> bool:
        """Whether some instance can execute."""
        return not self._instances or any(instance.ready for instance in self._instances)

    def watch(self, changed: Callable[[], object]) -> None:
        """Have `changed` called, on any thread, whenever `ready` may have changed."""
        for instance in self._instances:
            instance.watch(changed)

    async def check(self) -> bool:
        """`ready`, and what the model itself says where it has an opinion: some instance must agree."""
        if not self.ready:
            return False
        asked = [answer for instance in self._instances if instance.ready and (answer := instance.check()) is not None]
        if not asked:
            return True
        waits = [asyncio.wrap_future(answer) for answer in asked]
        done, late = await asyncio.wait(waits, timeout=CHECK_SECONDS)
        for wait in late:
            wait.cancel()
        return any(wait.exception() is None and wait.result() for wait in done)

    def statistics(self) -> pb.ModelStatistics:
        """What this version has done since it was loaded."""
        counters = self.lane.statistics()
        out = pb.ModelStatistics(
            name=self.name,
            version=str(self.version),
            last_inference=counters["last_inference_ms"],
            inference_count=counters["inference_count"],
            execution_count=counters["execution_count"],
        )
        for field in _DURATIONS:
            _set(getattr(out.inference_stats, field), counters[field])
        for rows, compute_input, compute_infer, compute_output in counters["batches"]:
            batch = out.batch_stats.add(batch_size=rows)
            _set(batch.compute_input, compute_input)
            _set(batch.compute_infer, compute_infer)
            _set(batch.compute_output, compute_output)
        return out


def _make_lane(source: ModelSource, service: InferService, max_queue: int) -> LaneHandle:
    ensemble = source.spec.ensemble
    if ensemble:
        return EnsembleLane(source.spec, source.version, service, max_queue=ensemble.max_queue_size or max_queue)
    if source.spec.sequence:
        return SequenceLane(source.spec, source.version, max_queue=max_queue)
    return QueueLane(source.spec, source.version, max_queue=max_queue, held=_held(source.spec))


def _held(spec: ModelSpec) -> int:
    """Requests that must wait before the first batch is made: a hook for Triton's tests, and only for them."""
    wanted = os.environ.get("TRITONSERVER_DELAY_SCHEDULER", "")
    if spec.batching is None or not wanted.isdecimal() or wanted == "0":
        return 0
    log.info("Delaying batcher of '%s' until %s queued requests...", spec.name, wanted)
    return int(wanted)


def _set(duration: pb.StatisticDuration, value: tuple[int, int]) -> None:
    duration.count, duration.ns = value
