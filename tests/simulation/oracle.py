"""What a server owes its clients, judged from what they sent and got, and from what models were asked to do."""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from typing import TYPE_CHECKING
from urllib.parse import unquote

import numpy as np
from google.protobuf.message import DecodeError

from inferd._native.memory.resource import live_counters
from inferd._native.refusal import refusal_counts
from inferd_client.pb import grpc_service_pb2 as pb
from tests import richerrors
from tests.simulation.ages import ENDS, is_too_late, may_drop
from tests.simulation.audit import oldest, responses_wait, with_pending
from tests.simulation.beside import row_of_tensor
from tests.simulation.demand import NO_LOADS
from tests.simulation.kind import FIRST_QUESTION, Kind, serialize_strings
from tests.simulation.kinds import KINDS, STEPS
from tests.simulation.process import HEARD
from tests.simulation.questions import Question, may_fail
from tests.simulation.remote import NOTES
from tests.simulation.replies import STATUS_OF, code_of
from tests.simulation.rights import PERMISSION_DENIED, UNAUTHENTICATED
from tests.simulation.talks import FINAL, Talk, row_of
from tests.simulation.wire import Violation, take_message
from tests.simulation.wording import said_of

if TYPE_CHECKING:
    from tests.simulation.clients import Call, Sequence
    from tests.simulation.crowd import Refused
    from tests.simulation.models import Version
    from tests.simulation.simulation import Simulation

OK, CANCELLED, UNKNOWN, INVALID, LATE, NOT_FOUND, ALREADY_EXISTS = range(7)
EXHAUSTED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE = 8, 12, 13, 14
STOPS = "Server is stopping, scheduler for model has stopped accepting new inference requests: no sequence begins on"
FAILURES = (
    CANCELLED,
    INVALID,
    LATE,
    NOT_FOUND,
    ALREADY_EXISTS,
    PERMISSION_DENIED,
    EXHAUSTED,
    UNIMPLEMENTED,
    INTERNAL,
    UNAVAILABLE,
    UNAUTHENTICATED,
)
MS = 1_000_000
GRAIN = MS + MS // 5  # that an outcome may come behind its deadline: the timers' grain, and what the loop did first
SLACK = MS // 10  # that a batch may come behind its delay when nobody has anything to do
ENHANCE_YOUR_CALM = 11
LONG_STAND = 5000 * MS  # for which a machine has to stand still that peers seem slower than they may be
PREFIX = 5  # bytes in front of a message
PATIENCE = 60_000 * MS  # in which one of a few threads is not refused
TOLD = 12  # calls in the text of a violation
NOT_EXECUTED = ("Exceeds maximum queue size", "Request timeout expired")  # how refusals begin
NOT_UP = ("its worker is not running yet", "its worker process has ended")  # of one that was to come up
FAILED_FOR = ("INTERNAL", "DEADLINE_EXCEEDED", "INVALID_REQUEST", "LIMIT_EXCEEDED")  # reasons of other errors, too
UNREACHED = ("open requests, which is its limit",)  # limits that no simulation comes to
SLOW = re.compile(r"the request has not arrived within ([\d.]+) s: (\d+) bytes of its message have come$")
SLOWEST = 16 << 10  # bytes a second
UNREAD = re.compile(
    r"the client has not read its responses for (\d+) s while other requests wait for the instance that makes them; "
    "read faster, or ask for less at a time$"
)
UNREAD_PATIENCE = 3000 * MS  # in which a client may not read what others wait for
TOO_MANY = "model '{}' has given more than one response, the request takes only one"
IN_ENSEMBLE = re.compile(r"^(in ensemble '[^']*', )+")  # in front of what a step says
SEQUENCE = ("sequence_id", "sequence_start", "sequence_end")  # parameters of answers
RESET = 100  # and the code of RST_STREAM: in place of a status


