"""One loaded version of a model: its lane, its instances and their threads."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from inferd._native.ensembles.ensemble import EnsembleLane
from inferd._native.request.lane import LaneHandle
from inferd._native.scheduling.queue import QueueLane
from inferd._native.scheduling.report import encode_statistics
from inferd._native.sequences.sequencer import SequenceLane
from inferd._native.service.infer import InferService
from inferd.backends.api import Backend, Instance, InstanceSpec, Model, ModelSource, ModelSpec, WorkerStatus
from inferd.server.engine.config.measured import bounds_of
from inferd.server.engine.instances.instances import Hardware, Instances, Use
from inferd.server.engine.instances.resources import Resources
from inferd.server.engine.instances.warmup import Halt
from inferd_client.pb import grpc_service_pb2 as pb
from inferd_client.pb import model_config_pb2

if TYPE_CHECKING:
    from inferd._native.scheduling.queue import Learnt

log = logging.getLogger("inferd.engine")

CHECK_SECONDS: Final = 5.0
"""Seconds that a model may take to report its readiness."""


class LoadedVersion:
    """A version that serves requests from its lane until it is closed.

    Make and close it outside the event loop, since frameworks are slow.

    Args:
        config: the response of the ModelConfig RPC.
        backend: of the model; None for an ensemble.
        source: the version's files.
        service: takes the requests of an ensemble's steps.
        max_queue: requests that may wait; 0 for any number.
        hardware: the devices and limits of instances.
        halt: ends the load early, until the version is made.

    The environment variable TRITONSERVER_DELAY_SCHEDULER, a hook of Triton's tests, holds the first batch of every
    model with dynamic batching back until that many requests wait.

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
        hardware: Hardware | None = None,
        halt: Halt | None = None,
    ) -> None:
        self.config = config
        self.spec: ModelSpec = source.spec
        self.version = source.version
        self.fingerprint = b""  # set if responses are cached under it
        self.made_ns = time.monotonic_ns()
        self.seconds = 0.0  # that its load took, set by the one who loads it
        hardware = hardware or Hardware()
        self._model: Model | None = backend.load(source) if backend else None
        try:
            self.lane = _make_lane(source, service, max_queue, hardware.resources)
        except BaseException:
            self._close_model()
            raise
        self.lane.set_bounds(bounds_of(config))
        self._arena = self._model.arena if self._model is not None else None
        if self._arena is not None:
            self.lane.receive_into(self._arena)
        self._on_gpu = _on_gpu(source.spec)
        self._instances = Instances(self.spec, self._model, self.lane, hardware, halt)
        try:
            self._instances.start(self.spec.instances)
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def is_scalable(self) -> bool:
        """Whether the number of its instances may change while it serves."""
        return isinstance(self.lane, QueueLane)

    def change_instances(
        self, config: model_config_pb2.ModelConfig, specs: Sequence[InstanceSpec], halt: Halt | None = None
    ) -> Callable[[], None]:
        """Replace the instances while requests go on; see `Instances.change`.

        Returns:
            A function that waits for the instances that end.

        Raises:
            BackendError: the instances cannot be changed; nothing has changed.
        """
        wait = self._instances.change(specs, halt)
        self.describe(config, replace(self.spec, instances=tuple(specs)))
        return wait

    def describe(self, config: model_config_pb2.ModelConfig, spec: ModelSpec) -> None:
        """Replace the configuration by one that does not change the version's work."""
        self.config = config
        self.spec = spec
        self._on_gpu = _on_gpu(spec)

    def close(self) -> None:
        """Refuse further requests, finish queued ones, and free the model."""
        self.lane.close()
        self._instances.join()
        self._close_model()

    def weak(self) -> list[weakref.ref[object]]:
        """Weak references to this version and its model."""
        objects = (self, self._model)
        return [weakref.ref(each) for each in objects if getattr(type(each), "__weakrefoffset__", 0)]

    def _close_model(self) -> None:
        if self._model is None:
            return
        try:
            self._model.close()
        except BaseException:  # also SystemExit: the end of the version goes on
            log.exception("model %s version %d did not close", self.name, self.version)

    @property
    def ready(self) -> bool:
        """Whether some instance can execute."""
        live = self._instances.live
        return not live or any(instance.ready for instance in live)

    def watch(self, changed: Callable[[], object]) -> None:
        """Have `changed` called, on any thread, whenever `ready` may have changed."""
        self._instances.watch(changed)

    @property
    def is_asked(self) -> bool:
        """Whether `check` asks the model itself."""
        return any(type(instance).check is not Instance.check for instance in self._instances.live)

    async def check(self) -> bool:
        """Whether `ready`, and, if the model reports its readiness, some instance reports ready."""
        if not self.ready:
            return False
        live = self._instances.live
        asked = [answer for instance in live if instance.ready and (answer := instance.check()) is not None]
        if not asked:
            return True
        waits = [asyncio.wrap_future(answer) for answer in asked]
        try:
            done, _ = await asyncio.wait(waits, timeout=CHECK_SECONDS)
        finally:  # also if the caller is cancelled: is_ready() may never return
            for wait in waits:
                wait.cancel()
        return any(wait.exception() is None and wait.result() for wait in done)

    @property
    def has_sequences(self) -> bool:
        """Whether it may have sequences."""
        return isinstance(self.lane, SequenceLane)

    @property
    def sequences(self) -> int:
        """Sequences that have begun and take further requests."""
        return self.lane.open if isinstance(self.lane, SequenceLane) else 0

    @property
    def drain_seconds(self) -> int:
        """Seconds for which live sequences continue when the version is replaced or unloaded."""
        return self.spec.sequence.drain_seconds if self.spec.sequence else 0

    def uses(self) -> list[Use]:
        """The work of its instances."""
        return self._instances.uses()

    def workers(self) -> list[tuple[str, WorkerStatus]]:
        """The processes in which its instances work, by the names of the instances."""
        return self._instances.workers()

    def working(self) -> list[str]:
        """The instances that have not ended, each with its process if it has one."""
        processes = {name: worker.pid for name, worker in self.workers() if worker.pid}
        return [
            f"{use.name} (process {processes[use.name]})" if use.name in processes else use.name for use in self.uses()
        ]

    def drain(self) -> None:
        """Refuse new sequences from now on; live ones continue."""
        if isinstance(self.lane, SequenceLane):
            self.lane.drain()

    def succeed(self, version: LoadedVersion) -> None:
        """Tell later requests why the sequences of another version, which is about to close, have ended."""
        if isinstance(self.lane, SequenceLane) and isinstance(version.lane, SequenceLane):
            self.lane.remember(version.lane)

    def stream_ended(self, number: int) -> None:
        """End the sequences that are tied to this stream."""
        if isinstance(self.lane, SequenceLane):
            self.lane.stream_ended(number)

    def statistics(self) -> pb.ModelStatistics:
        """The statistics of this version since its load."""
        return pb.ModelStatisticsResponse.FromString(encode_statistics((self.account(),))).model_stats[0]

    def account(self) -> tuple[LaneHandle, Learnt | None, list[tuple[str, int, int]]]:
        """The parts of `statistics`, for `encode_statistics`."""
        lane = self.lane
        memory: list[tuple[str, int, int]] = []
        if self._on_gpu:
            memory += [("GPU", device, size) for device, size in sorted(self._instances.device_memory().items())]
        if self._arena is not None:
            memory.append(("CPU", 0, self._arena.used))
        return lane, lane.predictor() if isinstance(lane, QueueLane) else None, memory


def _make_lane(source: ModelSource, service: InferService, max_queue: int, resources: Resources | None) -> LaneHandle:
    limiter = resources.limiter_of(source.spec.instances) if resources is not None else None
    ensemble = source.spec.ensemble
    if ensemble:
        return EnsembleLane(source.spec, source.version, service, max_queue=max_queue)
    if source.spec.sequence:
        return SequenceLane(source.spec, source.version, max_queue=max_queue, limiter=limiter)
    return QueueLane(source.spec, source.version, max_queue=max_queue, held=_held(source.spec), limiter=limiter)


def _on_gpu(spec: ModelSpec) -> bool:
    return any(instance.kind == "GPU" for instance in spec.instances)


def _held(spec: ModelSpec) -> int:
    """How many requests must wait before the first batch: a hook for Triton's tests only."""
    wanted = os.environ.get("TRITONSERVER_DELAY_SCHEDULER", "")
    if spec.batching is None or not wanted.isdecimal() or wanted == "0":
        return 0
    log.info("Delaying batcher of '%s' until %s queued requests...", spec.name, wanted)
    return int(wanted)
