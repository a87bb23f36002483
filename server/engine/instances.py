"""The instances of one version: each on a thread of its own, where its host policy says, with its resources."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import MappingProxyType

from _native.cuda.instance import GpuLoop
from _native.execution.instance import InstanceLoop
from _native.scheduling.lane import LaneHandle
from _native.scheduling.limiter import ClaimHandle
from _native.scheduling.queue import QueueLane
from backends.api import BackendError, GpuInstance, Instance, InstanceSpec, Model, ModelSpec, WorkerStatus
from server.engine.gpu import Gpus
from server.engine.hosts import HostPolicy, HostPolicyError
from server.engine.resources import Resources
from server.engine.warmup import Halt, warm_up

log = logging.getLogger("inferd.engine")


@dataclass(frozen=True, slots=True)
class Placement:
    """What a server's instances share: where they may run, and what limits them."""

    hosts: Mapping[str, HostPolicy] = field(default_factory=lambda: MappingProxyType({}))
    resources: Resources | None = None  # None: the rate limiter is off
    gpus: Gpus = field(default_factory=Gpus)


@dataclass(frozen=True, slots=True)
class Use:
    """What an instance has done and does.

    Attributes:
        name: of the instance.
        busy_ns: nanoseconds in which it has executed batches.
        running: requests that it executes now.
    """

    name: str
    busy_ns: int
    running: int


@dataclass(slots=True)
class _Seat:
    """One instance and its thread."""

    spec: InstanceSpec
    thread: threading.Thread | None = None
    instance: Instance | None = None
    loop: InstanceLoop | GpuLoop | None = None
    over: threading.Event = field(default_factory=threading.Event)  # a passive instance waits for it