class Oracle:
    """The oracle of one simulation."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.away: dict[str, list[tuple[int, int]]] = {}  # when a model was not there, by name
        self.open: dict[int, Call] = {}
        self.order: dict[tuple[int, int, str, int], int] = {}
        self.ended: dict[int, Sequence] = {}  # without a request that says so, of which their models are told
        self.full_ns = -1  # when the house was full last
        self._threadless: dict[Version, int] = {}  # since when requests wait, and no thread has begun
        self.reasons: Counter[str] = Counter()  # of refusals that clients have heard
        self.refusals = refusal_counts()  # before
        self.over: dict[str, int] = {}  # calls, by model, however they ended
        self.since: dict[str, int] = {}  # the version of a model that serves
        self.asked_ns: dict[str, int] = {}  # when somebody may have asked a model last

    @property
    def workers_ask(self) -> bool:
        return any(kind.asks for kind in self.simulation.kinds.values())

    # -- models come and go --

    def loaded(self, name: str) -> None:
        if features := self.simulation.kinds[name].features:
            self.simulation.tell("operator", f"has '{name}' with: {features}")
        self.since[name] = self.simulation.world.now()
        self.simulation.questions.loaded(name)
        if self.simulation.crowd is not None:
            self.simulation.crowd.loaded(name)
        if self.away.get(name):
            since, until = self.away[name][-1]
            self.away[name][-1] = (since, min(until, self.simulation.world.now()))

    def unloaded(self, name: str) -> None:
        self.away.setdefault(name, []).append((self.simulation.world.now(), 1 << 62))

    def was_away(self, name: str, since_ns: int) -> bool:
        """Whether this model was not there at some time since then."""
        now = self.simulation.world.now()
        return any(since <= now and until >= since_ns for since, until in self.away.get(name, ()))

    def there_ns(self, name: str, since_ns: int) -> int:
        """When this model was there, from then on."""
        return max((until for since, until in self.away.get(name, ()) if since <= since_ns <= until), default=since_ns)

    def _was_replaced(self, kind: Kind, since_ns: int) -> bool:
        """Whether another version has taken the place of this model, or of a step of it, since then."""
        return any(self.since.get(name, 0) >= since_ns or self.was_away(name, since_ns) for name in STEPS[kind.name])

    def asked(self, kind: Kind, *, at_any_time: bool = False) -> None:
        """A request for this model is under way, or it may come at any time: what its client has given up."""
        since = 1 << 62 if at_any_time else self.simulation.world.now()
        for name in STEPS[kind.name]:
            self.asked_ns[name] = max(self.asked_ns.get(name, 0), since)

    def leaves(self, version: Version) -> None:
        """A version has ended: it has had threads only if somebody has asked it, where these come with the request."""
        name = version.kind.name
        if not version.backend.late or self.asked_ns.get(name, 0) >= version.loaded_ns:
            return
        under_way = any(name in STEPS[call.kind.name] for call in self.open.values())
        if version.threads and not under_way:
            raise Violation(f"{version.prefix}: {len(version.threads)} threads, and nobody has asked it")

    # -- calls --

    def waiting(self) -> str:
        talks = [talk for client in self.simulation.clients for talk in client.talks.values()]
        crowd = self.simulation.crowd
        waiting = [*map(str, self.open.values()), *map(str, talks), *(crowd.waiting() if crowd is not None else ())]
        more = f", and {len(waiting) - TOLD} more" if len(waiting) > TOLD else ""
        return ", ".join(waiting[:TOLD]) + more

    @staticmethod
    def status(call: Call | Talk | Question) -> int:
        stream = call.stream
        return int((stream.trailers or {}).get("grpc-status", "99")) if stream.reset is None else RESET + stream.reset

    def given_up(self, *calls: Call) -> None:
        """The server has heard that nobody waits for these calls."""
        for call in calls:
            self._gone(call, self.simulation.world.now())

    def arrived(self, call: Call) -> None:
        """The whole of a call has come to the server: how long it may wait is known."""
        now = self.simulation.world.now()
        kind = call.kind
        self.simulation.bounds.came(call)
        if call.deadline_ns >= 0 and not (kind.steps or kind.splits or kind.sequence):  # else the loop has to end it
            self._gone(call, now + call.deadline_ns)
        if (
            not call.client.temper.prompt
            or call.client.packs
            or kind.reuses
            or kind.steps
            or not call.client.end.flows(call.opened_ns)
        ):  # it may be parked, for its client has much to read, or wait for the threads that inflate
            return
        self.simulation.executions.arrived[call.number] = (call.level, call.opened_ns, now, not call.yields)
        # the time in the queue of a request that has caused its model to be loaded begins when the model is there
        is_there = not self.simulation.demand.on or kind.name in self.simulation.versions
        if call.timeout_us and is_there and not (call.yields or kind.sequence or kind.steps):
            self._gone(call, now + call.timeout_us * 1000, from_queue=True)
            self.simulation.bounds.waits(call, now + call.timeout_us * 1000)

    def _gone(self, call: Call, ns: int, *, from_queue: bool = False) -> None:
        if self.simulation.by_python:
            return  # its handler hears of it when the loop has time
        executions = self.simulation.executions
        for gone in (executions.gone_ns,) if from_queue else (executions.gone_ns, executions.left_ns):
            if not call.kind.reuses:  # else the number in front is none of its own
                gone[call.number] = min(ns, gone.get(call.number, ns))

    def begun(self, call: Call) -> None:
        """The answer of a call begins to come: in the order of the calls, where that is promised."""
        # An answer that the thread pool compresses comes behind one that is small. A handler in Python hands its
        # request on when it has read the end of the call.
        if call.client.packs or self.simulation.by_python:
            return
        since = self.since[call.kind.name]
        if call.kind.queue.preserve_ordering and call.opened_ns > since:
            key = (call.client.number, call.client.life, call.kind.name, since)
            if self.order.get(key, 0) > call.place:
                raise Violation(f"{call}: answered after a later one")
            self.order[key] = call.place

    def answered(self, call: Call) -> None:
        """Judge a call that is over."""
        status = self.status(call)
        text = (call.stream.trailers or {}).get("grpc-message", "")
        simulation = self.simulation
        now = simulation.world.now()
        executed = not call.kind.reuses and simulation.executions.count.get((call.kind.name, call.number))
        if status == OK:
            simulation.reports.check(call)
            simulation.reports.moved(call, len(call.stream.data) - PREFIX if not call.client.packs else 0)
            if call.too_many:
                raise Violation(f"{call}: its model has given {len(call.x)} answers, and it is good")
        if call.wrong and (status == OK or executed):
            raise Violation(f"{call}: it has to be refused, and was not")
        if call.region is not None and not call.lost and (found := call.region.altered(call)):
            raise Violation(f"{call}: {found}")
        if status == OK:
            self._check_answer(call)
            if call.kind.caches and call.kind.is_seen and not call.lost:
                self._check_age(call)
        elif call.stream.data and status < RESET and not (simulation.by_python and status == LATE):
            raise Violation(f"{call}: status {status} after {len(call.stream.data)} bytes of an answer")
        elif not self._may(call, status, text, now):
            raise Violation(f"{call}: status {status} '{text}'")
        if OK < status < RESET:
            self._check_details(call, status, text)
        self._check_time(call, max(call.opened_ns, call.sent_ns) + call.deadline_ns)  # it begins when HEADERS come

    def _check_details(self, call: Call | Talk | Question, status: int, text: str) -> None:
        """Check that the details of an error agree with its status and text."""
        told = (call.stream.trailers or {}).get(richerrors.KEY)
        if told is None:
            return  # the text is too long to be sent twice, or there is no memory
        try:
            rich = richerrors.read(base64.b64decode(told + "=" * (-len(told) % 4), validate=True))
        except (ValueError, DecodeError) as error:
            raise Violation(f"{call}: status {status} '{text}' with details '{told}': {error}") from error
        without_text = not text and self.simulation.is_faulty  # there was no memory for it, and for these there was
        if rich.code != status or (rich.message != unquote(text) and not without_text):
            raise Violation(f"{call}: status {status} '{text}' with details {rich}")
        is_models = getattr(call, "lost", False) or getattr(call, "question", 0) in self.simulation.executions.failed
        if rich.reason not in FAILED_FOR and not is_models:
            self.reasons[rich.reason] += 1

    def _check_age(self, call: Call) -> None:
        """An answer that was kept is of the versions that serve, and not older than it may be."""
        for name in STEPS[call.kind.name]:
            if not KINDS[name].steps:
                self._check_age_of(call, KINDS[name])

    def _check_age_of(self, call: Call, kind: Kind) -> None:
        """The same of what this model has done for it."""
        simulation = self.simulation
        version = simulation.versions.get(kind.name)
        if version is None or self.since[kind.name] >= call.opened_ns:
            return
        executed_ns = self._executed_ns(version, call.question)
        if executed_ns is None:
            raise Violation(f"{call}: its answer is of a version of '{kind.name}' that has been replaced")
        longest = sum(2 * KINDS[name].duration_us * 1000 for name in STEPS[call.kind.name])
        # until it was kept that took so long
        age = call.opened_ns - executed_ns - longest - GRAIN - simulation.remote.slack_ns
        is_prompt = max(simulation.jumped_ns, simulation.pressed_ns) < executed_ns
        if simulation.ttl_ns and is_prompt and age > simulation.ttl_ns and not call.kind.steps:
            raise Violation(f"{call}: its answer has been kept for {age} ns")

    def _executed_ns(self, version: Version, question: int) -> int | None:
        """When this version was executed for a question last, or, with Redis, another one of the same files."""
        latest, generations = self.simulation.executions.latest_ns, self.simulation.shop.generations
        prefixes = [version.prefix]
        if self.simulation.remote.on:
            files = generations[version.prefix]
            prefixes = [prefix for prefix, others in generations.items() if others == files]
        return max((latest[prefix, question] for prefix in prefixes if (prefix, question) in latest), default=None)

    def _check_time(self, call: Call | Talk | Question, sent_ns: int) -> None:
        """Check that a call is over not long after its deadline."""
        simulation = self.simulation
        now = simulation.world.now()
        over_ns = max(call.opened_ns + call.deadline_ns, sent_ns)
        if (
            call.deadline_ns >= 0
            and call.client.temper.prompt
            and call.client.end.full_ns < call.opened_ns
            and not simulation.is_faulty
            and simulation.jumped_ns < call.opened_ns
            and simulation.pressed_ns < over_ns  # else its client may hear of it late
            and now > over_ns + GRAIN
        ):
            late = (now - call.opened_ns - call.deadline_ns) // 1000
            raise Violation(f"{call}: status {self.status(call)} {late} us after its deadline")

    def stream_ended(self, talk: Talk) -> None:
        """Judge a stream that the server has ended."""
        simulation = self.simulation
        now = simulation.world.now()
        status = self.status(talk)
        text = (talk.stream.trailers or {}).get("grpc-message", "")
        refused = simulation.forwarding.may_refuse(talk.headers, status, text)
        if status == UNAVAILABLE and text in ENDS:
            allowed = is_too_late(talk, text)
        elif refused or simulation.rights.may_refuse(talk, status, text, None):
            allowed = True
        elif status == OK:
            simulation.reports.check(talk)
            allowed = (not talk.open or talk.puzzled) and talk.stream.sent_end
        elif status == LATE:
            allowed = self.is_late(talk, now)
            allowed = allowed or self._may_seem_slow(status, text) or self._was_slow(talk, text)
        else:
            is_failure = status in (EXHAUSTED, INTERNAL, UNAVAILABLE) or status > RESET
            allowed = is_failure and simulation.is_faulty and simulation.bounds.names_fault(talk, text)
            allowed = allowed or (status == EXHAUSTED and simulation.bounds.holds_too_much(text))
            allowed = allowed or (status == RESET + ENHANCE_YOUR_CALM and self._may_evict(talk))
            allowed = allowed or self._may_seem_slow(status, text)
            allowed = allowed or (status == EXHAUSTED and self._kept_waiting(talk, text, now))
        allowed = allowed or simulation.quota.explains(talk.client.end.address, status, unquote(text))
        if not allowed and talk.ends_on_error and 0 < status < RESET:
            allowed = any(self._may(call, status, text, now) for call in (*talk.open, *talk.whole.values()))
        if OK < status < RESET:
            self._check_details(talk, status, text)
        if not allowed:
            unanswered = [call.number for call in talk.open]
            raise Violation(f"{talk}: status {status} '{text}', and requests {unanswered} are open")
        self._check_time(talk, max(talk.opened_ns, talk.sent_ns) + talk.deadline_ns)  # from its first bytes on

    def question_ended(self, question: Question) -> None:
        """Judge a question that the server has ended."""
        simulation = self.simulation
        status = self.status(question)
        text = unquote((question.stream.trailers or {}).get("grpc-message", ""))
        asked = question.asked
        if status == OK:
            allowed = question.answers == 1 and asked.refused is None and not asked.goes_on and not question.stream.data
        elif status == UNAVAILABLE and text in ENDS:
            allowed = is_too_late(question, text)
        elif status == LATE:
            allowed = self.is_late(question, simulation.world.now())
            allowed = allowed or self._may_seem_slow(status, text) or self._was_slow(question, text)
        else:
            is_failure = status in (EXHAUSTED, INTERNAL, UNAVAILABLE) or status > RESET
            allowed = simulation.quota.explains(question.client.end.address, status, text)
            allowed = (
                allowed
                or may_fail(question, status, text)
                or simulation.rights.may_refuse_question(question, status, text)
            )
            allowed = allowed or (is_failure and simulation.is_faulty and simulation.bounds.names_fault(question, text))
            allowed = allowed or (status == EXHAUSTED and simulation.bounds.holds_too_much(text))
            allowed = allowed or (status == RESET + ENHANCE_YOUR_CALM and self._may_evict(question))
            allowed = allowed or self._may_seem_slow(status, text)
        if not allowed:
            raise Violation(f"{question}: status {status} '{text}' after {question.answers} answers")
        if OK < status < RESET:
            self._check_details(question, status, text)
        self._check_time(question, max(question.opened_ns, question.sent_ns) + question.deadline_ns)

    def is_late(self, call: Call | Refused | Talk | Question, now: int) -> bool:
        """Whether the deadline of a call may have passed; a thread that is interrupted before it reads counts from
        before that."""
        return call.deadline_ns >= 0 and (now >= call.opened_ns + call.deadline_ns or self.simulation.preempts)

    def may_have_ended(self, call: Call) -> bool:
        """Whether the server may have ended an open call, of which its client has still to hear."""
        simulation = self.simulation
        if simulation.is_faulty or self._may_evict(call) or self.is_late(call, simulation.world.now()):
            return True
        return bool(call.client.end.over) or may_drop(call.client)

    def _may_evict(self, call: Call | Refused | Talk | Question) -> bool:
        """Whether the server may end a call because it holds too much, or because its client takes no response."""
        temper = getattr(call.client, "temper", None)  # a crowd has none
        return self.simulation.held_limit > 0 or (temper is not None and temper.dawdles)

    def _may_seem_slow(self, status: int, text: str) -> bool:
        """Whether the machine has stood still so long that a peer seems to, and this is what it hears then."""
        simulation = self.simulation
        told = "has not arrived" in text or simulation.has_no_text(text)
        is_that = told if status == LATE else status == RESET + ENHANCE_YOUR_CALM
        return is_that and simulation.stood_ns > LONG_STAND

    def _was_slow(self, call: Call | Refused | Talk | Question, text: str) -> bool:
        """Whether a client had not read what it was sent, WINDOW_UPDATEs among it, so that it could not send either for
        as long as this says, or sends several messages that slowly."""
        found = SLOW.search(text)
        limit = self.simulation.receive_timeout
        temper = getattr(call.client, "temper", None)  # a crowd has none
        dawdles = temper is not None and temper.dawdles
        if not limit or not (dawdles or call.client.end.full_ns >= call.opened_ns):
            return False
        if found is None:  # the text needs memory
            return self.simulation.has_no_text(text)
        return float(found[1]) + 0.1 > limit + int(found[2]) / SLOWEST

    def _kept_waiting(self, talk: Talk, text: str, now: int) -> bool:
        """Whether the client of a stream reads slowly what decoupled models answer, for which others have to wait, and
        has done so for as long as this says; or seems to, because the machine has stood still for most of that time."""
        found = UNREAD.match(text)
        if found is None or not talk.rows:
            return False
        told_ns = int(found[1]) * 1000 * MS
        if talk.client.temper.prompt and self.simulation.stood_ns < told_ns // 2:
            return False
        return told_ns >= UNREAD_PATIENCE and now - talk.opened_ns >= told_ns

    def refused(self, call: Call, text: str) -> None:
        """A request on a stream has an error, of which only the text is known."""
        now = self.simulation.world.now()
        if not any(self._may(call, status, text, now) for status in FAILURES):
            raise Violation(f"{call}: '{text}'")

    def judge(self, call: Refused, status: int, text: str) -> None:
        """Judge a call of a crowd that has another status than OK."""
        if not self._may(call, status, text, self.simulation.world.now()):
            raise Violation(f"{call}: status {status} '{text}'")

    def _may(self, call: Call | Refused, status: int, text: str, now: int) -> bool:
        simulation = self.simulation
        kind = call.kind
        text = IN_ENSEMBLE.sub("", text)
        if call.lost and status < RESET:
            return status != UNKNOWN
        if status == EXHAUSTED and self.simulation.quota.explains(call.client.end.address, status, unquote(text)):
            return True
        if status == INTERNAL and text == TOO_MANY.format(kind.name):
            return call.too_many or text == simulation.executions.faults.get(call.question)
        if status == UNAVAILABLE and text in ENDS:
            return is_too_late(call, text)
        if status == UNAVAILABLE and text.startswith(STOPS):
            keeps = any(KINDS[name].sequential for name in STEPS[kind.name])
            return keeps and simulation.operator.is_stopping and simulation.stops_early
        if status == UNAVAILABLE and NO_LOADS in text:
            # clients have no calls when the server stops late; workers may still ask
            return simulation.demand.on and simulation.operator.is_stopping and simulation.stops_early
        if (
            call.wrong
            and status in (INVALID, NOT_FOUND, INTERNAL)
            and (call.refusal in unquote(text) or self.simulation.has_no_text(text))
        ):
            return True
        if simulation.forwarding.may_refuse(call.headers, status, text):
            return True
        if status == INVALID and (told := self._failure(call)):
            return told in unquote(text) or simulation.has_no_text(text)
        if self._may_seem_slow(status, text):
            return True
        if status == LATE:
            return self.is_late(call, now) or self._was_slow(call, text)
        if status == UNAVAILABLE and text.startswith(NOT_EXECUTED) and self._was_executed(call):
            return False
        if status == UNAVAILABLE and text.startswith(NOT_EXECUTED):
            return simulation.bounds.explains(call, text)
        if status == UNAVAILABLE and text.startswith("timeout of the corresponding sequence has been expired"):
            return call.timeout_us > 0 and kind.sequence is not None
        if simulation.rights.may_refuse(call, status, text, kind.name):
            return True
        names = STEPS[kind.name] | ({"nobody"} if call.wrong else set())
        if simulation.demand.may_refuse(names, call.opened_ns, text):
            return True
        if status in (UNAVAILABLE, NOT_FOUND) and ("unknown model" in text or (not text and simulation.is_faulty)):
            was_away = not simulation.demand.on and any(self.was_away(name, call.opened_ns) for name in names)
            if was_away or text:
                return was_away
        if status == UNAVAILABLE and text.startswith("Failed to process the request(s)"):
            # here a version serves before its workers are up, and another may take its place until then
            early = text.endswith(NOT_UP) and self._was_replaced(kind, call.opened_ns)
            return early or simulation.may_lose_workers(kind) or simulation.is_faulty
        if any(limit in text for limit in UNREACHED):
            return False
        if status == INTERNAL and kind.lacks and text == f"model '{kind.name}' did not produce output 'z'":
            return not kind.steps and call.question % 2 == 0
        if status == INTERNAL and call.question in simulation.executions.faults:
            return text == simulation.executions.faults[call.question]
        if status == INTERNAL and (expected := simulation.executions.spoilt.get(call.question, "")):
            return expected in text
        if call.question in simulation.executions.failed and status in self._failures(call):
            return True
        if status in (INVALID, CANCELLED) and call.client.sequence_may_end(call, text):
            return True
        is_failure = status in (EXHAUSTED, INTERNAL, UNAVAILABLE) or status > RESET
        if simulation.is_faulty and is_failure and simulation.bounds.names_fault(call, text):
            return True
        if simulation.graphics.explains(unquote(text), simulation.demand.told_since(call.opened_ns, text)):
            return status in (INTERNAL, INVALID) or (status == UNAVAILABLE and simulation.demand.on)
        if status == RESET + ENHANCE_YOUR_CALM:
            return self._may_evict(call)
        return status == EXHAUSTED and simulation.bounds.holds_too_much(text)

    @staticmethod
    def _failure(call: Call | Refused) -> str:
        """What an ensemble has to refuse the request with; empty: nothing."""
        return call.kind.failure(call.question, len(getattr(call, "x", ()))) if call.kind.steps else ""

    def _failures(self, call: Call | Refused) -> tuple[int, ...]:
        """The statuses that it may have because its execution, or that of a step, has failed."""
        statuses = []
        for kind in (KINDS[name] for name in STEPS[call.kind.name]):
            if kind.fails and kind.style == "worker":
                usual = STATUS_OF[code_of(call.question)]
                statuses += [usual, self.simulation.executions.failed_with.get(call.question, usual)]
            elif kind.fails:
                statuses.append(INVALID if kind.isolates else INTERNAL)
        return tuple(statuses)

    def _was_executed(self, call: Call) -> bool:
        """Whether the model itself has executed a request, as far as that can be told of one as a whole."""
        kind = call.kind
        if kind.reuses or kind.splits or kind.steps or kind.repeats:
            return False
        return (kind.name, call.number) in self.simulation.executions.count

    def note_house(self) -> None:
        """Look how many requests are in flight: as many as may be, at most, but for what workers ask."""
        simulation = self.simulation
        limit, count = simulation.service_limit, simulation.service.admitted_count
        if count >= limit // 2:  # a client may have asked, been refused and cancelled another request in one chunk
            self.full_ns = simulation.world.now()
        if count > limit and not self.workers_ask:
            raise Violation(f"{count} requests are in flight, where {limit} may be")

    def _check_answer(self, call: Call) -> None:
        head = bytes(call.stream.data[:20])
        message = take_message(call.stream.data)
        if message is None or call.stream.data:
            raise Violation(f"{call}: not one message, but {head!r}")
        self.check_response(call, pb.ModelInferResponse.FromString(message))

    @staticmethod
    def _check_head(call: Call, response: pb.ModelInferResponse, outputs: list[str]) -> None:
        if response.id != str(call.number) or response.model_name != call.kind.name:
            raise Violation(f"{call}: the answer of request '{response.id}' of model '{response.model_name}'")
        if [output.name for output in response.outputs] != outputs:
            raise Violation(f"{call}: outputs {[output.name for output in response.outputs]}")

    def check_response(self, call: Call, response: pb.ModelInferResponse) -> None:
        """Judge the one answer to a request."""
        kind = call.kind
        self.simulation.rights.check(call)
        if (told := self._failure(call)) and not call.lost:
            raise Violation(f"{call}: it has to be refused with '{told}', and has an answer")
        if self.simulation.forwarding.must_refuse(call.headers):
            raise Violation(f"{call}: headers {call.headers} cannot be passed on, and it has an answer")
        factors = kind.factors(call.question)
        self._check_head(call, response, list(call.wanted))
        if kind.steps and not kind.reuses:
            self._check_sequence(call, response)
        if call.number in self.simulation.executions.stopped:
            raise Violation(f"{call}: its execution was stopped, and it has an answer")
        if call.number in self.simulation.executions.spoilt:
            raise Violation(f"{call}: its worker has given what is no answer, and it has one")
        if call.lost or (call.sequence is not None and call.sequence.broken):
            return
        for index, name in enumerate(call.wanted):
            if name == "v":
                self._check_beside(call, response, index)
                continue
            expected = call.expected
            if name != "y":
                expected = call.x.copy()
                expected[:, 1:] *= factors[name]
            in_region = call.region is not None and call.answer_at >= 0
            if name == "y" and call.classes:
                self._check_classes(call, response)
                continue
            if not in_region and len(response.raw_output_contents) != len(call.wanted):
                raise Violation(f"{call}: {len(response.raw_output_contents)} tensors for outputs {call.wanted}")
            data = call.region.read(call) if in_region else response.raw_output_contents[index]
            self._check_tensor(call, data, tuple(response.outputs[index].shape), expected)
        told = {key: value for key, value in said_of(response.parameters).items() if key != FINAL}
        if kind.caches and kind.style != "worker" and told not in ({}, NOTES):
            raise Violation(f"{call}: parameters {told}, which Redis never had")
        if kind.style == "worker" and kind.reuses and not kind.splits:
            heard = said_of(response.parameters).get(HEARD)
            if heard != json.dumps(self.simulation.forwarding.said(call), sort_keys=True):
                raise Violation(f"{call}: its answer is that to a request with parameters {heard}")
        elif kind.style == "worker" and not kind.splits:
            self._check_parameters(call, response)
        if kind.style.startswith(("native", "gpu")) or kind.steps or kind.reuses:
            return
        times = self.simulation.executions.count.get((kind.name, call.number), 0)
        if times == 0 or (times != 1 and not kind.splits and not kind.repeats):
            raise Violation(f"{call}: answered, and executed {times} times")
        if call.number in self.simulation.executions.faults:
            raise Violation(f"{call}: {self.simulation.executions.faults[call.number]}, and it has an answer")
        if kind.fails and (call.x < 0).any():
            raise Violation(f"{call}: its execution failed, and it has an answer")

    @staticmethod
    def _check_sequence(call: Call, response: pb.ModelInferResponse) -> None:
        """Check that the answer of an ensemble names the sequence of its request, or that of its last step."""
        assert call.message is not None
        said = {key: value.WhichOneof("parameter_choice") for key, value in response.parameters.items()}
        told = tuple(getattr(response.parameters[key], said.get(key) or "int64_param") for key in SEQUENCE)
        asked = call.message.parameters
        expected: tuple[object, ...] = (call.question, True, True)
        if not call.kind.ushers:
            flags = [key in asked and asked[key].bool_param for key in SEQUENCE[1:]]
            expected = (call.sequence.number if call.sequence is not None else 0, *flags)
        if told != expected:
            raise Violation(f"{call}: its answer is of sequence {told}, not {expected}")

    def _check_parameters(self, call: Call, response: pb.ModelInferResponse) -> None:
        """Check that the parameters of a response are those that the worker has sent."""
        told = {key: value for key, value in said_of(response.parameters).items() if key != FINAL}
        expected = self.simulation.executions.said.get(call.number, {})
        if told != expected:
            raise Violation(f"{call}: parameters {told}, not {expected}")

    def check_row(self, call: Call, response: pb.ModelInferResponse) -> int:
        """Judge one of the answers to a request, which is for one of its rows; which."""
        self._check_head(call, response, list(call.wanted))
        if call.kind.steps:
            self._check_sequence(call, response)
        data = response.raw_output_contents[0]  # in the order of the model
        numbers = numbers_of(call, data)
        if not numbers.size:
            raise Violation(f"{call}: an answer without a number")
        row = row_of(call.x, numbers)
        if not 0 <= row < len(call.x):
            raise Violation(f"{call}: an answer for row {row}")
        self._check_tensor(call, data, tuple(response.outputs[0].shape), call.expected[row : row + 1])
        for index, name in enumerate(call.wanted):
            if name in ("y", "v"):
                continue
            whole = call.x.copy()  # each answer has what belongs to all rows
            whole[:, 1:] *= call.kind.factors(call.question)[name]
            given = response.raw_output_contents[index]
            self._check_tensor(call, given, tuple(response.outputs[index].shape), whole)
        if "v" in call.wanted:
            self._check_beside(call, response, 1, row)
        return row

    @staticmethod
    def _check_beside(call: Call, response: pb.ModelInferResponse, index: int, row: int = -1) -> None:
        """Check the output that is as an input was, or one row of it."""
        beside, rows = call.kind.beside, len(call.x) if row < 0 else 1
        assert beside is not None
        if call.given is None:
            shape, data = beside.lacking(rows, not call.kind.flat)
        else:
            shape, data = call.given.shape, call.given.data
            if row >= 0:
                shape, data = (1, *shape[1:]), row_of_tensor(call.given, beside.datatype, row)
        output, given = response.outputs[index], response.raw_output_contents[index]
        if (output.datatype, tuple(output.shape)) != (beside.datatype, shape) or given != data:
            raise Violation(f"{call}: v is {output.datatype} {list(output.shape)} {given[:80]!r}, not {shape} {data!r}")

    @staticmethod
    def _check_classes(call: Call, response: pb.ModelInferResponse) -> None:
        """Check that each row is replaced by its greatest numbers, with their places."""
        texts, kind = [], call.kind
        for row in kind.typed(call.expected).tolist():
            greatest = sorted(range(len(row)), key=lambda place, row=row: (-row[place], place))  # type: ignore[misc]
            for place in greatest[: call.classes]:
                label = f":{kind.labels[place]}" if kind.labels[place : place + 1] != () and kind.labels[place] else ""
                number = f"{row[place]:f}" if kind.number.startswith("FP") else row[place]
                texts.append(f"{number}:{place}{label}".encode())
        shape = (len(call.expected), min(call.classes, call.expected.shape[1]))
        output, data = response.outputs[0], response.raw_output_contents[0]
        if (output.datatype, tuple(output.shape)) != ("BYTES", shape) or data != serialize_strings(texts):
            raise Violation(f"{call}: {output.datatype} {list(output.shape)} {data[:80]!r}, not {texts[:3]}")

    @staticmethod
    def _check_tensor(call: Call, data: bytes, shape: tuple[int, ...], expected: np.ndarray) -> None:
        if call.kind.is_coded:
            if shape != expected.shape or data != call.kind.encoded(expected):
                raise Violation(
                    f"{call}: shape {list(shape)}, {data[:80]!r} where {expected[:1].tolist()} was expected"
                )
            return
        y = numbers_of(call, data)
        if shape != expected.shape or y.size != expected.size:
            raise Violation(f"{call}: shape {list(shape)}, {y.size} numbers")
        if not np.array_equal(y.reshape(shape), expected):
            wrong = np.flatnonzero(y != expected.reshape(-1))[:6]
            raise Violation(f"{call}: {y[wrong]} where {expected.reshape(-1)[wrong]} was expected, at {wrong}")

    # -- the server --

    def rest(self) -> None:
        """Check, when nothing can go on before time passes, that no instance is idle beside work that it may do."""
        simulation = self.simulation
        now = simulation.world.now()
        if simulation.is_faulty:
            return
        executed = simulation.endpoint.ledger["executed"]
        is_nobodys = executed and simulation.service.admitted_count == 0 and not simulation.door._contexts
        if is_nobodys and not live_counters()["exchanges"]:  # of handlers in Python
            raise Violation(f"{executed} bytes are held as executed, and no request is in flight")
        if responses_wait(simulation.endpoint):
            raise Violation("responses have been handed over, and no thread has heard of them")
        for instance in simulation.executions.running:
            if instance.must_stop(now - GRAIN):
                raise Violation(f"nobody waits for {instance.numbers}, and {instance.name} was not stopped")
        threadless, self._threadless = self._threadless, {}
        for version, pending in with_pending(simulation.shop.gauges):
            if version is not simulation.versions.get(version.kind.name) and version not in simulation.shop.ending:
                continue  # nothing finds it yet
            if version.backend.late and version.count and not version.has_threads:
                # the first thread is waited for only as long as the system refuses it
                since = self._threadless[version] = threadless.get(version, now)
                if now - since > PATIENCE:
                    raise Violation(f"{version.prefix}: requests wait, and no instance has a thread")
            delay = version.kind.delay_us if not version.kind.needs or self._has_resources(version.kind) else None
            if delay is None or not version.count:
                continue
            idle = simulation.world.idle(version.prefix)
            waited = now - oldest(version.loaded.lane)
            if idle and waited > delay * 1000 + (SLACK if delay else 0):
                raise Violation(f"{version.prefix}: {pending} requests wait beside {idle} idle instances")

    def _has_resources(self, kind: Kind) -> bool:
        """Whether what each instance of a model needs is free, as far as that is known."""
        executions, kinds = self.simulation.executions, self.simulation.kinds.values()
        is_known = kind.style == "fresh" and not any(each.needs and each.style == "worker" for each in kinds)
        free = executions.resources - executions.resources_used
        # an instance that needs more than there is may be overdue: the others leave it what there is
        lacks = any(
            version.kind.needs > free and version.loaded.lane.pending
            for version in self.simulation.shop.every()
            if version.kind.needs
        )
        return bool(kind.needs) and is_known and not lacks

    def end(self) -> None:
        """All is over: nothing is held, nothing was executed for nobody."""
        simulation = self.simulation
        endpoint = simulation.endpoint
        if not endpoint.ledger_agrees():
            raise Violation("the sums of the ledger do not agree")
        if endpoint.held:
            raise Violation(f"the server holds {endpoint.held} bytes of nobody: {endpoint.ledger}")
        if simulation.service.admitted_count:
            raise Violation(f"{simulation.service.admitted_count} requests are in flight, and nobody has asked")
        counted = Counter(refusal_counts())
        counted.subtract(self.refusals)
        if uncounted := self.reasons - counted:
            raise Violation(f"clients have heard {dict(uncounted)} beside the refusals that are counted")
        for use in simulation.uses:
            if use.bytes_held or use.calls:
                raise Violation(f"'{use.name}' is charged {use.bytes_held} bytes and {use.calls} calls")
        for number, sequence in self.ended.items():
            was_cut = simulation.cut_ns.get(sequence.kind.name, 0) >= sequence.begun_ns
            if number not in simulation.executions.mourned and not (was_cut or simulation.is_faulty):
                raise Violation(f"sequence {number} of '{sequence.kind.name}' has ended, and its model was not told")
        for (name, number), times in simulation.executions.count.items():
            kind = KINDS[name]
            # number 0 is what is read from memory that its client has cleared
            is_once = not (kind.splits or kind.reuses or kind.repeats or kind.many)
            if times > 1 and 0 < number < FIRST_QUESTION and is_once:
                raise Violation(f"request {number} was executed {times} times by model '{name}'")


def numbers_of(call: Call, data: bytes) -> np.ndarray:
    """What a tensor holds.

    Raises:
        Violation: these are no numbers.
    """
    if len(data) % 8:
        raise Violation(f"{call}: {len(data)} bytes of numbers")
    return np.frombuffer(data, np.int64)
