"""How the models of a simulation compute, and what they see that none may see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from inferd._native.execution.python_batch import Batch
from inferd.backends.api import AsyncInstance, Instance
from inferd.backends.identity import IdentityInstance
from tests.simulation.audit import fits
from tests.simulation.kind import BUCKETS, FIRST_QUESTION, PADDING, SCALE, WARM_WIDTH
from tests.simulation.misuse import OFTEN, err_for_all, look_in_other_ways, misuse

if TYPE_CHECKING:
    from tests.simulation.crowd import Crowd
    from tests.simulation.models import SimulatedBackend
    from tests.simulation.world import World

SLICE_NS = 50_000  # after which an execution looks whether it was stopped
IDLE = 2  # why a sequence ends: see `_native/execution/supply.pxd`
WARMED: set[str] = set()  # models whose ensembles warm up
Value = bool | int | float | str


class BlamedError(ValueError):
    """A request is wrong, and not its model."""

    blames_requests = True


@dataclass
class Executions:
    """What models were asked to do, as they saw it.

    Attributes:
        resources: that instances share.
        excused: numbers of requests whose inputs may change, for they are in memory that their client has taken back.
        count: by model and number of a request, how often it was executed.
        questions: the same of models that reuse answers, where several requests of a batch may have one number.
        failed: numbers of requests whose execution failed.
        failed_with: the status of some of these.
        mourned: ids of sequences of whose ends models were told that no client has asked for.
        latest_ns: by prefix of a version and number of a request, when it was executed last.
        gone_ns: by number of a request, when the server has heard that nobody waits for it, or its time was over.
        begun_ns: by number of a request, when it was executed last.
        faults: by number of a request, what its model did wrong with its batch.
        left_ns: the same as `gone_ns`, but for the time in the queue: nobody waits for its execution either.
        running: instances that execute a batch which can be stopped.
        stopped: numbers of requests whose execution was stopped, since nobody waited for it.
        arrived: by number of a request, its level, when it came at the earliest and at the latest, and whether it stays
            in front of those that come later.
        spoilt: by number of a request, what is said of its worker's answer, which is none; empty: the worker is ended.
        said: by number of a request, the parameters that its worker has answered with.
        crowd: told of what is executed, whose requests may be among it.
        log: called with what happens.
        world: stops when a rule is broken.
    """

    log: Callable[[str, str], None]
    world: World
    resources: int  # that there are
    count: dict[tuple[str, int], int] = field(default_factory=dict)
    questions: dict[tuple[str, int], int] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    failed_with: dict[int, int] = field(default_factory=dict)
    excused: set[int] = field(default_factory=set)
    inquiries: int = 0  # of workers to other models
    mourned: set[int] = field(default_factory=set)
    latest_ns: dict[tuple[str, int], int] = field(default_factory=dict)
    gone_ns: dict[int, int] = field(default_factory=dict)
    begun_ns: dict[int, int] = field(default_factory=dict)
    faults: dict[int, str] = field(default_factory=dict)
    left_ns: dict[int, int] = field(default_factory=dict)
    running: list[SimulatedInstance] = field(default_factory=list)
    stopped: set[int] = field(default_factory=set)
    arrived: dict[int, tuple[int, int, int, bool]] = field(default_factory=dict)
    spoilt: dict[int, str] = field(default_factory=dict)
    said: dict[int, dict[str, Value]] = field(default_factory=dict)
    batches: int = 0
    is_faulty: bool = False  # memory may run out
    is_whole: bool = False  # whatever was taken from a queue together is executed together
    crowd: Crowd | None = None
    resources_used: int = 0

    def complain(self, text: str) -> None:
        """A rule is broken; said on the thread of an instance, which would take an exception for the model's."""
        self.world.complain(text)


