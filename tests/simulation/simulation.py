"""One simulation: clients, the loop and the operator on the main thread, instances on theirs, until all is answered."""

from __future__ import annotations

import gc
import heapq
import select
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from _native.memory.resource import live_counters
from _native.request.bridge import BridgeHandle
from _native.service.infer import InferService
from _native.service.table import ModelTable
from _native.transport.client import ClientUse
from _native.transport.connection import Endpoint
from server.engine.resources import Resources
from tests.simulation.clients import Call, Client, draw_temper
from tests.simulation.models import KINDS, Executions, Kind, Version, kinds_with_steps, load
from tests.simulation.oracle import Oracle
from tests.simulation.story import Story
from tests.simulation.wire import Violation
from tests.simulation.world import NEVER, START_NS, World

US = 1000
MS = 1000 * US
SECOND = 1000 * MS
STEP_US = (0, 0, 0, 1, 3, 20)  # that an action of the main thread takes
DEEDS = 40  # of the operator, at most
PATIENCE = 900 * SECOND  # in which something must be answered while calls are open


@dataclass(frozen=True)
class Scale:
    """How large a simulation is; a shrunk one has less of something.

    Attributes:
        clients: connections.
        calls: of all clients together, about.
        models: names of kinds; empty for some that the seed chooses.
        operator: models come and go.
        cancels: clients cancel, and hang up.
        deadlines: calls have deadlines.
        preemption: threads are interrupted between critical sections.
        faults: memory runs out.
        fails_at: the number of the one take of memory that fails; 0 for as the seed says.
        forgetful: a client forgets to send the end of its last call, which nobody can answer: to try the oracle.
    """

    clients: int = 5
    calls: int = 250
    models: tuple[str, ...] = ()
    operator: bool = True
    cancels: bool = True
    deadlines: bool = True
    preemption: bool = True
    faults: bool = True
    fails_at: int = 0
    forgetful: bool = False


@dataclass
class Outcome:
    """What a simulation has shown."""

    seed: int
    calls: int = 0
    models: tuple[str, ...] = ()
    statuses: dict[int, int] = field(default_factory=dict)
    cancelled: int = 0
    batches: int = 0
    switches: int = 0
    failed_takes: int = 0
    virtual_ns: int = 0
    story: int = 0
    problem: str = ""
    log: str = ""


