"""One simulation: clients, the loop and the operator on the main thread, instances on theirs, until all is answered."""

from __future__ import annotations

import asyncio
import gc
import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from random import Random

import inferd._native.gpu.instance
from inferd._native.memory.resource import live_counters
from inferd._native.memory.shm import Regions
from inferd._native.memory.spoiling import spoil_memory
from inferd.server.engine.instances import instances as engine_instances
from inferd.server.engine.instances.resources import Resources
from inferd.server.engine.instances.shared_memory import MOST_COPIED
from inferd.server.front.keepalive import ConnectionPolicy
from inferd.server.front.peer import Peer
from tests import gpu_stub
from tests.simulation.ages import AGES, GRACES, SILENCES, STRIKES, Drops
from tests.simulation.audit import audit_connections, audit_memos, free_kept
from tests.simulation.blunders import err
from tests.simulation.books import Books
from tests.simulation.bounds import Bounds
from tests.simulation.clients import Call, Client, draw_temper
from tests.simulation.crowd import Crowd, can_ask
from tests.simulation.demand import Demand
from tests.simulation.desk import Desk, forget_door
from tests.simulation.devices import Devices
from tests.simulation.forwarding import Forwarding
from tests.simulation.gpus import Graphics
from tests.simulation.histories import make_histories
from tests.simulation.hostile import Hostile
from tests.simulation.inspection import list_regions, read_metrics
from tests.simulation.kind import Kind
from tests.simulation.kinds import ADDED, CHOSEN, KINDS, MADE, ON_GPUS, SHARES, STEPS, USUAL, kinds_with_steps
from tests.simulation.library import Library
from tests.simulation.lodgers import Lodgers
from tests.simulation.models import Executions, Version, threads_of
from tests.simulation.operator import Operator, Shelf, Shop, forget_shop, make_engine
from tests.simulation.oracle import Oracle
from tests.simulation.processes import Town
from tests.simulation.questions import Questions
from tests.simulation.quotas import Quota
from tests.simulation.registrar import Registrar
from tests.simulation.remote import Remote, forget_remote
from tests.simulation.reports import Reports
from tests.simulation.rights import Rights
from tests.simulation.secure import Intruder, Secure
from tests.simulation.sockets import HOSTS, Sockets
from tests.simulation.story import Story
from tests.simulation.system import Unforeseen, hook
from tests.simulation.traces import Traces
from tests.simulation.trials import Trials
from tests.simulation.wire import Violation
from tests.simulation.world import NEVER, START_NS, Do, World

US = 1000
MS = 1000 * US
SECOND = 1000 * MS
MANY = 1000  # calls of a crowd that is large
LONGER = 10  # times as long are pauses of other clients beside a large crowd, so that these last as long
MOST_IDLE = 4096  # requests that the server keeps for reuse
PATIENCE = 900 * SECOND  # in which something must be answered while calls are open
JUMP = 2 * SECOND  # that the machine stands still, at most: less than what is given to slow peers
PARTS = 5.0  # seconds in which the door tells its peers that it ends, and they part
SETTLES = 0.01  # seconds, after which it is looked whether all is said and heard
SHARING_ON_GPUS = 0.4  # how often tensors lie in regions, at least, where models are that are on GPUs alone
COLLECT = 5000  # steps: when the collector runs must not depend on what threads did before they joined the world
PRESSED = 200 * US  # that a client does late what it wants to do
STANDS_PPM = 1000  # how often it does, of a million steps


