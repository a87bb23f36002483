"""Calls that workers make to other models while they execute, and what these owe them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from inferd.backends.python.worker import protocol as p
from inferd_client.pb import grpc_service_pb2 as pb
from tests.simulation.kind import SCALE, Kind
from tests.simulation.kinds import KINDS, STEPS
from tests.simulation.wire import Violation
from tests.simulation.wording import encoded

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.clients import Call
    from tests.simulation.process import Asked, Process

US = 1000
MS = 1000 * US
FIRST = 1 << 30  # number of a call: none of a client's
LARGE = 20_000  # numbers in a tensor that no packet holds
INT64 = "INT64"


class Inquiry:
    """One call.

    Args:
        process: the worker that makes it.
        number: its id for the worker.
        parent: on whose behalf it is made; None: nobody's.
        over: called at its end.
    """

    def __init__(self, process: Process, number: int, parent: Asked | None, over: Callable[[], None]) -> None:
        self.process = process
        self.id = number
        self.parent = parent
        self._over = over
        self._simulation = simulation = process.town.simulation
        self._random = random = process.random
        kinds = [kind for kind in simulation.kinds.values() if may_ask(kind)]
        self._kind = None if not kinds or random.random() < 0.05 else self._choose(kinds)
        executions = simulation.executions
        executions.inquiries += 1
        self.number = FIRST + executions.inquiries
        many = 0.7 if self._kind and self._kind.decoupled else 0.3
        rows = random.randint(1, self._kind.max_rows if self._kind else 1) if random.random() < many else 1
        width = LARGE // rows if random.random() < 0.1 else random.randint(2, 5)
        self._x = np.arange(rows * width, dtype=np.int64).reshape(rows, width) + self.number * SCALE
        self._x[:, 0] = self.number * SCALE + np.arange(rows)
        self._decoupled = random.random() < (0.9 if self._kind and self._kind.decoupled else 0.2)
        if self._kind and self._kind.single and not self._decoupled:
            self._x = self._x[:1].copy()
        self._timeout_us = random.choice((0, 0, 0, 300, 5000, 1 << 40))
        self._begun_ns = simulation.world.now()
        if self._kind:
            simulation.oracle.asked(self._kind, at_any_time=True)  # if its worker ends, nobody hears of its end
        self._cancelled = False
        self._credit, self._owed = p.BLS_WINDOW, 0
        self._lazy = random.random() < 0.5  # it gives credit when there is none left, and not at once
        self._rows: set[int] = set()  # that have been answered
        self._to = random.choice((process.its_calls, process.its_calls, process.its_side))

    def __str__(self) -> str:
        return f"call {self.number} of {self.process.name} to {self._kind.name if self._kind else 'nobody'}"

    def _choose(self, kinds: list[Kind]) -> Kind:
        """A model to ask: often one whose responses may exceed the credit."""
        decoupled = [kind for kind in kinds if kind.decoupled]
        return self._random.choice(decoupled if decoupled and self._random.random() < 0.3 else kinds)

    # -- the worker's

    def begin(self) -> None:
        """Make it."""
        record = self._record()
        self._simulation.tell(self.process.name, f"makes {self}: {list(self._x.shape)}")
        if len(record) > p.PACKET - p.HEAD.size:
            self._to = self.process.its_side
            self.process.say(self._to, p.ALLOCATE, number=self.id, offset=len(record))
            return
        self._say(p.BLS_REQUEST, record, flags=p.DECOUPLED if self._decoupled else 0)
        self._perhaps_cancel()

    def allocated(self, at: int) -> None:
        """There is memory for it at this place of the arena; negative: there is none."""
        if at < 0:
            self._end()
            return
        record = self._record()
        self.process.memory[at : at + len(record)] = record
        self._say(p.BLS_REQUEST, record, flags=p.IN_ARENA | (p.DECOUPLED if self._decoupled else 0), offset=at)
        self._perhaps_cancel()

    def _record(self) -> bytes:
        message = pb.ModelInferRequest(model_name=self._kind.name if self._kind else "nobody", id=str(self.number))
        datatype = self._kind.datatype if self._kind else INT64
        message.inputs.add(name="x", datatype=datatype, shape=self._x.shape)
        message.raw_input_contents.append(self._kind.encoded(self._x) if self._kind else self._x.tobytes())
        data = encoded(message)
        return p.BLS_HEAD.pack(self.parent.wire if self.parent else 0, self._timeout_us, len(data), 0) + data

    def _say(self, kind: int, record: bytes = b"", *, flags: int = 0, offset: int = 0) -> None:
        self.process.say(self._to, kind, record, flags=flags, number=self.id, offset=offset)

    def _perhaps_cancel(self) -> None:
        if self._random.random() < 0.1:
            self.process.later(self._random.randint(0, 500 * US), self._cancel)

    def _cancel(self) -> None:
        if self.id in self.process.inquiries:
            self._simulation.tell(self.process.name, f"cancels {self}")
            self._cancelled = True
            self._say(p.BLS_CANCEL)

    # -- the server's

    def take(self, flags: int, code: int, record: bytes, place: int) -> None:
        """A response."""
        final = bool(flags & p.FINAL)
        self._credit -= 1
        if self._credit < 0 and not (final and flags & p.FAILED):
            raise Violation(f"{self}: more responses than it may have")
        if place >= 0:
            release = self.process.its_side
            self.process.later(self._random.randint(0, MS), lambda: self.process.say(release, p.RELEASE, offset=place))
        if flags & p.FAILED:
            self._check_failure(flags, code, record.decode())
        elif not flags & p.EMPTY:
            self._check_response(pb.ModelInferResponse.FromString(record))
        elif not final:
            raise Violation(f"{self}: a response without content that is not the last")
        if final and not flags & p.FAILED and len(self._rows) != len(self._x):
            raise Violation(f"{self}: the last response is behind {len(self._rows)} of {len(self._x)} rows")
        if final:
            self._end()
        else:
            self._owe_credit()

    def _owe_credit(self) -> None:
        """One more response has been taken; the server hears of it now, or when it has used up what it has."""
        self._owed += 1
        if self._lazy:
            if self._owed >= p.BLS_WINDOW:
                self.process.later(self._random.randint(0, MS), self._give_credit)
        elif self._owed >= p.BLS_WINDOW or self._random.random() < 0.5:
            self._give_credit()

    def _give_credit(self) -> None:
        if self._owed and self.id in self.process.inquiries:
            self._say(p.BLS_CREDIT, offset=self._owed)
            self._credit += self._owed
            self._owed = 0

    def _end(self) -> None:
        del self.process.inquiries[self.id]
        oracle = self._simulation.oracle
        for name in STEPS[self._kind.name] if self._kind else ():
            oracle.over[name] = oracle.over.get(name, 0) + 1
        self._over()

    def _check_response(self, response: pb.ModelInferResponse) -> None:
        kind = self._kind
        if kind is None or response.id != str(self.number) or response.model_name != kind.name:
            raise Violation(f"{self}: the answer of request '{response.id}' of model '{response.model_name}'")
        factors = kind.factors(self.number)
        if [output.name for output in response.outputs] != list(factors):
            raise Violation(f"{self}: outputs {[output.name for output in response.outputs]}")
        rows = range(len(self._x))
        if kind.decoupled:
            row = int(np.frombuffer(response.raw_output_contents[0], np.int64)[0] - self._x[0, 0])
            rows = range(row, row + 1)
        if not self._rows.isdisjoint(rows) or not set(rows) <= set(range(len(self._x))):
            raise Violation(f"{self}: an answer for rows {rows}, and there were {sorted(self._rows)}")
        self._rows.update(rows)
        for index, factor in enumerate(factors.values()):
            expected = self._x[rows.start : rows.stop].copy()
            expected[:, 1:] *= factor
            given = tuple(response.outputs[index].shape)
            if given != expected.shape or response.raw_output_contents[index] != kind.encoded(expected):
                raise Violation(f"{self}: shape {given}, {response.raw_output_contents[index][:80]!r}")

    def _check_failure(self, flags: int, code: int, text: str) -> None:
        self._simulation.tell(self.process.name, f"has error {code} for {self}: {text}")
        kind, simulation = self._kind, self._simulation
        if simulation.is_faulty or (code == p.CODE_CANCELLED and self._may_be_cancelled()) or self._is_late():
            return
        if kind is None:
            refused = simulation.demand.may_refuse({"nobody"}, self._begun_ns, text)
            if not refused and (code != p.CODE_NOT_FOUND or not flags & p.EMPTY):
                raise Violation(f"{self}: code {code} '{text}'")
            return
        if kind.fails and self.number in simulation.executions.failed:
            return
        if kind.decoupled and not self._decoupled and code == p.CODE_UNSUPPORTED and flags & p.DECOUPLED:
            return
        if not (simulation.oracle.was_away(kind.name, self._begun_ns) or self._may_be_refused(kind, text)):
            raise Violation(f"{self}: code {code} '{text}'")

    def _may_be_cancelled(self) -> bool:
        """Whether nobody waits for it any more."""
        if self._cancelled:
            return True
        call = self._parents_call()
        return call is not None and self._simulation.oracle.may_have_ended(call)

    def _is_late(self) -> bool:
        """Whether its time is over, or that of the request that it is made for, or that has ended."""
        now = self._simulation.world.now()
        if self._timeout_us and now >= self._begun_ns + self._timeout_us * US:
            return True
        if self.parent is None:
            return False
        call = self._parents_call()
        return call is None or self._simulation.oracle.is_late(call, now)

    def _parents_call(self) -> Call | None:
        """The call for whose request this inquiry is made; None: no client waits for that."""
        return self._simulation.oracle.open.get(self.parent.number) if self.parent is not None else None

    def _may_be_refused(self, kind: Kind, text: str) -> bool:
        """Whether its model may have no room for it, or lose it."""
        simulation = self._simulation
        if simulation.demand.may_refuse(STEPS[kind.name], self._begun_ns, text):
            return True
        if simulation.graphics.explains(text, self._begun_ns):
            return True
        expires = any(level.timeout_us for level in kind.queue.levels)
        return bool(simulation.service_limit) or kind.bounded or expires or simulation.may_lose_workers(kind)


def may_ask(kind: Kind) -> bool:
    """Whether a worker may ask this model: one that does not wait for it in turn, and answers whatever it is asked."""
    return (
        bool(kind.weight)
        and not (kind.sequential or kind.lacks or kind.beside or kind.clumsy or kind.ushers or kind.fails_with)
        and not kind.shaped
        and not (kind.decoupled and kind.more)
        and not any(KINDS[name].asks for name in STEPS[kind.name])
    )