class Simulation:
    """See `simulate`."""

    def __init__(self, world: World, seed: int, scale: Scale, keep: int) -> None:
        self.world = world
        self.scale = scale
        self.random = random = Random(seed)
        self.story = Story(keep)
        self.outcome = Outcome(seed)
        preempt = random.choice((0, 0, 30, 200, 500)) if scale.preemption else 0
        world.begin(seed, preempt=preempt, spurious=random.choice((0, 0, 20)))
        self.faults_ppm = random.choice((0, 0, 0, 300, 3000)) if scale.faults and not scale.fails_at else 0
        self.is_faulty = bool(self.faults_ppm or scale.fails_at)
        self.events: list[tuple[int, int, Callable[[], None]]] = []
        self.numbers = 0
        resources = random.choice((2, 3))
        self.executions = Executions(self.tell, resources)
        self.resources = Resources({("R", None): resources})
        self.table = ModelTable()
        self.bridge = BridgeHandle()
        self.service_limit = random.choice((0, 0, 0, 20))
        self.held_limit = random.choice((0, 0, 1 << 20))
        self.service = InferService(self.table, self.bridge, max_inflight=self.service_limit)
        self.service.keep_answers(1 << 16, ttl=random.choice((0.0, 0.01)))
        self.endpoint = Endpoint(
            lambda call: call.end(12),
            max_held=self.held_limit,
            receive_timeout=random.choice((0.0, 10.0)),
            send_timeout=30.0,
            max_streams=100,
            timers=self.bridge.timers,
        )
        self.service.install(self.endpoint)
        self.poller = select.poll()
        self.poller.register(self.bridge.event_fd, select.POLLIN)
        self.poller.register(self.bridge.timers.fd, select.POLLIN)
        self.generations: dict[str, int] = {}
        self.versions: dict[str, Version] = {}
        self.leaving: list[Version] = []
        self.oracle = Oracle(self)
        self.uses = [ClientUse(f"client {n}", max_bytes=0) for n in range(3)]
        names = scale.models or self._choose()
        self.kinds: dict[str, Kind] = {name: KINDS[name] for name in kinds_with_steps({n: KINDS[n] for n in names})}
        self.outcome.models = tuple(self.kinds)
        for name in self.kinds:
            self.load(name)
        self.clients: list[Client] = []
        each = max(1, scale.calls // max(1, scale.clients))
        for number in range(scale.clients):
            self.clients.append(Client(self, number, draw_temper(Random(f"{seed} {number}"), scale), each))
        self.calls_open = 0
        self.last_answer_ns = START_NS

    def _choose(self) -> tuple[str, ...]:
        names = sorted(KINDS)
        chosen = {name for name in names if self.random.random() < 0.3} or {"plain"}
        for name in list(chosen):
            chosen |= {step.model for step in KINDS[name].steps}
        return tuple(sorted(chosen))

    def tell(self, who: str, what: str) -> None:
        if self.story.on:
            self.story.now = self.world.now()
            self.story.tell(who, what)

    def later(self, ns: int, what: Callable[[], None]) -> None:
        """Have the main thread do it so many nanoseconds from now, or after."""
        self.numbers += 1
        heapq.heappush(self.events, (self.world.now() + int(ns), self.numbers, what))

    # -- models --

    def load(self, name: str) -> None:
        """A new version takes the place of what there is."""
        kind = self.kinds[name]
        generation = self.generations[name] = self.generations.get(name, -1) + 1
        count = self.random.randint(*kind.instances)
        version = load(kind, generation, count, self.service, self.world, self.random, self.executions, self.resources)
        self.tell("operator", f"loads {version.prefix} with {version.count} instances")
        self.table.set(name, {1: version.loaded.lane})
        self._close(name)
        self.versions[name] = version
        self.oracle.loaded(name)

    def unload(self, name: str) -> None:
        self.tell("operator", f"unloads {name}")
        self.table.remove(name)
        self._close(name)
        self.oracle.unloaded(name)

    def _close(self, name: str) -> None:
        old = self.versions.pop(name, None)
        if old is not None:
            old.loaded.lane.close()
            self.leaving.append(old)

    def see_off(self) -> None:
        """Join threads that have left, and let go of what nothing refers to any more."""
        for version in list(self.leaving):
            if version.ended and not version.joined:
                version.loaded.close()
                version.joined = True
            if version.joined and not version.loaded.lane.in_flight:
                self.service.forget(version.loaded.lane)
                self.leaving.remove(version)

    def operate(self) -> None:
        """The operator's next deed."""
        if not any(client.active for client in self.clients) or sum(self.generations.values()) > DEEDS:
            return
        name = self.random.choice(sorted(self.kinds))
        deed = self.random.random()
        if self.kinds[name].sequence is not None:
            deed = 1.0  # its sequences would have to go on where they have begun
        if name not in self.versions or deed < 0.6:
            self.load(name)
        elif deed < 0.7 and not self._is_step(name):
            self.unload(name)
        self.later(self.random.choice((200 * US, 2 * MS, 20 * MS)), self.operate)

    def _is_step(self, name: str) -> bool:
        return any(step.model == name for kind in self.kinds.values() for step in kind.steps)

    # -- the loop --

    def flush(self) -> None:
        self.endpoint.flush_dirty()

    def step(self) -> bool:
        """One action; False: nothing is left to do."""
        world = self.world
        due = bool(self.events) and self.events[0][0] <= world.now()
        ready = {fd for fd, _ in self.poller.poll(0)}
        choices = [*(["thread"] * 2 if world.runnable() else []), *(["event"] if due else [])]
        choices += ["loop"] if ready else []
        if not choices:
            return self._pass_time()
        choice = self.random.choice(choices)
        if choice == "thread":
            if world.run() > 0:
                self.see_off()
        elif choice == "event":
            heapq.heappop(self.events)[2]()
            self.flush()
        else:
            world.may_fail(1)
            if self.bridge.event_fd in ready:
                self.bridge.drain()
            if self.bridge.timers.fd in ready:
                self.bridge.expire()
            self.flush()
            world.may_fail(0)
            if self.leaving:
                self.see_off()
        if problem := world.problem or self.executions.problem:
            raise Violation(problem)
        world.advance(world.now() + self.random.choice(STEP_US) * US)
        return True

    def _pass_time(self) -> bool:
        self.oracle.rest()
        soonest = min(self.world.next(), self.events[0][0] if self.events else NEVER)
        if soonest == NEVER:
            return False
        if self.calls_open and soonest - self.last_answer_ns > PATIENCE:
            raise Violation(f"nothing is answered for {PATIENCE // SECOND} s: {self.oracle.waiting()}")
        self.world.advance(soonest)
        return True

    def run(self) -> None:
        """Until all is answered and every model has gone."""
        for client in self.clients:
            client.begin()
        if self.scale.operator:
            self.later(self.random.choice((1, 10)) * MS, self.operate)
        self.world.set_faults(self.faults_ppm)
        self.world.fail_at(self.scale.fails_at)
        checks = 0
        while self.step():
            checks += 1
            if checks % 16 == 0 and not self.endpoint.ledger_agrees():
                raise Violation("the sums of the ledger do not agree")
        self.world.set_faults(0)
        self.world.fail_at(0)
        if self.calls_open:
            raise Violation(f"calls are never answered: {self.oracle.waiting()}")
        self._end()

    def _end(self) -> None:
        for client in self.clients:
            client.close()
        for name in list(self.versions):
            self.table.remove(name)
            self._close(name)
        self.see_off()
        while self.leaving and self.step():
            self.see_off()
        if self.leaving:
            raise Violation(f"versions never end: {[version.prefix for version in self.leaving]}")
        self.oracle.end()

    # -- calls --

    def opened(self, call: Call) -> None:
        self.calls_open += 1
        self.outcome.calls += 1
        self.oracle.open[call.number] = call
        if self.calls_open == 1:
            self.last_answer_ns = self.world.now()

    def over(self, call: Call, answered: bool) -> None:
        self.calls_open -= 1
        for name in (call.kind.name, *(step.model for step in call.kind.steps)):
            self.oracle.over[name] = self.oracle.over.get(name, 0) + 1
        self.last_answer_ns = self.world.now()
        if answered:
            self.oracle.answered(call)
            status = self.oracle.status(call)
            self.outcome.statuses[status] = self.outcome.statuses.get(status, 0) + 1
        else:
            self.outcome.cancelled += 1


def simulate(world: World, seed: int, scale: Scale | None = None, keep: int = -1) -> Outcome:
    """Run the simulation of this seed.

    Args:
        world: of this process.
        seed: says everything that happens.
        scale: how large it is.
        keep: lines of the story; 0 for all, negative for none.

    Returns:
        What happened; `problem` is empty if every rule was kept. After a problem the process is of no use any more:
        threads are left in the middle of what they did.
    """
    before = live_counters()
    simulation = Simulation(world, seed, scale or Scale(), keep)
    outcome = simulation.outcome
    try:
        simulation.run()
    except Violation as error:
        outcome.problem = str(error)
    outcome.batches = simulation.executions.batches
    outcome.switches = world.switches
    outcome.failed_takes = world.failed_takes
    outcome.virtual_ns = world.now() - START_NS
    outcome.story = world.story
    outcome.log = simulation.story.text() if simulation.story.on else ""
    if not outcome.problem:
        del simulation
        outcome.problem = left_over(before)
    return outcome


def left_over(before: dict[str, int]) -> str:
    """What native objects are left, as a sentence; empty: none."""
    after = live_counters()
    if after != before:
        gc.collect()
        after = live_counters()
    more = {name: count - before[name] for name, count in after.items() if count != before[name]}
    return f"native objects are left: {more}" if more else ""
