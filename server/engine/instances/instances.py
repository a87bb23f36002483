"""The instances of one version: each on a thread of its own, with its host policy and its resources.

If a model's instances may run on any thread (`Model.any_thread`), the loading thread makes them, and they get their own
threads with the first request. Until then requests wait in the lane. If the system refuses a thread, the server tries
again each second, while requests wait; the thread that closes the version executes the rest.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Final

from inferd._native.execution.instance import InstanceLoop
from inferd._native.gpu.instance import GpuLoop
from inferd._native.request.lane import LaneHandle
from inferd._native.scheduling.limiter import ClaimHandle
from inferd._native.scheduling.queue import QueueLane
from inferd.backends.api import BackendError, GpuInstance, Instance, InstanceSpec, Model, ModelSpec, WorkerStatus
from inferd.server.engine.housekeeping.threads import begin
from inferd.server.engine.instances.gpu import Gpus
from inferd.server.engine.instances.hosts import HostPolicy, HostPolicyError
from inferd.server.engine.instances.resources import Resources
from inferd.server.engine.instances.warmup import Halt, warm_up

log = logging.getLogger("inferd.engine")

AT_ONCE: Final = 8
"""The number of instances that get their threads on the loop; further instances of the model get them elsewhere, one by
one."""

RETRY_SECONDS: Final = 1.0
"""Seconds until the server asks the system again for refused threads."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """The devices and limits that all instances of a server share."""

    hosts: Mapping[str, HostPolicy] = field(default_factory=lambda: MappingProxyType({}))
    resources: Resources | None = None  # None: the rate limiter is off
    gpus: Gpus = field(default_factory=Gpus)


@dataclass(frozen=True, slots=True)
class Use:
    """The work of an instance, past and present.

    Attributes:
        name: of the instance.
        busy_ns: nanoseconds in which it has executed batches.
        running: requests in execution.
    """

    name: str
    busy_ns: int
    running: int


@dataclass(slots=True)
class _Runner:
    """One instance and its thread.

    Attributes:
        is_late: it exists, but has no thread yet.
        is_ending: it has been told to end.
        over: ends a passive instance.
    """

    spec: InstanceSpec
    thread: threading.Thread | None = None
    instance: Instance | None = None
    loop: InstanceLoop | GpuLoop | None = None
    is_late: bool = False
    is_ending: bool = False
    over: threading.Event | None = None

    def end(self) -> None:
        """Tell it to end."""
        self.is_ending = True
        if self.over is not None:
            self.over.set()


class Instances:
    """The instances of a version. Make and change them outside the event loop, since frameworks are slow.

    Args:
        spec: of the model.
        model: makes the instances; None for an ensemble, which has none.
        lane: the source of their batches.
        hardware: see Hardware.
        halt: ends the warm-up of instances early.
    """

    def __init__(
        self, spec: ModelSpec, model: Model | None, lane: LaneHandle, hardware: Hardware, halt: Halt | None = None
    ) -> None:
        self._halt = halt or Halt()
        self._spec = spec
        self._model = model
        self._lane = lane
        self._hardware = hardware
        self._runners: list[_Runner] = []
        self._guard = threading.Lock()  # guards the list, which is replaced and never changed in place, and `is_late`
        self._made = 0
        self._is_awaiting = False  # whether the lane will report the first request
        self._is_asked = False  # whether the first request has come
        self._watchers: list[Callable[[], object]] = []

    @property
    def live(self) -> list[Instance]:
        """The instances that exist, passive ones included."""
        return [runner.instance for runner in self._runners if runner.instance is not None]

    def uses(self) -> list[Use]:
        """The uses of instances that take batches."""
        loops = [(runner.spec.name, runner.loop) for runner in self._runners if not runner.spec.passive]
        return [Use(name, loop.busy_ns, loop.running) for name, loop in loops if loop is not None]

    def workers(self) -> list[tuple[str, WorkerStatus]]:
        """The processes in which instances work, by the names of the instances."""
        found = [(runner.spec.name, runner.instance.worker) for runner in self._runners if runner.instance is not None]
        return [(name, worker) for name, worker in found if worker is not None]

    def device_memory(self) -> dict[int, int]:
        """Bytes that they keep for tensors, by GPU."""
        held: dict[int, int] = {}
        for runner in self._runners:
            if isinstance(runner.loop, GpuLoop):
                held[runner.spec.device] = held.get(runner.spec.device, 0) + runner.loop.held
        return held

    def start(self, specs: Sequence[InstanceSpec]) -> None:
        """Make further instances concurrently, and have them take batches.

        Raises:
            BackendError: an instance cannot be made. Then all new ones are gone; if the scheduler ties requests to
                instances, the caller must close the lane.
        """
        late = self._may_be_late(specs)
        runners, failures = (self._make_late if late else self._start_threads)(specs)
        if not failures:
            failures = list(self._excesses(specs))
        if late and not failures:
            failures = self._await_first()
        if failures:
            if isinstance(self._lane, QueueLane):
                self._dismiss(runners)
                self._see_off(runners)
            raise failures[0]  # instances with tied requests end when the caller closes the lane
        for runner in runners:
            for changed in self._watchers:
                assert runner.instance is not None
                runner.instance.watch(changed)

    def _start_threads(self, specs: Sequence[InstanceSpec]) -> tuple[list[_Runner], list[BaseException]]:
        """Make instances concurrently on threads of their own; return them, and the errors of the others."""
        started = []
        failures: list[BaseException] = []
        for spec in specs:
            runner, ready = _Runner(spec, over=threading.Event() if spec.passive else None), Future[None]()
            thread = threading.Thread(target=self._run, args=(self._made, runner, ready), name=spec.name, daemon=True)
            try:
                thread.start()
            except RuntimeError as refusal:
                failures.append(_no_thread(spec, refusal))
                break
            runner.thread = thread
            self._made += 1
            started.append((runner, ready))
        runners = [runner for runner, _ in started]
        self._add(runners)
        failures += [error for _, ready in started if (error := ready.exception()) is not None]
        return runners, failures

    def _add(self, runners: Sequence[_Runner]) -> None:
        with self._guard:
            self._runners = [*self._runners, *runners]

    # -- those that get their threads with the first request --

    def _may_be_late(self, specs: Sequence[InstanceSpec]) -> bool:
        """Whether instances may be made here, and get their threads later."""
        return (
            self._model is not None
            and self._model.any_thread
            and isinstance(self._lane, QueueLane)
            and (self._is_awaiting if self._made else True)
            and self._hardware.resources is None
            and not self._spec.warmup  # slow, so on all instances at once
            and all(spec.kind == "CPU" and not spec.passive and not self._is_bound(spec) for spec in specs)
        )

    def _make_late(self, specs: Sequence[InstanceSpec]) -> tuple[list[_Runner], list[BaseException]]:
        """Make instances without threads; return them, and the error of one that failed."""
        runners: list[_Runner] = []
        failures: list[BaseException] = []
        for spec in specs:
            runner = _Runner(spec, is_late=True)
            try:
                self._make(self._made, runner, None)
            except BaseException as error:
                failures.append(error)
                break
            self._made += 1
            runners.append(runner)
        self._add(runners)
        return runners, failures

    def _await_first(self) -> list[BaseException]:
        """Give threads to instances without any: now if the first request has come, else when it comes.

        Returns:
            The error if the system has no thread now.
        """
        assert isinstance(self._lane, QueueLane)
        if self._is_asked:  # while these were made
            try:
                self._give_all_threads()
            except BackendError as error:
                return [error]
        elif not self._is_awaiting:
            self._is_awaiting = True
            self._lane.await_first(self._begin)
        return []

    def _begin(self) -> None:
        """Give instances their threads, on the loop.

        The first ones get them at once, although each costs the loop some 100 us: in a burst the queue would be full
        before the loop came to it.
        """
        self._is_asked, self._is_awaiting = True, False
        try:
            if self._give_threads():
                begin(partial(self._give_others, asyncio.get_running_loop()), lambda: None)
        except (BackendError, RuntimeError) as refusal:
            self._begin_later(str(refusal))

    def _give_others(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start all other instances; not on the loop, which they would block too long."""
        try:
            self._give_all_threads()
        except BackendError as refusal:
            why = str(refusal)
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(lambda: self._begin_later(why))

    def _begin_later(self, why: str) -> None:
        log.error("requests for model '%s' wait: %s", self._spec.name, why)
        asyncio.get_running_loop().call_later(RETRY_SECONDS, self._begin)

    def _give_all_threads(self) -> None:
        """Start all instances; see `_give_threads`."""
        while self._give_threads():
            pass

    def _give_threads(self) -> bool:
        """Start AT_ONCE more instances; return whether others are left.

        Raises:
            BackendError: the system has no thread for one of them.
        """
        with self._guard:
            late = [runner for runner in self._runners if runner.is_late]
            for runner in late[:AT_ONCE]:
                thread = threading.Thread(target=self._work, args=(runner,), name=runner.spec.name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as refusal:
                    raise _no_thread(runner.spec, refusal) from None
                runner.thread, runner.is_late = thread, False
        return len(late) > AT_ONCE

    def _work(self, runner: _Runner) -> None:
        """Serve, on a thread of its own, and close the instance."""
        assert runner.loop is not None
        runner.loop.prepare()
        self._serve(runner)
        self._close(runner)

    # -- changes --

    def _excesses(self, specs: Sequence[InstanceSpec]) -> Iterator[BackendError]:
        """An error for each GPU of these instances that is too full for them."""
        for device in sorted({spec.device for spec in specs if spec.kind == "GPU"}):
            if self._hardware.gpus.is_too_full(device):
                yield BackendError(
                    f"can not create model '{self._spec.name}': memory limit set for GPU {device} has exceeded, model "
                    "loading is rejected."
                )

    def change(self, specs: Sequence[InstanceSpec], halt: Halt | None = None) -> Callable[[], None]:
        """Change to exactly the instances of these names: make new ones first, then end others.

        Requests go on meanwhile; an instance that ends finishes its batch.

        Returns:
            A function that waits for the instances that end.

        Raises:
            BackendError: an instance cannot be made, or the scheduler ties requests to instances; nothing has changed.
        """
        if not isinstance(self._lane, QueueLane):
            raise BackendError("the number of instances can change only for models whose requests are independent")
        self._halt = halt or Halt()
        wanted = {spec.name for spec in specs}
        present = {runner.spec.name for runner in self._runners if not runner.is_ending}
        self.start([spec for spec in specs if spec.name not in present])
        ending = [runner for runner in self._runners if runner.spec.name not in wanted and not runner.is_ending]
        self._dismiss(ending)
        return lambda: self._see_off(ending)

    def watch(self, changed: Callable[[], object]) -> None:
        """Register `changed`, called on any thread whenever the readiness of an instance may have changed."""
        self._watchers.append(changed)
        for instance in self.live:
            instance.watch(changed)

    def join(self) -> None:
        """Return when all instances have ended; the lane must be closed."""
        if isinstance(self._lane, QueueLane):
            self._lane.await_first(None)
        for runner in self._runners:
            runner.end()
            if runner.instance is not None:
                runner.instance.drain()
        for runner in self._runners:
            self._await_end(runner)
        self._trim(self._runners)

    def _await_end(self, runner: _Runner) -> None:
        """Return when an instance that was told to end has ended; one without a thread ends here."""
        with self._guard:
            is_late, runner.is_late = runner.is_late, False
        if is_late:
            self._serve(runner)
            self._close(runner)
        elif runner.thread is not None:
            runner.thread.join()

    def _dismiss(self, runners: Sequence[_Runner]) -> None:
        """Have instances end after their current batches."""
        for runner in runners:
            runner.end()
            if runner.loop is not None:
                runner.loop.retire()
            if runner.instance is not None:
                runner.instance.drain()

    def _see_off(self, runners: Sequence[_Runner]) -> None:
        """Return when these instances have ended."""
        for runner in runners:
            self._await_end(runner)
        self._trim(runners)
        with self._guard:
            self._runners = [runner for runner in self._runners if runner not in runners]

    def _trim(self, ended: Sequence[_Runner]) -> None:
        if any(runner.spec.kind == "GPU" for runner in ended):
            for runner in ended:
                runner.loop = None  # frees its buffers on the device
            self._hardware.gpus.trim()

    def _run(self, index: int, runner: _Runner, ready: Future[None]) -> None:
        # one thread makes, uses and closes the instance: frameworks keep state by thread
        claim = None
        resources = self._hardware.resources
        try:
            self._bind(runner.spec)
            if resources is not None and runner.spec.resources:
                claim = resources.claim(runner.spec)
            self._make(index, runner, claim)
        except BaseException as error:
            ready.set_exception(error)
        else:
            ready.set_result(None)
            self._serve(runner)
            self._close(runner)
        finally:
            if claim is not None and resources is not None:
                resources.forget(claim)

    @staticmethod
    def _close(runner: _Runner) -> None:
        assert runner.instance is not None
        _close(runner.instance, runner.spec.name)

    def _make(self, index: int, runner: _Runner, claim: ClaimHandle | None) -> None:
        assert self._model is not None  # an ensemble has no instances
        if runner.spec.kind == "GPU":
            self._hardware.gpus.device(runner.spec.device).use()
        instance = self._model.create_instance(runner.spec)
        try:
            loop = self._loop(index, runner.spec, instance, claim)
            if not runner.is_late:
                loop.prepare()
            if isinstance(loop, GpuLoop) and self._spec.gpu.graphs:
                self._capture(loop, runner.spec)
            warm_up(loop, self._spec, runner.spec.name, self._halt)
        except BaseException:
            _close(instance, runner.spec.name)
            raise
        runner.instance, runner.loop = instance, loop

    def _loop(
        self, index: int, spec: InstanceSpec, instance: Instance, claim: ClaimHandle | None
    ) -> InstanceLoop | GpuLoop:
        if not isinstance(instance, GpuInstance):
            return InstanceLoop(self._lane, instance, spec.name, index, claim)
        gpus = self._hardware.gpus
        pinned, pool = gpus.pinned(spec.device), gpus.pool(spec.device)
        return GpuLoop(self._lane, instance, spec.name, index, claim, self._spec.gpu, pinned, pool)

    def _capture(self, loop: GpuLoop, spec: InstanceSpec) -> None:
        try:
            loop.capture(self._spec.gpu.graphs)
            return
        except (ValueError, RuntimeError) as error:
            raise BackendError(f"instance {spec.name}: no CUDA graphs: {error}") from error
        except MemoryError as error:
            if not (refusal := str(error)):
                raise
        # not with that as the cause: the device has no memory, and the server may have enough
        raise BackendError(f"instance {spec.name}: no CUDA graphs: {refusal}")

    @staticmethod
    def _serve(runner: _Runner) -> None:
        if runner.over is not None:
            runner.over.wait()
        elif runner.loop is not None:
            runner.loop.run()

    def _is_bound(self, spec: InstanceSpec) -> bool:
        """Whether a host policy binds its thread."""
        return bool(spec.host_policy) or usual_policy(spec) in self._hardware.hosts

    def _bind(self, spec: InstanceSpec) -> None:
        policy = self._hardware.hosts.get(spec.host_policy or usual_policy(spec))
        if policy is None:
            if spec.host_policy:
                log.warning("instance %s: there is no host policy '%s': nothing is bound", spec.name, spec.host_policy)
            return
        try:
            policy.bind()
        except HostPolicyError as error:
            raise BackendError(str(error)) from error


def _close(instance: Instance, name: str) -> None:
    try:
        instance.close()
    except BaseException:  # also SystemExit: the end of the version, or the report of an earlier error, goes on
        log.exception("instance %s did not close", name)


def _no_thread(spec: InstanceSpec, refusal: RuntimeError) -> BackendError:
    error = BackendError(f"instance {spec.name}: the system has no thread for it: {refusal}")
    error.__cause__ = refusal
    return error


def usual_policy(spec: InstanceSpec) -> str:
    """The name of the host policy of an instance whose group names none."""
    return {"GPU": f"gpu_{spec.device}", "MODEL": "model"}.get(spec.kind, "cpu")