@dataclass(frozen=True)
class Scale:
    """How large a simulation is; a shrunk one has less of something.

    Attributes:
        clients: connections.
        calls: of all clients together, about.
        models: names of kinds; empty for some that the seed chooses.
        removed: names of kinds that are not there; what clients would ask them, they do not ask.
        left_out: calls and streams that are not made: of which client, and from which to which of its actions.
        tempers: names of those that clients may have; empty for all.
        fixed: what is as told here, and not as the seed draws it: see `Simulation._draw`.
        operator: models come and go.
        cancels: clients cancel, and hang up.
        deadlines: calls have deadlines.
        preemption: threads are interrupted between critical sections.
        faults: memory runs out.
        streams: clients ask by ModelStreamInfer, too.
        regions: tensors lie in shared memory, too.
        hostile: further connections send wrong frames.
        errors: clients ask what has to be refused.
        jumps: the machine stands still now and then.
        late: instances get their threads with the first request, or later, where the system refuses them.
        traces: requests are recorded.
        demand: models are loaded when somebody asks for them.
        rights: clients need tokens.
        forwarding: headers become parameters.
        questions: clients ask what Python answers.
        remote: responses are kept in Redis.
        tls: connections are encrypted.
        library: there is a repository of files, too.
        fails_at: the number of the first take of memory that fails; 0 for as the seed says.
        fails: how many fail then, one after the other.
        crowd: calls of crowds, beside those of the clients; see `crowd`.
        lines: connections of a crowd, at most.
        forgetful: a client forgets to send the end of its last call, which nobody can answer: to try the oracle.
        crashes: the process crashes before the first call of a client.
        lies: a crowd takes a right answer for a wrong one.
    """

    clients: int = 5
    calls: int = 500
    models: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    left_out: tuple[tuple[int, int, int], ...] = ()
    tempers: tuple[str, ...] = ()
    fixed: Mapping[str, float] = field(default_factory=dict)
    operator: bool = True
    cancels: bool = True
    deadlines: bool = True
    preemption: bool = True
    faults: bool = True
    streams: bool = True
    regions: bool = True
    hostile: bool = True
    errors: bool = True
    jumps: bool = True
    late: bool = True
    traces: bool = True
    demand: bool = True
    rights: bool = True
    forwarding: bool = True
    questions: bool = True
    remote: bool = True
    tls: bool = True
    library: bool = True
    fails_at: int = 0
    fails: int = 1
    crowd: int = 0
    lines: int = 8
    forgetful: bool = False
    crashes: bool = False
    lies: bool = False


