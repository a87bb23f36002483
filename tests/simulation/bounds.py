"""What limits how much waits, and for how long: looked at natively after every step, and the causes of refusals.

A refusal has a cause: what it says was full, was full when the call was under way, with as many as it says. A limit is
an upper bound. When nothing can go on, no instance is idle beside a batch, and nothing waits whose time is over. A
delay that batches have never makes a request miss its deadline, whatever is executed in its place: where all models of
it are idle, it is executed while there is time. When nobody asks anything, nothing is held.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.simulation.audit import audit, objects_wait, reached, shares, with_pending
from tests.simulation.kinds import KINDS, STEPS
from tests.simulation.wire import Violation

if TYPE_CHECKING:
    from tests.simulation.clients import Call, Client
    from tests.simulation.crowd import Refused
    from tests.simulation.kind import Kind
    from tests.simulation.models import Version
    from tests.simulation.questions import Question
    from tests.simulation.simulation import Simulation
    from tests.simulation.talks import Talk

MS = 1_000_000
GRAIN = MS + MS // 5  # of timers, and what the loop did first
RETRY = 10 * MS  # after which a sequence is looked at again for which there was no memory
SOON = 50 * MS  # in which what a client has said of its streams comes to the server, and is heard there
OFTEN = 16  # steps, after which all lists are counted
SLOTS = 0  # in place of a level: sequences that wait for slots
SPARE = 8  # the part of its time that a request with a deadline has left when it is executed, at least
PUNCTUAL = MS // 100  # that it may be executed later
HOUSE = re.compile(r"^Exceeds maximum queue size: the server already holds (\d+) requests, its limit")
WAITING = re.compile(
    r"^Exceeds maximum queue size: model '([^']*)' version \d+ has (\d+) requests (?:of priority (\d+) )?waiting"
)
INSIDE = re.compile(r"^Exceeds maximum queue size: ensemble '([^']*)' version \d+ has (\d+) requests in it")
OUSTED = re.compile(
    r"^Exceeds maximum queue size: the queue of model '([^']*)' version \d+ is full, and this client has the most"
)
NO_SLOT = re.compile(r"^Exceeds maximum queue size: all slots of model '([^']*)' are taken, and (\d+) sequences wait")
HELD = re.compile(r"the requests and responses that the server held had more bytes than its limit of (\d+)")
# what says that there was no memory; of a failed batch only the log, which there is not, says why
NO_MEMORY = re.compile(r"^$|out of memory|no memory|MemoryError|a batch of \d+ requests failed")
ANNOUNCED = re.compile(r"announces a message of (\d+) bytes; all clients together may have (\d+)$")
EXPIRED = re.compile(r"^Request timeout expired: waited (\d+) us in the queue of model '([^']*)'")
EXPIRED_INSIDE = re.compile(r"^Request timeout expired: ensemble '([^']*)' version \d+ has held it for (\d+) us")


class Bounds:
    """The bounds from above of one simulation."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self._full_ns: dict[tuple[str, int], int] = {}  # when a level of a model was full last, by its name
        self._equal_ns: dict[tuple[str, int], int] = {}  # when no client had more in a full queue than this one
        self._fault_ns = -1  # when memory was refused last
        self._faults = 0
        self._left_ns = -1  # when requests may have left a queue in the same step in which others were refused
        self._steps = 0
        self._hurried: dict[int, tuple[Call, int]] = {}  # calls with a deadline, and when they must be executed
        self._waiting: dict[int, tuple[Call, int]] = {}  # calls, and when their time in the queue is over

    # -- after every step

    def look(self) -> None:
        """Note which queues are full, and count all lists now and then."""
        self._steps += 1
        simulation = self.simulation
        now = simulation.world.now()
        if simulation.is_faulty and simulation.world.failed_takes != self._faults:
            self._faults = simulation.world.failed_takes
            self._fault_ns = now
        for version, level, taken in reached(simulation.shop.bounded):
            self._full_ns[version.kind.name, level] = now
            if not version.kind.steps and version.kind.sequence is None:
                self._note_shares(version, level, now, taken=taken)
        simulation.demand.look()
        if self._steps % OFTEN == 0 and not simulation.world.front_is_held():
            self._audit(now, at_rest=False)

    def left(self, *, soon: bool = False) -> None:
        """The server hears in this step, or soon, that nobody waits for some requests any more, which leave queues."""
        self._left_ns = max(self._left_ns, self.simulation.world.now() + (SOON if soon else 0))

    def _note_shares(self, version: Version, level: int, now: int, *, taken: bool) -> None:
        """Which clients have as many as any other, now that one more request would be too many."""
        counts: dict[int, int] = {use.number: 0 for use in self.simulation.uses}
        for client, its_level in shares(version.loaded.lane):
            if its_level == level:
                counts[client] = counts.get(client, 0) + 1
        most = max(counts.values())
        for client, count in counts.items():
            if taken or count + 1 >= most:
                self._equal_ns[version.kind.name, client] = now

    def _audit(self, now: int, *, at_rest: bool) -> None:
        grain = GRAIN + RETRY if self.simulation.is_faulty else GRAIN
        if found := audit(self.simulation.shop.gauges, now, grain, at_rest):
            version, problem = found
            raise Violation(f"{version.prefix}: {problem}")

    # -- when nothing can go on

    def rest(self, until_ns: int) -> None:
        """Check the bounds when nothing can go on before `until_ns`."""
        simulation = self.simulation
        self._audit(simulation.world.now(), at_rest=True)
        self._hurry(until_ns)
        self._check_expired()
        simulation.demand.rest()
        held = simulation.endpoint.held
        if held > simulation.held_limit > 0:
            raise Violation(
                f"{held} bytes are held, where {simulation.held_limit} may be: {simulation.endpoint.ledger}"
            )

    def came(self, call: Call) -> None:
        """The whole of a call has come to the server, which knows by when its models have to begin."""
        simulation = self.simulation
        now = simulation.world.now()
        left_ns = call.opened_ns + call.deadline_ns - now  # at least: its time began when its headers came
        is_plain = call.talk is None and not call.client.packs and call.client.end.flows(call.opened_ns)
        is_plain = is_plain and not simulation.by_python  # else the time begins when the loop hands it on
        if call.deadline_ns >= 0 and left_ns > 0 and is_plain and call.client.temper.prompt and goes_at_once(call.kind):
            self._hurried[call.number] = call, now + call.deadline_ns - left_ns // SPARE

    def _hurry(self, until_ns: int) -> None:
        """No call waits for a batch alone, and goes on doing so until there is no time left."""
        for number, (call, due_ns) in list(self._hurried.items()):
            if call.over:
                del self._hurried[number]
            elif until_ns > due_ns + PUNCTUAL and not self.simulation.is_faulty and self._only_waits(call):
                late = (until_ns - due_ns) // 1000
                raise Violation(f"{call}: its models are idle until {late} us after it should have been executed")

    def waits(self, call: Call, until_ns: int) -> None:
        """A call may wait so long in the queue of its model, and not longer."""
        if call.kind.style == "fresh" and not (call.kind.splits or self.simulation.by_python):
            self._waiting[call.number] = call, until_ns

    def _check_expired(self) -> None:
        """What was not executed in time has heard so, whatever its model does for others."""
        simulation = self.simulation
        for number, (call, until_ns) in list(self._waiting.items()):
            if call.over or call.lost or (call.kind.name, number) in simulation.executions.count:
                del self._waiting[number]
            elif simulation.world.now() > until_ns + 2 * GRAIN and not simulation.is_faulty and self._hears(call):
                raise Violation(f"{call}: its time in the queue is over, and it has not heard that")

    def _hears(self, call: Call) -> bool:
        """Whether the client of a call has read all that the server has said since, and nothing is on its way."""
        return is_silent(call.client) and call.client.end.flows(call.opened_ns)

    def _only_waits(self, call: Call) -> bool:
        """Whether nothing is on its way to or from the client of a call, and no model of it executes anything."""
        simulation = self.simulation
        if not is_silent(call.client):
            return False
        waits = False
        for name in STEPS[call.kind.name]:
            version = simulation.versions.get(name)
            since = simulation.oracle.since.get(name, 0)
            if version is None or since >= call.opened_ns or simulation.oracle.was_away(name, call.opened_ns):
                return False
            if not KINDS[name].steps:
                if not version.count or simulation.world.idle(version.prefix) != version.count:
                    return False
                waits = waits or version.loaded.lane.pending > 0
        return waits

    def quiet(self) -> None:
        """Nobody asks anything, and nothing can go on: nothing is held, and nothing waits."""
        simulation = self.simulation
        for version, pending in with_pending(simulation.shop.gauges):
            raise Violation(f"{version.prefix}: {pending} requests wait, and nobody asks anything")
        if simulation.service.admitted_count:
            raise Violation(f"{simulation.service.admitted_count} requests are in flight, and nobody asks anything")
        if simulation.endpoint.held:
            raise Violation(f"{simulation.endpoint.ledger} are held, and nobody asks anything")
        if objects_wait():
            raise Violation("objects whose memory was written have not been let go of, and nobody asks anything")

    # -- causes

    def names_fault(self, call: Call | Refused | Talk | Question, text: str) -> bool:
        """Whether an error says that there was no memory, and memory was refused while its call was under way."""
        if not NO_MEMORY.search(text):
            return False
        shares_others = getattr(call, "kind", None) is not None and call.kind.reuses  # type: ignore[union-attr]
        return shares_others or self._fault_ns >= call.opened_ns

    def holds_too_much(self, text: str) -> bool:
        """Whether an error says rightly that the server holds more than it may."""
        found = HELD.search(text)
        limit = self.simulation.held_limit
        if announced := ANNOUNCED.search(text):
            return int(announced[1]) > limit == int(announced[2]) > 0
        return found is not None and int(found[1]) == limit > 0

    def explains(self, call: Call | Refused, text: str) -> bool:
        """Whether a refusal for want of room, or for a time that is over, has the cause that it names."""
        names = STEPS[call.kind.name]
        if found := HOUSE.match(text):
            limit = self.simulation.service_limit
            # what workers ask comes in beyond the limit
            is_right = int(found[1]) == limit or (self.simulation.oracle.workers_ask and int(found[1]) > limit)
            was_full = self.simulation.oracle.full_ns >= call.opened_ns
            return is_right and (was_full or not self.simulation.is_exact)
        if found := WAITING.match(text):
            level = int(found[3] or 1)
            return found[1] in names and self._was_full(call, KINDS[found[1]], level, int(found[2]))
        if found := INSIDE.match(text):
            return found[1] in names and self._was_full(call, KINDS[found[1]], 1, int(found[2]))
        if found := NO_SLOT.match(text):
            return found[1] in names and self._was_full(call, KINDS[found[1]], SLOTS, int(found[2]))
        if found := OUSTED.match(text):
            return found[1] in names and self._had_most(call, KINDS[found[1]])
        if found := EXPIRED.match(text):
            return found[2] in names and self._was_late(call, KINDS[found[2]], int(found[1]))
        if found := EXPIRED_INSIDE.match(text):
            return found[1] in names and self._was_late(call, KINDS[found[1]], int(found[2]))
        return False

    def _is_blurred(self, call: Call | Refused) -> bool:
        """Whether requests may have left a queue between a refusal and the next look."""
        if (
            call.kind.coalesces or call.kind.splits
        ):  # the one that it shares an execution with may have been refused before, and parts go
            return True
        simulation = self.simulation
        loaded = simulation.demand.on and any(
            simulation.oracle.since.get(name, 0) >= call.opened_ns for name in STEPS[call.kind.name]
        )
        if loaded:  # all that have waited for the load come at once
            return True
        return not simulation.is_exact or self._left_ns >= call.opened_ns or simulation.crowd is not None

    def _was_full(self, call: Call | Refused, kind: Kind, level: int, told: int) -> bool:
        if level == SLOTS:
            limit = kind.sequence.max_backlog if kind.sequence else 0
        else:
            limit = kind.queue.levels[level - 1].max_size
        if limit == 0 or told != limit:
            return False
        since = self._full_ns.get((kind.name, level), -1)
        if since < call.opened_ns and not self._is_blurred(call):
            return False
        return self._was_equal(call, kind)

    def _was_equal(self, call: Call | Refused, kind: Kind) -> bool:
        """Whether the client of a request that was refused had as many in the queue as others."""
        direct = kind is call.kind and len(kind.queue.levels) == 1 and not (kind.steps or kind.sequence or kind.splits)
        is_one = self.simulation.secure.mutual  # all clients are one, by their certificate
        if not direct or kind.reuses or self._is_blurred(call) or self.simulation.is_faulty or is_one:
            return True
        uses = self.simulation.uses
        number = uses[call.client.number % len(uses)].number
        return self._equal_ns.get((kind.name, number), -1) >= call.opened_ns

    def _had_most(self, call: Call | Refused, kind: Kind) -> bool:
        if not any(policy.max_size for policy in kind.queue.levels):
            return False
        was_full = any(
            self._full_ns.get((kind.name, level), -1) >= call.opened_ns
            for level in range(1, len(kind.queue.levels) + 1)
        )
        return (was_full or self._is_blurred(call)) and self._was_equal(call, kind)

    def _was_late(self, call: Call | Refused, kind: Kind, told_us: int) -> bool:
        """Whether it has waited as long as it says, which is as long as it may."""
        now = self.simulation.world.now()
        if kind is call.kind:
            timeout_us, yields = call.timeout_us, call.yields
        else:  # a step has the level and the timeout that its request names, as its own policy reads them
            timeout_us, yields = kind.time_to_wait(call.asked_level, call.asked_us), kind.level(call.asked_level).yields
        if call.kind.coalesces and kind is not call.kind:  # the most lenient time of those who share the execution
            return 0 < told_us <= max(policy.timeout_us for policy in kind.queue.levels)
        begun = call.opened_ns
        if self.simulation.demand.on and kind.sequence is None:  # a request is in no queue before its model is there
            begun = self.simulation.oracle.there_ns(kind.name, begun)
        return not yields and told_us == timeout_us and now >= begun + told_us * 1000


def is_silent(client: Client) -> bool:
    """Whether nothing is on its way to or from a client."""
    return not (client.reading or client.pipe.busy)


def goes_at_once(kind: Kind) -> bool:
    """Whether a request of this model waits for a delay alone, where all instances of it and its steps are idle."""
    return not any(
        each.sequence
        or each.needs
        or each.decoupled
        or each.max_inflight
        or each.queue.preserve_ordering
        or each.style in ("worker", "gpu")
        for each in (KINDS[name] for name in STEPS[kind.name])
    )
