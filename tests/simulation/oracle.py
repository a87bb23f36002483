"""What a server owes its clients, judged from what they sent and got, and from what models were asked to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from server.pb import grpc_service_pb2 as pb
from tests.simulation.models import KINDS
from tests.simulation.wire import Violation

if TYPE_CHECKING:
    from tests.simulation.clients import Call
    from tests.simulation.simulation import Simulation

OK, INVALID, LATE, NOT_FOUND, EXHAUSTED, INTERNAL, UNAVAILABLE = 0, 3, 4, 5, 8, 13, 14
MS = 1_000_000
GRAIN = MS  # that an outcome may come behind its deadline, beside all that the loop has to do
SLACK = MS // 10  # that a batch may come behind its delay when nobody has anything to do
ENHANCE_YOUR_CALM = 11
RESET = 100  # and the code of RST_STREAM: in place of a status


class Oracle:
    """Of one simulation."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.away: dict[str, list[tuple[int, int]]] = {}  # when a model was not there, by name
        self.open: dict[int, Call] = {}
        self.order: dict[tuple[int, int, str, int], int] = {}
        self.over: dict[str, int] = {}  # calls, by model, however they ended
        self.since: dict[str, int] = {}  # the version of a model that serves

    # -- models come and go --

    def loaded(self, name: str) -> None:
        self.since[name] = self.simulation.world.now()
        if self.away.get(name):
            since, _ = self.away[name][-1]
            self.away[name][-1] = (since, self.simulation.world.now())

    def unloaded(self, name: str) -> None:
        self.away.setdefault(name, []).append((self.simulation.world.now(), 1 << 62))

    def _was_away(self, call: Call) -> bool:
        now = self.simulation.world.now()
        return any(since <= now and until >= call.opened_ns for since, until in self.away.get(call.kind.name, ()))

    # -- calls --

    def waiting(self) -> str:
        return ", ".join(f"{call}" for call in self.open.values())

    @staticmethod
    def status(call: Call) -> int:
        stream = call.stream
        return int((stream.trailers or {}).get("grpc-status", "99")) if stream.reset is None else RESET + stream.reset

    def begun(self, call: Call) -> None:
        """The answer of a call begins to come: in the order of the calls, where that is promised."""
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
        if status == OK:
            self._check_answer(call)
        elif call.stream.data and status < RESET:
            raise Violation(f"{call}: status {status} after {len(call.stream.data)} bytes of an answer")
        elif not self._may(call, status, text, now):
            raise Violation(f"{call}: status {status} '{text}'")
        if (
            call.deadline_ns >= 0
            and call.client.temper.prompt
            and not simulation.is_faulty
            and now > max(call.opened_ns + call.deadline_ns, call.sent_ns) + GRAIN
        ):
            late = (now - call.opened_ns - call.deadline_ns) // 1000
            raise Violation(f"{call}: status {status} {late} us after its deadline")

    def _may(self, call: Call, status: int, text: str, now: int) -> bool:
        simulation = self.simulation
        kind = call.kind
        if status == LATE:
            return call.deadline_ns >= 0 and now >= call.opened_ns + call.deadline_ns
        if status == UNAVAILABLE and text.startswith("Exceeds maximum queue size: the server"):
            return bool(simulation.service_limit)
        if status == UNAVAILABLE and text.startswith("Exceeds maximum queue size"):
            return kind.bounded
        if status == UNAVAILABLE and text.startswith("Request timeout expired"):
            level = kind.queue.levels[call.level - 1] if len(kind.queue.levels) >= call.level else kind.queue.levels[0]
            return level.timeout_us > 0 and not level.yields and now >= call.opened_ns + level.timeout_us * 1000
        if status in (UNAVAILABLE, NOT_FOUND) and ("unknown model" in text or (not text and simulation.is_faulty)):
            return self._was_away(call) or (not text and status == UNAVAILABLE)
        if status == INTERNAL and kind.fails:
            return call.number in simulation.executions.failed
        if status == INVALID and call.client.sequence_may_end(call):
            return True
        if simulation.is_faulty:
            return status in (EXHAUSTED, INTERNAL, UNAVAILABLE) or status > RESET
        if status == EXHAUSTED or status == RESET + ENHANCE_YOUR_CALM:
            return bool(simulation.held_limit)
        return False

    def _check_answer(self, call: Call) -> None:
        data = bytes(call.stream.data)
        if len(data) < 5 or data[0] != 0 or int.from_bytes(data[1:5], "big") != len(data) - 5:
            raise Violation(f"{call}: not one message, but {data[:20]!r}")
        response = pb.ModelInferResponse.FromString(data[5:])
        if response.id != str(call.number) or response.model_name != call.kind.name:
            raise Violation(f"{call}: the answer of request '{response.id}' of model '{response.model_name}'")
        if [output.name for output in response.outputs] != ["y"]:
            raise Violation(f"{call}: outputs {[output.name for output in response.outputs]}")
        y = np.frombuffer(response.raw_output_contents[0], np.int64)
        if tuple(response.outputs[0].shape) != call.x.shape or y.size != call.x.size:
            raise Violation(f"{call}: shape {list(response.outputs[0].shape)}, {y.size} numbers")
        if call.sequence is not None and call.sequence.broken:
            return
        if not np.array_equal(y.reshape(call.x.shape), call.expected):
            raise Violation(f"{call}: {y[:6]} where {call.expected.reshape(-1)[:6]} was expected")
        kind = call.kind
        if kind.style.startswith("native") or kind.steps or kind.reuses:
            return
        times = self.simulation.executions.count.get((kind.name, call.number), 0)
        if times != 1 and not kind.splits:
            raise Violation(f"{call}: answered, and executed {times} times")
        if kind.fails and (call.x < 0).any():
            raise Violation(f"{call}: its execution failed, and it has an answer")

    # -- the server --

    def rest(self) -> None:
        """Nothing can go on before time passes: no instance is idle beside work that it may do."""
        simulation = self.simulation
        now = simulation.world.now()
        if simulation.is_faulty:
            return
        for version in (*simulation.versions.values(), *simulation.leaving):
            delay = version.kind.delay_us
            if delay is None or not version.count:
                continue
            pending = version.loaded.lane.pending
            waiting = (pending, version.backend.executed, self.over.get(version.kind.name, 0))
            if pending == 0 or simulation.world.idle(version.prefix) == 0:
                version.idle_since = 0
            elif delay and (version.idle_since == 0 or waiting != version.waiting):
                version.idle_since = now
            elif not delay or now - version.idle_since > delay * 1000 + SLACK:
                idle = simulation.world.idle(version.prefix)
                raise Violation(f"{version.prefix}: {pending} requests wait beside {idle} idle instances")
            version.waiting = waiting

    def end(self) -> None:
        """All is over: nothing is held, nothing was executed for nobody."""
        simulation = self.simulation
        endpoint = simulation.endpoint
        if not endpoint.ledger_agrees():
            raise Violation("the sums of the ledger do not agree")
        if endpoint.held:
            raise Violation(f"the server holds {endpoint.held} bytes of nobody: {endpoint.ledger}")
        if simulation.service.in_house:
            raise Violation(f"{simulation.service.in_house} requests are in the house, and nobody has asked")
        for use in simulation.uses:
            if use.bytes_held or use.calls:
                raise Violation(f"'{use.name}' is charged {use.bytes_held} bytes and {use.calls} calls")
        for (name, number), times in simulation.executions.count.items():
            if times > 1 and not KINDS[name].splits and not KINDS[name].reuses:
                raise Violation(f"request {number} was executed {times} times by model '{name}'")