@dataclass
class Outcome:
    """The outcome of a simulation."""

    seed: int
    calls: int = 0
    models: tuple[str, ...] = ()
    statuses: dict[int, int] = field(default_factory=dict)
    cancelled: int = 0
    streamed: int = 0  # of the calls, requests on streams
    crowd: int = 0  # of the calls, those of a crowd
    hostile: int = 0  # connections
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
        self.drawn: set[str] = set()  # names of what the scale may fix
        preempt = self._draw("preempt", 0, 0, 30, 200, 500, when=scale.preemption)
        self.preempts = preempt > 0
        spoil_memory(True)
        world.begin(seed, preempt=int(preempt), spurious=int(self._draw("spurious", 0, 0, 200)))
        self.faults_ppm = int(self._draw("faults", 0, 0, 0, 300, 3000, when=scale.faults and not scale.fails_at))
        self.is_faulty = bool(self.faults_ppm or scale.fails_at)
        self.events: list[tuple[int, int, Callable[[], None]]] = []
        self.numbers = 0
        self.pace = int(self._draw("pace", 1, 1, 1, 8, 60))  # pauses of clients are so many times as long
        if scale.crowd > MANY:
            self.pace *= LONGER
        self.talks = self._draw("talks", 0, 0.1, 0.4, when=scale.streams)  # how often a call is a stream instead
        self.sharing = self._draw("sharing", 0, 0, 0.3, when=scale.regions)  # how often tensors lie in regions
        self.on_devices = self.has("device regions", 0.4, when=scale.regions)  # some of these are memory of a GPU
        self.packing = self._draw("packing", 0, 0, 0.5, when=scale.streams)  # how often a client compresses
        self.errors = self._draw("errors", 0, 0, 0.05, when=scale.errors)  # how often a request is wrong
        self.hostile_left = int(self._draw("hostile", 0, 0, 5, when=scale.hostile))
        self.stands_ppm = int(self._draw("stands", 0, 0, 0, STANDS_PPM, when=scale.jumps))
        self.jumped_ns = self.stood_ns = 0  # when it stood still last, and how long in all
        self.pressed_ns = 0  # when the main thread had so much to do last that clients were late
        resources = int(self._draw("resources", 2, 3))
        self.late = self._draw("late", 0, 0.5, 1, when=scale.late)  # how often threads come late
        self.refusing = self._draw("refusing", 0, 0, 0.5, when=scale.late)  # how often one of these is refused
        self.service_limit = int(self._draw("service limit", 0, 0, 0, 20)) * (10 if scale.crowd > MANY else 1)
        self.held_limit = int(self._draw("held limit", 0, 0, 1 << 20))
        ttl = self._draw("ttl", 0, 0.01)
        self.ttl_ns = int(ttl * SECOND)  # of an answer that is kept; 0: any
        names = scale.models or self._added(self._choose())
        if scale.regions and any(kind.name in names for kind in ON_GPUS):
            self.sharing, self.on_devices = max(self.sharing, SHARING_ON_GPUS), True
        self.known: dict[str, Kind] = {name: KINDS[name] for name in kinds_with_steps({n: KINDS[n] for n in names})}
        self.kinds = {name: kind for name, kind in self.known.items() if name not in scale.removed}
        self.outcome.models = tuple(self.kinds)
        self.warming: set[str] = set()  # prefixes of versions that warm up
        self.unforeseen = Unforeseen.of_server()
        hook(world)
        losing = Random(f"{seed} losing") if self.has("lost devices", 0.3, when=scale.operator) else None
        self.graphics = Graphics(world, Random(f"{seed} graphics"), losing, self.unforeseen.told)
        engine_instances.threading = threads_of(  # type: ignore[assignment]
            world, self._refuses_thread, self.graphics, self.warming
        )
        has_gpus = any(kind.style == "gpu" for kind in self.known.values())
        self.disturbs = self.has("disturbed GPUs", 0.5, when=scale.operator and scale.errors and has_gpus)
        self.has_lodgers = self.has("lodgers", 0.3, when=scale.operator)
        self.lodgers = Lodgers(self)
        self.registrar = Registrar(self)
        self.devices = Devices(self)
        self.executions = Executions(self.tell, world, resources, is_faulty=self.is_faulty)
        self.stops_early = self.has("stops early", 0.15, when=scale.operator and not scale.crowd)
        self.ages = self.has("ages", 0.25, when=scale.operator)  # connections are ended when they are old
        self.desk = Desk(self)
        self.demand = Demand(self)
        self.shelf, self.shop, self.operator = Shelf(self), Shop(self), Operator(self)
        self.remote = Remote(self)
        self.engine = make_engine(
            self, max_inflight=self.service_limit or None, ttl=ttl, resources=Resources({("R", None): resources})
        )
        self.service = self.engine.infer
        self.rights = Rights(self)
        self.reports = Reports(self)
        self.quota = Quota(self)
        self.forwarding = Forwarding(self)
        self.service.stream_window = 6
        self.town = Town(self)
        self.traces = Traces(self)
        self.regions = Regions(max_count=1000, max_byte_size=1 << 36)
        self.service.use_regions(self.regions, shared=True, max_copied=MOST_COPIED)
        # threads that compress and inflate what is large
        self.sockets = Sockets(self)
        self.strikes = self.has("strikes", 0.5, when=not scale.crowd)  # PINGs in a row end a connection
        policy = ConnectionPolicy(max_streams=100, max_ping_strikes=STRIKES if self.strikes else None)
        if self.ages:
            policy = replace(policy, max_age=random.choice(AGES), age_grace=random.choice(GRACES))
        self.drops = Drops(self)
        self.secure = Secure(self)
        self.library = Library(self)
        self.trials = Trials(self)
        self.trials.begin()
        self.silence_ns = 0  # in which a peer has to answer a PING
        if self.has("keepalive", 0.3, when=not scale.crowd):
            often, patience = Random(f"{seed} keepalive").choice(SILENCES)
            policy = replace(
                policy, keepalive_time=self.pace * often, keepalive_timeout=patience, max_pings_without_data=None
            )
            self.silence_ns = int(patience * SECOND)
        # requests for inference are handled in Python, as they are with --transport grpcio
        self.by_python = self.has("inference by Python", 0.12, when=not scale.crowd)
        pool = int(self._draw("pool", 1, 2))
        self.receive_timeout = self._draw("receive timeout", 0, 10)  # seconds
        self.door = self.desk.make_door(
            self.service,
            pool,
            policy,
            receive_timeout=self.receive_timeout or math.inf,
            max_held_bytes=self.held_limit or None,
            compression="low" if self.packing else "none",
        )
        self.endpoint = self.door._endpoint
        # refusals can be judged by what there was when they were made, if the I/O thread does one thing at a time
        self.is_exact = self.has("exact", 0.5, when=not self.preempts)
        world.one_at_a_time(self.is_exact)
        self.questions = Questions(self)
        self.questions.install()
        self.rights.install()
        self.forwarding.install()
        self.cut_ns: dict[str, int] = {}  # when sequences of a model were ended by the operator
        self.crowd: Crowd | None = None
        self.oracle = Oracle(self)
        self.bounds = Bounds(self)
        self.books = Books()
        self.uses = [self.door._limits._use(Peer(f"ipv4:10.0.0.{host}:1")) for host in range(HOSTS)]
        self.calls_open = 0
        self.last_answer_ns = START_NS
        self.clients: list[Client] = []
        count = min(scale.clients, random.choice((2, scale.clients, scale.clients)))
        each = max(1, scale.calls // max(1, count))
        for number in range(count):
            self.clients.append(Client(self, number, draw_temper(Random(f"{seed} {number}"), scale), each))
        is_steady = not (self.preempts or self.is_faulty or scale.crowd)
        self.executions.is_whole = is_steady and all(client.temper.patient for client in self.clients)
        if unknown := scale.fixed.keys() - self.drawn:
            raise ValueError(f"'fixed' may have {sorted(self.drawn)}, and not {sorted(unknown)}")
        if scale.crowd and any(can_ask(kind) for kind in self.kinds.values()):
            self.executions.crowd = self.crowd = Crowd(self, scale.crowd)

    def _draw(self, name: str, *values: float, when: bool = True) -> float:
        """Draw one of these values from the seed, unless the scale fixes this name; 0 without the feature."""
        self.drawn.add(name)
        if not when:
            return 0
        drawn = self.random.choice(values)
        return self.scale.fixed.get(name, drawn)

    def has(self, feature: str, share: float, *, when: bool) -> bool:
        """Whether it has what only this share of simulations has, unless the scale fixes that; without any other draw.

        So what is added makes no difference for seeds that do not have it.
        """
        self.drawn.add(feature)
        drawn = Random(f"{self.outcome.seed} has {feature}").random() < share
        return when and bool(self.scale.fixed.get(feature, drawn))

    def _choose(self) -> tuple[str, ...]:
        share = self.random.choice((0.3, 0.15, 0.06, 0.04))  # few models are asked more often each
        names = self.random.choice((CHOSEN, MADE, MADE, USUAL))
        usual = [name for name in sorted(names) if KINDS[name].weight and not KINDS[name].popular]
        chosen = {name for name in usual if self.random.random() < share} or {"plain"}
        if self.scale.crowd > MANY:
            chosen.update(self.random.sample([name for name in KINDS if KINDS[name].popular], 2))
        return tuple(sorted(set().union(*(STEPS[name] for name in chosen))))

    def _added(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """These names, and those of kinds that only some simulations have."""
        added = set(names)
        for feature, kinds in ADDED.items():
            if self.has(feature, SHARES[feature], when=not self.scale.crowd):
                some = Random(f"{self.outcome.seed} {feature}").sample(kinds, min(3, len(kinds)))
                added.update(*(STEPS[kind.name] for kind in some))
        return tuple(sorted(added))

    def _refuses_thread(self) -> bool:
        return self.refusing > 0 and self.random.random() < self.refusing

    def tell(self, who: str, what: str) -> None:
        if self.story.on:
            self.story.now = self.world.now()
            self.story.tell(who, what)

    def later(self, ns: int, what: Callable[[], None]) -> None:
        """Have the main thread do it so many nanoseconds from now, or after."""
        self.numbers += 1
        heapq.heappush(self.events, (self.world.now() + ns, self.numbers, what))

    # -- models --

    def _start_engine(self) -> None:
        """Have the engine load the models of the start."""
        self.operator.open()
        starting = self.desk.loop.create_task(self._start())
        while not starting.done():
            if not self.step():
                raise Violation("the engine never starts")
        if problems := starting.result():
            raise Violation(f"models are not loaded at the start: {problems}")
        self.operator.begin()

    async def _start(self) -> list[str]:
        """Start the engine and the door as the server does."""
        problems = await self.engine.start()
        if not problems:
            await self.door.start(f"10.0.0.0:8001{self.rights.address_rules}")
        return problems

    @property
    def versions(self) -> dict[str, Version]:
        """The versions that requests find, by model."""
        return self.shop.versions

    def look(self, name: str) -> None:
        """Read what its version tells of itself."""
        version = self.versions[name]
        stats = version.loaded.statistics().inference_stats
        over = stats.success.count + stats.fail.count
        if over < version.over:
            raise Violation(f"{version.prefix}: {over} requests are over, {version.over} were before")
        version.over = over
        read_metrics(version)
        list_regions(self)

    def has_no_text(self, text: str) -> bool:
        """Whether there may have been no memory for the text of an error, which has this in its place."""
        return self.is_faulty and text in ("", "out of memory")

    def is_asked(self) -> bool:
        """Whether anybody has still to ask, or waits."""
        return any(client.active for client in self.clients) or (self.crowd is not None and self.crowd.active)

    # -- the loop --

    def step(self) -> bool:
        """One action of the main thread, after those of threads; False: nothing is left to do."""
        world, events = self.world, self.events
        what = world.step(events[0][0] if events else NEVER, bool(self.desk.loop.ready), self.stands_ppm)
        if what == Do.EVENT:
            due_ns, _, do = heapq.heappop(events)
            if world.now() - due_ns > PRESSED:
                self.pressed_ns = world.now()
            do()
        elif what == Do.LOOP:
            self.desk.loop.read(world.loop_ready())
        elif what == Do.REST:
            return self._pass_time()
        elif what == Do.WORKER:
            self.town.turn(world.worker())
        elif what == Do.TASKS:
            self.desk.turn()
            if self.shop.problem:
                raise Violation(self.shop.problem)
        elif what == Do.SEE_OFF:
            pass  # threads have left
        elif what == Do.GPU:
            self.graphics.stub.step(self.random.randrange(1 << 16))
        elif what == Do.STAND:
            jump = int(self.random.random() ** 4 * JUMP)
            self.tell("machine", f"stands still for {jump // US} us")
            world.advance(world.now() + jump)
            self.stood_ns += jump
            self.jumped_ns = world.now()
        else:
            raise Violation(world.problem)
        if world.io_ran():
            self.pressed_ns = max(self.pressed_ns, world.late())
            if self.service_limit:
                self.oracle.note_house()
        self.bounds.look()
        self.sockets.hear()
        return True

    def may_lose_workers(self, kind: Kind) -> bool:
        """Whether a worker of this model, or of its steps, may end while it has requests."""
        kinds = [KINDS[name] for name in STEPS[kind.name]]
        # a machine that stands still takes longer than an execution may
        return any(each.mortal or (self.stands_ppm > 0 and each.style == "worker") for each in kinds)

    def _visit(self) -> None:
        """Another hostile peer."""
        if self.hostile_left > 0:
            self.hostile_left -= 1
            self.outcome.hostile += 1
            (Intruder if self.secure.on else Hostile)(self, self.hostile_left)
            self.later(self.random.randint(0, 3 * MS), self._visit)

    def _soonest(self) -> int:
        """When something can go on."""
        return min(self.world.next(), self.events[0][0] if self.events else NEVER)

    def _pass_time(self) -> bool:
        if self.desk.loop.ready:
            return True
        if not self.world.copying():  # else a thread goes on when its system call is over
            self.oracle.rest()
            self.bounds.rest(self._soonest())
        if self.sockets.hear() or self.world.runnable():
            return True  # a thread has run while this one was interrupted
        soonest = self._soonest()
        if soonest == NEVER:
            if not self.calls_open and not any(client.talks for client in self.clients):
                self.bounds.quiet()
            return False
        if self.calls_open and soonest - self.last_answer_ns > PATIENCE:
            raise Violation(f"nothing is answered for {PATIENCE // SECOND} s: {self.oracle.waiting()}")
        self.world.advance(soonest)
        return True

    def run(self) -> None:
        """Until all is answered and every model has gone."""
        self._start_engine()
        err(Random(f"{self.outcome.seed} blunders"), self.service)
        for client in self.clients:
            client.begin()
        if self.crowd is not None:
            self.crowd.begin()
        self.later(self.random.randint(0, 3 * MS), self._visit)
        self.drops.begin()
        self.world.set_faults(self.faults_ppm)
        self.world.fail_at(self.scale.fails_at, self.scale.fails)
        if self.stops_early:
            stops = Random(f"{self.outcome.seed} stops")
            self.later(stops.choice((MS, 10 * MS, 100 * MS)), lambda: self.operator.stop(early=True))
        checks = 0
        while self.step():
            checks += 1
            if not (self.operator.is_stopping or self._is_busy()):
                self.operator.stop()
            if checks % COLLECT == 0:
                gc.collect()
            if checks % 16 == 0:
                if self.world.front_is_held():
                    continue
                if not self.endpoint.ledger_agrees():
                    raise Violation("the sums of the ledger do not agree")
                self.quota.look(self.uses)
                if problem := audit_connections(self.endpoint, self.uses) or audit_memos(self.service.entrance):
                    raise Violation(problem)
        self.world.set_faults(0)
        self.world.fail_at(0, 0)
        if self.calls_open or any(client.talks for client in self.clients):
            raise Violation(f"calls are never answered: {self.oracle.waiting()}")
        self._end()

    def _end(self) -> None:
        for client in self.clients:
            client.leave()
        if self.crowd is not None:
            self.crowd.end()
        while self.step():
            pass
        if left := live_counters()["exchanges"]:
            raise Violation(f"{left} streams never end")
        self.desk.leave()
        if self.operator.waits or self.shop.left():
            raise Violation(f"the engine never ends: {self.operator.waits} deeds, versions {self.shop.left()}")
        if left := self.world.alive() - self.graphics.closers():
            raise Violation(f"{left} threads never end")
        self.regions.close()
        self.lodgers.end()
        self.registrar.end()
        self.graphics.check()
        self.traces.end()
        self.oracle.end()
        self.reports.end()
        self.remote.end()
        self.books.check(self.kinds)
        if self.unforeseen.first and not self.is_faulty:
            raise Violation(f"the server logs what nobody has foreseen: {self.unforeseen.first}")

    async def settle(self) -> None:
        """All that is said to the server is heard and answered.

        Raises:
            Violation: it is not.
        """
        while not all(client.is_settled for client in self.clients):  # noqa: ASYNC110
            await asyncio.sleep(SETTLES)
        if not self.is_faulty:
            for client in self.clients:
                client.judge()

    async def stop_door(self, grace: float) -> None:
        """Within this time, all calls end, and then all connections.

        Raises:
            Violation: they do not.
        """
        busy = self.calls_open > 0 or any(client.talks for client in self.clients)
        began_ns = self.world.now()
        await self.door.stop(grace)
        took = (self.world.now() - began_ns - self.stood_ns) / SECOND
        if took > PARTS + (grace if busy else 0) and not self.is_faulty:
            raise Violation(f"the door takes {took} s to close")
        if left := self.door.traffic().connections:
            raise Violation(f"{left} connections are left when the door has closed")

    def _is_busy(self) -> bool:
        """Whether anything goes on that the end of the server would disturb."""
        return self.calls_open > 0 or self.hostile_left > 0 or self.operator.waits > 0 or self.is_asked()

    # -- calls --

    def opened(self, call: Call) -> None:
        self.calls_open += 1
        self.outcome.calls += 1
        self.story.note(self.outcome.models, self.outcome.calls)
        self.oracle.asked(call.kind)
        self.oracle.open[call.number] = call
        if self.calls_open == 1:
            self.last_answer_ns = self.world.now()

    def closed(self, call: Call, good: bool) -> None:
        """A request is over, with an answer if it is `good`."""
        self.calls_open -= 1
        self.oracle.open.pop(call.number, None)
        for name in STEPS[call.kind.name]:
            self.oracle.over[name] = self.oracle.over.get(name, 0) + 1
        self.oracle.asked(call.kind, at_any_time=not good)
        self.last_answer_ns = self.world.now()
        self.traces.ended(call, answered=good)
        if good and self.oracle.status(call) == 0:
            self.questions.heard(call)
        if call.talk is not None:
            self.books.heard(call.kind, good=good)
            self.outcome.streamed += 1
            self.outcome.cancelled += not good

    def over(self, call: Call, answered: bool) -> None:
        """A call is over."""
        self.closed(call, answered)
        self.books.heard(call.kind, good=answered and self.oracle.status(call) == 0)
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
    try:
        make_histories(seed)
    except Violation as error:
        return Outcome(seed, problem=str(error))
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
        has_lost = simulation.graphics.lost
        del simulation
        forget_shop()
        forget_door()
        forget_remote()
        del engine_instances.threading, inferd._native.gpu.instance.threading  # type: ignore[attr-defined]
        outcome.problem = left_over(before, world, has_lost=has_lost)
    return outcome


def left_over(before: dict[str, int], world: World, *, has_lost: bool) -> str:
    """The native objects that are left, as a sentence; empty: none. A device that was lost keeps what it has."""
    gc.collect()
    while world.runnable():
        world.run()  # what is closed slowly
    after = live_counters()
    more = {name: count - before[name] for name, count in after.items() if count != before[name]}
    free_kept(MOST_IDLE)
    drivers = "" if more or has_lost else "; ".join(gpu_stub.load().report())
    left = f"native objects: {more}" if more else drivers or world.taken
    return f"of the server is left: {left}" if left else ""