class Instances:
    """Made and changed outside the event loop: that takes as long as the framework takes.

    Args:
        spec: of the model.
        model: whose instances they are; None for an ensemble, which has none.
        lane: where their batches come from.
        placement: see there.
        halt: ends the warm-up of instances early.
    """

    def __init__(
        self, spec: ModelSpec, model: Model | None, lane: LaneHandle, placement: Placement, halt: Halt | None = None
    ) -> None:
        self._halt = halt or Halt()
        self._spec = spec
        self._model = model
        self._lane = lane
        self._placement = placement
        self._seats: list[_Seat] = []
        self._guard = threading.Lock()  # of changes of the list, which is never changed in place
        self._made = 0
        self._watchers: list[Callable[[], object]] = []

    @property
    def live(self) -> list[Instance]:
        """Those that are made, passive ones included."""
        return [seat.instance for seat in self._seats if seat.instance is not None]

    def uses(self) -> list[Use]:
        """Of those that take batches."""
        loops = [(seat.spec.name, seat.loop) for seat in self._seats if not seat.spec.passive]
        return [Use(name, loop.busy_ns, loop.running) for name, loop in loops if loop is not None]

    def workers(self) -> list[tuple[str, WorkerStatus]]:
        """The processes in which instances work, by the names of the instances."""
        found = [(seat.spec.name, seat.instance.worker) for seat in self._seats if seat.instance is not None]
        return [(name, worker) for name, worker in found if worker is not None]

    def device_memory(self) -> dict[int, int]:
        """Bytes that they keep for tensors, by GPU."""
        held: dict[int, int] = {}
        for seat in self._seats:
            if isinstance(seat.loop, GpuLoop):
                held[seat.spec.device] = held.get(seat.spec.device, 0) + seat.loop.held
        return held

    def start(self, specs: Sequence[InstanceSpec]) -> None:
        """Make further instances, all at a time, and have them take batches.

        Raises:
            BackendError: one cannot be made. None of them is left then, or, where requests are tied to instances, the
                lane must be closed.
        """
        started = []
        failures: list[BaseException] = []
        for spec in specs:
            seat, ready = _Seat(spec), Future[None]()
            thread = threading.Thread(target=self._run, args=(self._made, seat, ready), name=spec.name, daemon=True)
            try:
                thread.start()
            except RuntimeError as refusal:
                failures.append(BackendError(f"instance {spec.name}: the system has no thread for it: {refusal}"))
                break
            seat.thread = thread
            self._made += 1
            started.append((seat, ready))
        with self._guard:
            self._seats = [*self._seats, *(seat for seat, _ in started)]
        failures += [error for _, ready in started if (error := ready.exception()) is not None]
        if not failures:
            failures = list(self._excesses(specs))
        if failures:
            if isinstance(self._lane, QueueLane):
                failed = [seat for seat, _ in started]
                self._dismiss(failed)
                self._see_off(failed)
            raise failures[0]  # those of another lane end when it is closed
        for seat, _ in started:
            for changed in self._watchers:
                assert seat.instance is not None
                seat.instance.watch(changed)

    def _excesses(self, specs: Sequence[InstanceSpec]) -> Iterator[BackendError]:
        """An error for each GPU of these instances that is too full with them."""
        for device in sorted({spec.device for spec in specs if spec.kind == "GPU"}):
            if self._placement.gpus.is_too_full(device):
                yield BackendError(
                    f"can not create model '{self._spec.name}': memory limit set for GPU {device} has exceeded, model "
                    "loading is rejected."
                )

    def change(self, specs: Sequence[InstanceSpec], halt: Halt | None = None) -> Callable[[], None]:
        """Have exactly these, told apart by their names: new ones are made first, then others are told to end.

        Requests go on meanwhile; an instance that ends finishes its batch.

        Returns:
            What waits for those that end.

        Raises:
            BackendError: a new one cannot be made, or the scheduler ties requests to instances; nothing has changed.
        """
        if not isinstance(self._lane, QueueLane):
            raise BackendError("the number of instances can change only for models whose requests are independent")
        self._halt = halt or Halt()
        wanted = {spec.name for spec in specs}
        present = {seat.spec.name for seat in self._seats if not seat.over.is_set()}
        self.start([spec for spec in specs if spec.name not in present])
        ending = [seat for seat in self._seats if seat.spec.name not in wanted and not seat.over.is_set()]
        self._dismiss(ending)
        return lambda: self._see_off(ending)

    def watch(self, changed: Callable[[], object]) -> None:
        """Have `changed` called, on any thread, whenever the readiness of an instance may have changed."""
        self._watchers.append(changed)
        for instance in self.live:
            instance.watch(changed)

    def join(self) -> None:
        """Return when all have ended; the lane is closed."""
        for seat in self._seats:
            seat.over.set()
            if seat.instance is not None:
                seat.instance.drain()
        for seat in self._seats:
            if seat.thread is not None:
                seat.thread.join()
        self._trim(self._seats)

    def _dismiss(self, seats: Sequence[_Seat]) -> None:
        """Have them end when they have finished their batches."""
        for seat in seats:
            seat.over.set()
            if seat.loop is not None:
                seat.loop.retire()
            if seat.instance is not None:
                seat.instance.drain()

    def _see_off(self, seats: Sequence[_Seat]) -> None:
        """Return when they have ended."""
        for seat in seats:
            if seat.thread is not None:
                seat.thread.join()
        self._trim(seats)
        with self._guard:
            self._seats = [seat for seat in self._seats if seat not in seats]

    def _trim(self, ended: Sequence[_Seat]) -> None:
        if any(seat.spec.kind == "GPU" for seat in ended):
            for seat in ended:
                seat.loop = None  # with it go the buffers on the device
            self._placement.gpus.trim()

    def _run(self, index: int, seat: _Seat, ready: Future[None]) -> None:
        # the instance is made, used and closed on one thread: frameworks keep state by thread
        claim = None
        resources = self._placement.resources
        try:
            self._bind(seat.spec)
            if resources is not None and seat.spec.resources:
                claim = resources.claim(seat.spec)
            instance = self._make(index, seat, claim)
        except BaseException as error:
            ready.set_exception(error)
        else:
            ready.set_result(None)
            self._serve(seat)
            try:
                instance.close()
            except Exception:
                log.exception("instance %s did not close", seat.spec.name)
        finally:
            if claim is not None and resources is not None:
                resources.forget(claim)

    def _make(self, index: int, seat: _Seat, claim: ClaimHandle | None) -> Instance:
        assert self._model is not None  # an ensemble has no instances
        if seat.spec.kind == "GPU":
            self._placement.gpus.device(seat.spec.device).use()
        instance = self._model.create_instance(seat.spec)
        try:
            loop = self._loop(index, seat.spec, instance, claim)
            loop.prepare()
            if isinstance(loop, GpuLoop) and self._spec.gpu.graphs:
                self._capture(loop, seat.spec)
            warm_up(loop, self._spec, seat.spec.name, self._halt)
        except BaseException:
            instance.close()
            raise
        seat.instance, seat.loop = instance, loop
        return instance

    def _loop(
        self, index: int, spec: InstanceSpec, instance: Instance, claim: ClaimHandle | None
    ) -> InstanceLoop | GpuLoop:
        if not isinstance(instance, GpuInstance):
            return InstanceLoop(self._lane, instance, spec.name, index, claim)
        gpus = self._placement.gpus
        pinned, pool = gpus.pinned(spec.device), gpus.pool(spec.device)
        return GpuLoop(self._lane, instance, spec.name, index, claim, self._spec.gpu, pinned, pool)

    def _capture(self, loop: GpuLoop, spec: InstanceSpec) -> None:
        try:
            loop.capture(self._spec.gpu.graphs)
        except (ValueError, RuntimeError) as error:
            raise BackendError(f"instance {spec.name}: no CUDA graphs: {error}") from error

    @staticmethod
    def _serve(seat: _Seat) -> None:
        if seat.spec.passive:
            seat.over.wait()
        elif seat.loop is not None:
            seat.loop.run()

    def _bind(self, spec: InstanceSpec) -> None:
        policy = self._placement.hosts.get(spec.host_policy or usual_policy(spec))
        if policy is None:
            if spec.host_policy:
                log.warning("instance %s: there is no host policy '%s': nothing is bound", spec.name, spec.host_policy)
            return
        try:
            policy.bind()
        except HostPolicyError as error:
            raise BackendError(str(error)) from error


def usual_policy(spec: InstanceSpec) -> str:
    """The name of the host policy of an instance whose group names none."""
    return {"GPU": f"gpu_{spec.device}", "MODEL": "model"}.get(spec.kind, "cpu")