class NativeSimulated(IdentityInstance):
    """The identity backend's own executor; its delays pass in virtual time. Brief ones have none."""

    def __init__(self, backend: SimulatedBackend) -> None:
        kind = backend.kind
        delays = (0, 0) if kind.style == "native brief" else (kind.duration_us // 2, 3)
        super().__init__(delays, kind.style.endswith("gathered"), kind.decoupled)


class SimulatedInstance(Instance):
    """Computes in Python, for as long as the seed says.

    A request of number 0 has its tensor in memory that its client has cleared: little can be said of it.
    """

    def __init__(self, backend: SimulatedBackend, name: str) -> None:
        self.backend = backend
        self.kind = backend.kind
        self.name = name
        self.busy = False
        self.rested_ns = 0  # when it had finished its last batch
        # where there is one instance: of each batch, when it was made at the earliest, and what came first in it
        self.taken: list[tuple[int, int, int]] = []
        # what it draws does not depend on what the others have drawn
        self.random = Random(f"{backend.salt} {name}")
        self.numbers: list[int] = []  # of the requests of its last batch
        self.old: Batch | None = None  # the last one
        self.is_warming = False  # by its last batch
        self.stopped = False
        self.was_stopped = False  # when its last batch ended
        self.alone = 0  # requests of a batch that has failed, which are to be executed alone
        self.again = False  # its last batch is one of these: the server looks at all of that batch when it stops one

    @property
    def writes_inputs(self) -> bool:  # type: ignore[override]
        return self.kind.style == "in place"

    @property
    def stoppable(self) -> bool:  # type: ignore[override]
        return self.kind.stops

    @property
    def isolates_failures(self) -> bool:  # type: ignore[override]
        return self.kind.isolates

    def stop(self) -> None:
        if self.stopped or not self.kind.stops or self.kind.sequence is not None:
            self.complain("is stopped, and was before, or cannot be")
        self.backend.executions.log(self.name, "is stopped")
        self.stopped = True

    def resume(self) -> None:
        if not self.stopped:
            self.complain("is told to go on, and was not stopped")
        self.stopped = self.was_stopped = False
        self.alone = 0
        if not self.kind.reuses:  # else the number in front is none of its own
            self.backend.executions.stopped.update(number for number in self.numbers if 0 < number < FIRST_QUESTION)

    def must_stop(self, by_ns: int) -> bool:
        """Whether nobody waits for what it executes, as was known then, and it was not told so."""
        left = self.backend.executions.left_ns
        is_once = self.kind.sequence is None and not self.again
        return is_once and not self.stopped and all(left.get(n, by_ns) < by_ns for n in self.numbers)

    def execute(self, batch: Batch) -> None:
        executions = self.backend.executions
        if self.busy:
            self.complain("executes two batches at a time")
        if self.was_stopped and not self.alone:
            self.complain("executes a batch, was stopped before, and not told to go on")
        self.busy = True
        began, requests = self.backend.world.now(), batch.request_count
        executions.resources_used += self.kind.needs
        if executions.resources_used > executions.resources:
            executions.complain(
                f"instances execute with {executions.resources_used} of {executions.resources} resources"
            )
        try:
            self.compute(batch)
        except Exception as error:
            executions.log(self.name, f"raises {error!r}")
            raise
        finally:
            self.busy = False
            self._over()
            self.rested_ns = self.backend.world.now()
            self.backend.busy_ns += self.rested_ns - began
            self.backend.served_ns += (self.rested_ns - began) * requests
            executions.resources_used -= self.kind.needs

    def _over(self) -> None:
        """Note that the instance has executed a batch."""
        self.was_stopped = self.stopped
        if self in self.backend.executions.running:
            self.backend.executions.running.remove(self)

    def complain(self, text: str) -> None:
        """A rule is broken."""
        self.backend.executions.complain(f"instance {self.name}: {text}")

    def note(self, batch: Batch, numbers: list[int]) -> None:
        """Note that the instance begins to execute these requests."""
        executions = self.backend.executions
        self.is_warming = not any(numbers) and self._is_sample(batch)
        if self.is_warming:
            self.numbers = []
            if not 1 <= batch.request_count <= 3:
                self.complain(f"warms up with a batch of {batch.request_count} requests")
            return
        name = self.kind.name
        self.numbers = numbers
        if self.kind.stops:
            executions.running.append(self)
        executions.batches += 1
        self.backend.executed += 1
        self.backend.rows += batch.rows
        if batch.rows > self.kind.rows:
            executions.complain(f"a batch of {batch.rows} rows for model '{name}', which takes {self.kind.rows}")
        if self.kind.batching is None and self.kind.sequence is None and batch.request_count != 1:
            executions.complain(f"a batch of {batch.request_count} requests for model '{name}', which does not batch")
        executions.log(self.name, f"executes {numbers}")
        is_again = self.again = self.alone > 0
        if is_again and batch.request_count != 1 and not executions.is_faulty:
            self.complain(f"executes {numbers}, where {self.alone} requests of a batch that failed are to be executed")
        self.alone -= is_again
        if not batch.request_count:
            self.complain("executes a batch of nothing")
        if executions.is_whole and not is_again and self.kind.fills and fits(self.backend.lane, batch):
            self.complain(f"executes {numbers} without the next, for which there was room")
        if self.kind.instances == (1, 1) and self.kind.sequence is None:
            self._check_order(numbers)
        if executions.crowd is not None:
            numbers = executions.crowd.executed(self.kind, numbers)
        prefix = self.name.rpartition("_")[0]
        for number in numbers if self.kind.reuses else ():
            executions.latest_ns[prefix, number] = self.backend.world.now()
        for number in numbers:
            gone_ns = self.rested_ns if self.kind.reuses else executions.gone_ns.get(number, self.rested_ns)
            if gone_ns < self.rested_ns and not is_again:  # it has been given this batch since
                self.complain(f"executes {number}, for which nobody has waited since {gone_ns} ns")
            executions.count[name, number] = executions.count.get((name, number), 0) + 1
            executions.begun_ns[number] = self.backend.world.now()

    def _is_sample(self, batch: Batch) -> bool:
        """Whether it warms up with what was configured."""
        if not (self.kind.warms or self.kind.name in WARMED):
            return False
        view = batch.input("x")
        assert view is not None
        widths = self.input(batch, "ITEM_SHAPE") if self.kind.ragged else np.array(view.shape[-1])
        is_empty = not any(view.strings()) if self.kind.text else not view.numpy().any()
        return bool(is_empty and (widths == WARM_WIDTH).all())

    def _check_order(self, numbers: list[int]) -> None:
        """Check that no batch that began after a request came began with one of lower priority, or a later one."""
        known = self.backend.executions.arrived
        waits = [known[number] for number in numbers if number in known]
        for level, _, came_ns, is_patient in waits:
            for taken_ns, other_level, other_ns in reversed(self.taken):
                if taken_ns <= came_ns:
                    break
                if other_level > level and is_patient:
                    self.complain(f"executes {numbers} of level {level} after one of level {other_level}")
                if other_level == level and other_ns > came_ns and is_patient:
                    self.complain(f"executes {numbers}, which came at {came_ns}, after one that came at {other_ns}")
        if len(waits) == len(numbers):
            self.taken.append((self.rested_ns, *min(wait[:2] for wait in waits)))

    def take_time(self) -> None:
        if self.kind.duration_us and not self.is_warming:
            draw = self.random.random()
            left_ns = int(draw**4 * self.kind.duration_us * 1000)
            while self.kind.stops and left_ns > SLICE_NS and not self.stopped:
                self.backend.world.sleep(SLICE_NS)
                left_ns -= SLICE_NS
            if not self.stopped:
                self.backend.world.sleep(left_ns)

    def look(self, batch: Batch) -> tuple[list[int], np.ndarray]:
        """Take note of a batch: the numbers of its requests, and a copy of x."""
        view = batch.input("x")
        assert view is not None
        x = view.numpy()
        numbers = list(dict.fromkeys((abs(x[:, 0]) // SCALE).tolist()))
        self.note(batch, numbers)
        if self.kind.shaped and all(numbers):
            told, expected = self.input(batch, "s").tolist(), [self.kind.shape_values(number) for number in numbers]
            if any(told != [batch.rows, *each] for each in expected):
                self.complain(f"the shape of {batch.rows} rows is {told}, and requests have {expected}")
        looks = self.random.random() < OFTEN and all(numbers) and self.backend.executions.excused.isdisjoint(numbers)
        if looks and (problem := look_in_other_ways(batch, x.copy(), self.random)):
            self.complain(problem)
        if self.kind.reuses and not self.is_warming:
            self._count_questions(x[:, 0])
        return numbers, x.copy()

    def compute(self, batch: Batch) -> None:
        """y is a multiple of x."""
        self.answer(batch, *self.look(batch))

    def answer(self, batch: Batch, numbers: list[int], before: np.ndarray) -> None:
        """Compute y, as long as the seed says."""
        executions = self.backend.executions
        view = batch.input("x")
        assert view is not None
        x = view.numpy()
        self.take_time()
        if not np.array_equal(before, x) and executions.excused.isdisjoint(numbers):
            executions.complain(f"inputs of {numbers} changed while instance {self.name} had them")
        if self.kind.style == "odd":
            told = before[:, :1] % SCALE if self.kind.mixes else before[:, :1] // SCALE
            batch.set_output("g", told % 2 == 1)
            return
        if self.kind.remembers:
            self._count_times(batch, before[:, 0] // SCALE)
        if self.kind.padded:
            self._check_padding(before)
        if self.kind.style == "again" and not self.is_warming:
            self._send_back(batch)
        if self.kind.fails and (x[:, 0] < 0).any():
            self.fail(batch, numbers)
        if self.kind.beside is not None:
            self.kind.beside.pass_on(batch, self.random, batches=not self.kind.flat, complain=self.complain)
        if not (self.kind.lacks and numbers[0] % 2 == 0):
            for name, factor in self.kind.more:
                more = before.copy()
                more[:, 1:] *= factor
                batch.set_output(name, more)
        y = x if self.kind.style == "in place" else before
        y[:, 1:] *= 2
        self._try_others(batch, y)
        if self.kind.clumsy and not self.is_warming and self.random.random() < 0.1:
            self._err(batch, numbers, y)
            return
        batch.set_output("y", self._placed(batch, y))
        if self.random.random() < 0.3:
            self.take_time()

    def _try_others(self, batch: Batch, y: np.ndarray) -> None:
        """Ask the batch, and the one before, what none may ask; hand over an output that another takes the place of."""
        old, self.old = self.old, batch
        if self.kind.style == "alternating":
            return
        if old is not None and old is not batch:
            try:
                old.request_count  # noqa: B018
                self.complain("may ask a batch that has been answered")
            except ValueError as error:
                if str(error) != "this batch has been answered":
                    self.complain(f"is told of a batch that has been answered: {error}")
        if self.random.random() > OFTEN:
            return
        problem = misuse(batch, self.random, y, iterative=self.kind.repeats)
        if problem and not self.backend.executions.is_faulty:
            self.complain(problem)
        if self.kind.style != "in place" and not self.kind.clumsy and self.random.random() < 0.3:
            batch.set_output("y", np.zeros_like(y))

    def _placed(self, batch: Batch, y: np.ndarray) -> np.ndarray:
        """The output, perhaps in the client's memory for it."""
        shape: list[int] | None
        for shape in (None, [1 << 40, 1 << 40], [1] * 17) if self.random.random() < OFTEN else ():
            if batch.place("y", shape) is not None:
                self.complain(f"has a place for an output of shape {shape}")
        if not batch.placed or self.random.random() < 0.5:
            return y
        place = batch.place("y", list(y.shape))
        if place is None:
            return y
        array: np.ndarray = place.numpy()
        array[...] = y
        return array

    def _err(self, batch: Batch, numbers: list[int], y: np.ndarray) -> None:
        """Answer wrongly; its requests are told why."""
        text = err_for_all(batch, self.random, y)
        if text.startswith("did not"):
            text = f"model '{self.kind.name}' {text}"
        self.backend.executions.faults.update(dict.fromkeys(numbers, text))
        if text.startswith("output"):
            raise ValueError(text)

    def fail(self, batch: Batch, numbers: list[int]) -> None:
        """Let the batch fail, because a request of it is wrong; or have each request executed once more alone."""
        executions = self.backend.executions
        if not self.kind.isolates:
            executions.failed.update(numbers)
            raise ValueError("negative")
        if batch.request_count == 1:
            executions.failed.update(numbers)
            raise BlamedError("negative")
        self.alone = batch.request_count
        for number in numbers:
            executions.count[self.kind.name, number] -= 1
        raise ValueError("one of them is negative")

    def _count_questions(self, firsts: np.ndarray) -> None:
        """Count the questions of a batch, by their first rows."""
        questions = self.backend.executions.questions
        for first in firsts[firsts % SCALE == 0].tolist():
            key = (self.kind.name, first // SCALE)
            questions[key] = questions.get(key, 0) + 1

    def _send_back(self, batch: Batch) -> None:
        """Some of its requests are to be executed again, as they are."""
        for index in range(batch.request_count):
            if self.random.random() < 0.4:
                batch.reschedule(index)

    def _count_times(self, batch: Batch, numbers: np.ndarray) -> None:
        """The state of a request says how often it was executed before."""
        state = self.input(batch, "state")
        count = self.backend.executions.count
        times = [[count.get((self.kind.name, number), 1) - 1] for number in numbers.tolist()]
        if numbers.all() and state.tolist() != times:
            self.complain(f"states {state.tolist()} of {numbers.tolist()}, which were executed {times} times before")
        batch.set_output("state out", state + 1)

    def _check_padding(self, x: np.ndarray) -> None:
        """Behind what a row has there is padding, and nothing else, up to the next of the configured lengths."""
        filled = x != PADDING
        for row in filled:
            if not row[: int(row.sum())].all():
                self.complain(f"padding within a row: {x.tolist()}")
        lengths = filled.sum(axis=1).tolist()
        expected = {next((length for length in BUCKETS if length >= each), max(lengths)) for each in lengths}
        if expected != {x.shape[1]} and not self.is_warming:
            self.complain(f"rows of {lengths} are {x.shape[1]} long, where {expected} was expected")

    @staticmethod
    def input(batch: Batch, name: str) -> np.ndarray:
        """A copy of it."""
        view = batch.input(name)
        assert view is not None
        return np.array(view.numpy())


class AlternatingInstance(SimulatedInstance, AsyncInstance):
    """Begins to execute a batch, and ends it; its alternate begins the next one meanwhile."""

    def __init__(self, backend: SimulatedBackend, name: str, first: AlternatingInstance | None = None) -> None:
        super().__init__(backend, name)
        self.begun: list[AlternatingInstance] = first.begun if first else []  # those that have begun a batch, in order
        self.looked: tuple[list[int], np.ndarray]
        self.both = (first, self) if first else (self,)
        if first is None:
            self.alternate = AlternatingInstance(backend, name, self)
            self.alternate.taken = self.taken
            self.both = self.alternate.both

    def begin(self, batch: Batch) -> None:
        overlaps = self.kind.needs == 0 and len(self.kind.queue.levels) == 1
        if self in self.begun or (self.begun and not overlaps):
            self.complain("begins a batch, and has not ended the one before")
        if self.was_stopped:
            self.complain("begins a batch, was stopped before, and not told to go on")
        self.looked = self.look(batch)
        if self.kind.fails and not self.is_warming and self.random.random() < 0.05:
            self._over()
            self.fail(batch, self.looked[0])
        self.begun.append(self)
        self._rest()

    def end(self, batch: Batch) -> None:
        if self.begun[:1] != [self]:
            self.complain("ends a batch that was not begun, or behind one that is not over")
        began, requests = self.backend.world.now(), batch.request_count
        try:
            self.answer(batch, *self.looked)
        finally:
            self._over()
            self._rest()
            self.begun.remove(self)
            self.backend.busy_ns += self.rested_ns - began
            self.backend.served_ns += (self.rested_ns - began) * requests

    def _rest(self) -> None:
        """Both take their next batch from now on."""
        for each in self.both:
            each.rested_ns = self.backend.world.now()


class TextInstance(SimulatedInstance):
    """Answers with the strings that it gets."""

    def compute(self, batch: Batch) -> None:
        view = batch.input("x")
        assert view is not None
        rows, width = view.shape
        strings = view.strings()
        # a number of a request is a multiple of 2^20, and written as such
        firsts = (int(strings[row * width].rstrip(b"\0") or 0) // SCALE for row in range(rows))
        self.note(batch, list(dict.fromkeys(number for number in firsts if number)))
        self.take_time()
        batch.set_bytes_output("y", strings, (rows, width))


class RaggedInstance(SimulatedInstance):
    """Gets rows of any length one behind the other, and has to find out by what the batch says where each begins."""

    def compute(self, batch: Batch) -> None:
        x = self.input(batch, "x")
        widths = self.input(batch, "ITEM_SHAPE")
        if x.ndim != 1 or widths.shape != (batch.rows, 1) or widths.sum() != x.size:
            self.complain(f"{x.shape} elements for rows of {widths.tolist()}")
            return
        starts = np.cumsum(widths) - widths.reshape(-1)
        numbers = (x[starts] // SCALE).tolist()
        self.note(batch, list(dict.fromkeys(numbers)))
        sizes = [0]
        for place, (number, width) in enumerate(zip(numbers, widths.reshape(-1).tolist(), strict=True)):
            row = int(x[starts[place]]) - number * SCALE
            if row == 0:
                sizes.append(0)
            elif number != numbers[place - 1]:
                self.complain(f"row {row} of {number} behind one of {numbers[place - 1]}")
            sizes[-1] += width
        if all(numbers) or self.is_warming:
            self._check_counts(batch, sizes[1:])
        self.take_time()
        y = x * 2
        y[starts] = x[starts]
        if self.kind.clumsy and not self.is_warming and self.random.random() < 0.1:
            text = "output 'y' must have as many elements as input 'x'"
            self.backend.executions.faults.update(dict.fromkeys(numbers, text))
            y = y[:-1] if self.random.random() < 0.5 else np.concatenate([y, y[:1]])
        batch.set_output("y", y)

    def _check_counts(self, batch: Batch, sizes: list[int]) -> None:
        """Check what the batch says of its requests, which have so many elements."""
        ends = np.cumsum(sizes).tolist()
        view = batch.input("MAX_ELEMENT_COUNT_AS_SHAPE")
        assert view is not None
        told = {
            "ELEMENT_COUNT": sizes,
            "ACCUMULATED_ELEMENT_COUNT": ends,
            "ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": [0, *ends],
            "ITEM_SHAPE_FLATTEN": self.input(batch, "ITEM_SHAPE").reshape(-1).tolist(),
        }
        for name, expected in told.items():
            if self.input(batch, name).tolist() != expected:
                self.complain(f"{name} is {self.input(batch, name).tolist()} for requests of {sizes} elements")
        if len(sizes) != batch.request_count or view.numpy().shape != (max(sizes),):
            self.complain(f"{batch.request_count} requests, the largest {view.numpy().shape}, for {sizes} elements")


class SequenceInstance(SimulatedInstance):
    """Adds up the second column over each sequence, in memory of its own or in the state that the server keeps."""

    def __init__(self, backend: SimulatedBackend, name: str) -> None:
        super().__init__(backend, name)
        # by sequence and row, what came so far: what the state has to be, where the server keeps it
        self.known: dict[int, np.ndarray | None] = {}
        self.touched_ns: dict[int, int] = {}
        self.places: dict[int, int] = {}  # rows of sequences

    def compute(self, batch: Batch) -> None:
        x, start = self.input(batch, "x"), self._control(batch, "start")
        if x.shape[1] == WARM_WIDTH and not x.any():
            self.note(batch, [0])
            batch.set_output("y", x)
            if self.kind.remembers:
                if (state := self.input(batch, "state")).any():
                    self.complain(f"warms up with state {state.tolist()}")
                batch.set_output("state out", self.input(batch, "state"))
            return
        ready, corrid = self._control(batch, "ready").reshape(-1), self._ids(batch)
        if x.shape[1] == 1:
            self._mourn(batch, corrid[ready != 0].tolist())
            batch.set_output("y", x)
            return
        numbers = (x[:, 0] // SCALE).tolist()
        asked = [number for number, is_ready in zip(numbers, ready, strict=True) if is_ready]
        self.note(batch, list(dict.fromkeys(asked)))
        if len(set(corrid[ready != 0].tolist())) != len(set(asked)):
            self.complain(f"two requests of one sequence in a batch: {corrid.tolist()}")
        before = self._states(batch, corrid, start.reshape(-1), ready)
        self.take_time()
        y = x.copy()
        column = x[:, 1:2]
        after = np.concatenate([before, column], axis=1) if self.kind.remembers == "history" else before + column
        y[ready != 0, 1] = after[ready != 0].sum(axis=1)
        batch.set_output("y", y)
        if self.kind.remembers:
            self._keep(batch, after)
        if self.kind.fails and self.random.random() < 0.03:
            self.backend.executions.failed.update(asked)
            self._note_failure(batch, corrid, ready)
            raise ValueError("not now")
        for one in dict.fromkeys(corrid[ready != 0].tolist()):
            self.known[one] = after[(corrid == one) & (ready != 0)]
            self.touched_ns[one] = self.backend.world.now()
        if self.kind.mourns:
            self._note_ends(batch, corrid)

    def _control(self, batch: Batch, name: str) -> np.ndarray:
        """Whether something is so, for each row."""
        told = self.input(batch, name)
        datatype, no, yes = self.kind.control
        view = batch.input(name)
        assert view is not None
        if view.datatype != datatype or not np.isin(told, (no, yes)).all():
            self.complain(f"{name} is {view.datatype} {told.tolist()}, and may be {datatype} {no} and {yes}")
        return (told == yes).astype(np.int32)

    def _ids(self, batch: Batch) -> np.ndarray:
        """The ids of sequences, for each row."""
        if not self.kind.named:
            return self.input(batch, "corrid").reshape(-1)
        view = batch.input("corrid")
        assert view is not None
        return np.array([int(text or b"0") for text in view.strings()])

    def _states(self, batch: Batch, corrid: np.ndarray, start: np.ndarray, ready: np.ndarray) -> np.ndarray:
        """The state of each row, by what came before; states that the server keeps must be these."""
        rows = len(corrid)
        states = self.input(batch, "state") if self.kind.remembers else np.zeros((rows, 1), np.int64)
        for one in dict.fromkeys(corrid[ready != 0].tolist()):
            chosen = (corrid == one) & (ready != 0)
            begins = bool(start[chosen][0])
            if self.kind.sequence is not None and self.kind.sequence.direct:
                self._check_slot(one, int(np.flatnonzero(chosen)[0]), begins=begins)
            if begins:
                self.known[one] = np.full((int(chosen.sum()), 1), self.kind.initial)
            expected = self.known.get(one)
            if expected is None:
                if not self.backend.executions.is_faulty:
                    self.complain(f"sequence {one} goes on, and has not begun")
            elif not self.kind.remembers:
                states[chosen] = expected
            elif not np.array_equal(states[chosen], expected) and not self.backend.executions.is_faulty:
                self.complain(f"the state of sequence {one} is {states[chosen].tolist()}, not {expected.tolist()}")
        return states

    def _check_slot(self, one: int, place: int, *, begins: bool) -> None:
        """A sequence has the same row of each batch, from its beginning on."""
        if begins:
            self.places[one] = place
        elif self.places.get(one, place) != place:
            self.complain(f"sequence {one} is in row {place}, and was in row {self.places[one]}")

    def _keep(self, batch: Batch, states: np.ndarray) -> None:
        """Have the server keep them, perhaps where they lay."""
        if self.kind.style == "in place" and self.random.random() < 0.5:
            view = batch.input("state")
            assert view is not None
            place = view.numpy()
            place[:] = states
            batch.set_output("state out", place)
        else:
            batch.set_output("state out", states)

    def _note_failure(self, batch: Batch, corrid: np.ndarray, ready: np.ndarray) -> None:
        """Note that these sequences have begun, at least; their states are what they were."""
        for one in corrid[ready != 0].tolist():
            self.known.setdefault(one, None)
            self.touched_ns[one] = self.backend.world.now()
        if self.kind.mourns:
            self._note_ends(batch, corrid)

    def _note_ends(self, batch: Batch, corrid: np.ndarray) -> None:
        """A sequence that its client ends is forgotten."""
        ends, reasons = self._control(batch, "end").reshape(-1), self.input(batch, "reason").reshape(-1)
        for one, end, reason in set(zip(corrid.tolist(), ends.tolist(), reasons.tolist(), strict=True)):
            if end != (reason == 1):
                self.complain(f"sequence {one} ends: {end}, and why: {reason}")
            if end:
                self.known.pop(one, None)  # else its only request has failed

    def _mourn(self, batch: Batch, ended: list[int]) -> None:
        """The model is told of sequences that have ended without a request that says so."""
        ready, reasons = self._control(batch, "ready").reshape(-1), self.input(batch, "reason").reshape(-1)
        world, executions = self.backend.world, self.backend.executions
        assert self.kind.sequence is not None
        self.backend.executed += 1
        executions.log(self.name, f"is told that {ended} have ended, for {reasons.tolist()}")
        for one, reason in dict(zip(ended, reasons[ready != 0].tolist(), strict=True)).items():
            executions.mourned.add(one)
            if reason < IDLE:
                self.complain(f"told that sequence {one} has ended, for {reason}")
            if self.known.pop(one, self) is self and not executions.is_faulty:
                self.complain(f"told of the end of sequence {one}, which it does not have")
            idle_ns = world.now() - self.touched_ns.get(one, 0)
            if reason == IDLE and idle_ns < self.kind.sequence.max_idle_us * 1000:
                self.complain(f"told that sequence {one} is idle after {idle_ns} ns")
