"""Traces of requests: which of them there are, and what they say, judged by what clients have sent and got.

The recorder gives its records to nobody but this module, which looks at each: every request that has to have a record
has one, none has two, and what a record says of its request is so.
"""

from __future__ import annotations

import re
from collections import Counter
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

import inferd._native.request.recorder
from inferd._native.request.recorder import RecorderHandle, SamplingHandle
from tests.simulation.ages import ENDS
from tests.simulation.kinds import KINDS
from tests.simulation.wire import Violation

if TYPE_CHECKING:
    from tests.simulation.clients import Call
    from tests.simulation.models import Version
    from tests.simulation.simulation import Simulation

Record = dict[str, Any]

SHARE = 0.12  # of simulations that have traces
EACH = 24  # requests that end, until somebody takes the records
MS = 1_000_000
RESET, CANCELLED, LATE, EXHAUSTED, UNAVAILABLE = 100, 1, 4, 8, 14
COURSE = ("arrived", "queued", "placed", "taken", "input_end", "output_start")  # of a request, in this order
MOST_TENSOR = 1 << 20  # bytes of one that is kept
CROWD = 1 << 31  # numbers of requests of a crowd
FEW = 1000  # calls of a crowd, with more of which there are more records than somebody takes
BAGGAGE = "team=blue,run=7"


REST = r"-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
GOOD = re.compile(rf"00{REST}|(?!00|ff)[0-9a-f]{{2}}{REST}(-.*)?")
BAD_BAGGAGE = ("", 'a="b"', "a=b\\c")


def malformed(trace: str, span: str) -> tuple[str, ...]:
    """What is no traceparent, or one of a later version."""
    good = f"00-{trace}-{span}-01"
    return (
        "",
        "00-0-0-01",
        f"ff-{trace}-{span}-01",
        f"0x-{trace}-{span}-01",
        f"00_{trace}-{span}-01",
        f"00-{trace}_{span}-01",
        f"00-{trace}-{span}_01",
        f"00-{trace[:-1]}g-{span}-01",
        f"00-{trace}-{span[:-1].upper()}G-01",
        f"00-{trace}-{span}-0/",
        f"00-{'0' * 32}-{span}-01",
        f"00-{trace}-{'0' * 16}-01",
        f"{good}-more",
        f"01{good[2:]}",
        f"cc{good[2:]}-more",
        f"01{good[2:]}more",
    )


def joins(said: str) -> bool:
    """Whether a header names a trace."""
    return GOOD.fullmatch(said) is not None


def is_sampled(said: str) -> bool:
    """Whether its trace is one that is kept."""
    return int(said[53:55], 16) % 2 == 1


class Traces:
    """The recorder of a simulation, and what is owed of it.

    Attributes:
        on: there is one.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._random = random = Random(f"{simulation.outcome.seed} traces")
        scale = simulation.scale
        self.on = simulation.has("traces", SHARE, when=scale.traces and scale.crowd <= FEW)
        self._ended: dict[int, tuple[Call, int | None]] = {}  # requests without a record yet, with their statuses
        self._early: dict[int, Record] = {}  # of requests that their clients take for open
        self._seen: set[int] = set()  # requests that have a record
        self._spans: dict[int, Record] = {}  # what is known of every span, by its number
        self._batches: dict[int, Counter[str]] = {}
        self._counts: Counter[tuple[str, str]] = Counter()  # requests by whose sampling it was, and what became of it
        self._changed_ns = 0
        self._changes = 0
        self._since = 0
        if not self.on:
            return
        world = simulation.world
        inferd._native.request.recorder.time = SimpleNamespace(time_ns=world.now)  # type: ignore[attr-defined]
        self._is_restless = random.random() < 0.4
        self._recorder = RecorderHandle()
        self._own: dict[str, SamplingHandle] = {}
        self._owners = {name for name in sorted(KINDS) if random.random() < 0.2}  # models with a sampling of their own
        self._rates: dict[str, tuple[int, int]] = {}  # of the server ("") and of models: rate, and traces at most
        self._set()
        simulation.service.record(self._recorder)

    # -- settings

    def _set(self) -> None:
        """Draw the settings."""
        random, recorder = self._random, self._recorder
        self._tensors = random.random() < 0.5
        self._rates[""] = self._draw_rate()
        rate, count = self._rates[""]
        recorder.sample(on=True, tensors=self._tensors, rate=rate, count=count)
        for name, handle in self._own.items():
            self._set_own(name, handle)
        self._access_rate = random.choice((0, 1, 1, 5))
        self._slow_ns = random.choice((0, 0, 1, 3 * MS))
        self._log_slow_ns = random.choice((0, 0, 2 * MS))
        recorder.keep(access_rate=self._access_rate, slow_ns=self._slow_ns, log_slow_ns=self._log_slow_ns)
        self._is_on = self._changes == 0 or random.random() < 0.7
        recorder.switch(self._is_on)
        self._changed_ns = self._simulation.world.now()
        self._changes += 1

    def _draw_rate(self) -> tuple[int, int]:
        return self._random.choice((0, 1, 1, 1, 3, 10)), self._random.choice((-1, -1, -1, 20))

    def _set_own(self, name: str, handle: SamplingHandle) -> None:
        rate, count = self._rates[name] = self._draw_rate()
        handle.set(on=True, tensors=self._tensors, rate=rate, count=count)

    def loaded(self, version: Version) -> None:
        """A version is about to serve."""
        name = version.kind.name
        if not self.on or name not in self._owners:
            return
        if name not in self._own:
            self._own[name] = SamplingHandle()
            self._set_own(name, self._own[name])
        self._recorder.assign(version.loaded.lane, self._own[name])

    # -- clients

    def headers(self, random: Random) -> tuple[tuple[str, str], ...]:
        """The headers by which a client says to which trace its call belongs."""
        if not self.on or random.random() < 0.7:
            return ()
        trace, span = random.randrange(1, 1 << 128), random.randrange(1, 1 << 64)
        said = [("traceparent", f"00-{trace:032x}-{span:016x}-{random.choice((0, 1)):02x}")]
        if random.random() < 0.5:
            said.append(("baggage", BAGGAGE))
        if random.random() < 0.1:
            said[0] = ("traceparent", random.choice(malformed(f"{trace:032x}", f"{span:016x}")))
        if random.random() < 0.05 and len(said) > 1:
            said[1] = ("baggage", random.choice(BAD_BAGGAGE))
        return tuple(said)

    def ended(self, call: Call, *, answered: bool) -> None:
        """A request is over for its client."""
        if not self.on:
            return
        number = call.number
        if call.talk is not None:
            status = 0 if answered else None  # of a failure only the text is known
        else:
            status = self._simulation.oracle.status(call) if answered else None
        if number in self._early:
            self._judge(call, status, self._early.pop(number))
        elif number not in self._seen:
            self._ended[number] = (call, status)
        self._since += 1
        if self._since >= EACH:
            self._since = 0
            self._take()
            if self._is_restless and self._random.random() < 0.3:
                self._set()

    # -- judging

    def _take(self) -> None:
        for record in self._recorder.take():
            self._check_course(record)
            self._spans[record["number"]] = {
                key: record[key]
                for key in (
                    "trace_id",
                    "span_id",
                    "parent",
                    "parent_id",
                    "arrived",
                    "inner",
                    "traced",
                    "link",
                    "status",
                )
            }
            if record["batch"]:
                self._note_batch(record)
            if record["inner"]:
                self._check_inner(record)
            else:
                self._match(record)
        if self._recorder.lost:
            raise Violation(f"{self._recorder.lost} records were lost, and somebody takes them")

    def _match(self, record: Record) -> None:
        """Find whose it is."""
        if record["traced"] and not record["joined"]:
            self._counts[self._whose(record), "traced"] += 1
        if not record["joined"]:
            self._counts[self._whose(record), "all"] += 1
        if not record["request_id"].isdecimal():
            return  # what cannot be decoded has no id
        number = int(record["request_id"])
        if number in self._seen:
            raise Violation(f"request {number} has two records")
        self._seen.add(number)
        if number >= CROWD:
            return  # who asks much for little keeps nothing to compare it with
        if number in self._ended:
            call, status = self._ended.pop(number)
            self._judge(call, status, record)
        else:
            self._early[number] = record

    def _whose(self, record: Record) -> str:
        """The sampling that has decided: the model's, if it has been found."""
        return record["model"] if record["version"] and record["model"] in self._own else ""

    def _check_course(self, record: Record) -> None:
        """Check that the steps of a request come one after the other."""
        times = [record[name] for name in COURSE if record[name]]
        if times != sorted(times) or record["ended"] < record["arrived"]:
            raise Violation(f"the course of request '{record['request_id']}' of '{record['model']}': {record}")
        if record["looked"] and not record["arrived"] <= record["looked"] <= record["found"] <= record["ended"]:
            raise Violation(f"the look-up of request '{record['request_id']}' of '{record['model']}': {record}")

    def _judge(self, call: Call, status: int | None, record: Record) -> None:
        """Judge the record of a client's request."""
        kind = call.kind
        if call.wrong:
            for tensor in record["tensors"][0] if record["tensors"] else ():
                self._check_tensor(call, tensor, call.x)  # as far as it was right
            return
        method = "ModelInfer" if call.talk is None else "ModelStreamInfer"
        told = (record["model"], record["method"], record["received"], record["peer"])
        expected = (kind.name, method, call.size, call.address)
        if told != expected:
            raise Violation(f"{call}: its record is of {told}, not {expected}")
        # the end of an old connection takes its calls from the server as the client's own leaving does
        is_cut = (call.stream.trailers or {}).get("grpc-message") in ENDS
        is_cut = is_cut or (self._simulation.by_python and status == LATE)  # so does the end of a handler in Python
        if status is not None and status < RESET and not (is_cut or self._agree(record["status"], status)):
            raise Violation(f"{call}: status {status}, and its record says {record['status']}: {record['error']}")
        self._check_context(call, record)
        if self._changed_ns < call.opened_ns:
            self._check_choice(call, record)
        if status == 0:
            self._check_success(call, record)
        if record["tensors"] is not None:
            self._check_tensors(call, status, *record["tensors"])

    def _agree(self, recorded: int, status: int) -> bool:
        """Whether that may have become of a request: it was cancelled when there was no room for its client."""
        if status == EXHAUSTED and (self._simulation.is_faulty or self._simulation.held_limit):
            return recorded in (CANCELLED, EXHAUSTED, UNAVAILABLE)  # or its time was over then
        return recorded == status

    def _check_context(self, call: Call, record: Record) -> None:
        """The trace is its client's, if that has named one."""
        said = dict(call.headers).get("traceparent", "")
        joined = joins(said)
        if record["joined"] != joined:
            raise Violation(f"{call}: its trace joins '{said}': {record['joined']}")
        if joined and f"-{record['trace_id']}-{record['parent_id']}-" != said[2:53]:
            raise Violation(f"{call}: its trace is {record['trace_id']} below {record['parent_id']}, not {said}")

    def _check_choice(self, call: Call, record: Record) -> None:
        """Check that the call has a record for a reason."""
        took = record["ended"] - record["arrived"]
        said = dict(call.headers).get("traceparent", "")
        if record["joined"] and record["traced"] != is_sampled(said):
            raise Violation(f"{call}: its trace is kept: {record['traced']}, and its client has said {said}")
        is_slow = self._slow_ns > 0 and (record["status"] != 0 or took > self._slow_ns)
        if record["kept"] != (record["traced"] or is_slow):
            raise Violation(f"{call}: its trace is kept: {record['kept']}, it took {took} ns: {record}")
        is_late = 0 < self._log_slow_ns < took
        if not (record["kept"] or record["accessed"] or is_late):
            raise Violation(f"{call}: it has a record, and nobody wants one: {record}")

    def _check_success(self, call: Call, record: Record) -> None:
        """Check the record of a request that has a response."""
        kind = call.kind
        if record["version"] != 1 or record["rows"] != (1 if kind.flat else len(call.x)):
            raise Violation(f"{call}: {record['rows']} rows of version {record['version']} in its record")
        responses = len(call.x) if kind.decoupled else 1
        if record["responses"] != responses:
            raise Violation(f"{call}: {record['responses']} responses in its record, not {responses}")
        if (record["cached"] and not kind.caches) or (record["shared"] and not kind.reuses):
            raise Violation(f"{call}: cached {record['cached']}, shared {record['shared']}")
        if not (kind.text or kind.decoupled or kind.beside or call.classes or call.region or call.lost):
            sent = len(kind.encoded(call.expected)) * len(call.wanted)
            if record["sent"] != sent:
                raise Violation(f"{call}: {record['sent']} bytes are sent in its record, not {sent}")
        executes = not (kind.steps or kind.splits or kind.reuses)
        if executes and not (record["batch"] and record["instance"].startswith(kind.name[:8])):
            raise Violation(f"{call}: batch {record['batch']} of instance '{record['instance']}' in its record")

    def _check_tensors(self, call: Call, status: int | None, inputs: list[Record], outputs: list[Record]) -> None:
        """Check that the tensors in the record are those that were sent."""
        if call.lost or (call.sequence is not None and call.sequence.broken):
            return
        kind = call.kind
        for tensor in inputs:
            if tensor["name"] == "w":
                self._check_beside(call, tensor)
                continue
            if tensor["name"] == "s":
                values = np.array(kind.shape_values(call.question), np.int32).tobytes()
                if tensor["data"] not in (None, values) or tensor["datatype"] != "INT32":
                    raise Violation(f"{call}: s is {tensor} in its record, not {values!r}")
                continue
            self._check_tensor(call, tensor, call.x)
        if status == 0 and not (kind.decoupled or call.classes or call.region):
            for tensor in outputs:
                expected = call.expected
                if tensor["name"] == "v":
                    self._check_beside(call, tensor)
                    continue
                if tensor["name"] != "y":
                    expected = call.x.copy()
                    expected[:, 1:] *= kind.factors(call.question)[tensor["name"]]
                self._check_tensor(call, tensor, expected)

    @staticmethod
    def _check_beside(call: Call, tensor: Record) -> None:
        """Check the tensor that is as its client gave it, or the model's that stands for one that was not given."""
        beside = call.kind.beside
        assert beside is not None
        shape, data = beside.lacking(len(call.x), not call.kind.flat)
        if call.given is not None:
            shape, data = call.given.shape, call.given.data
        told = tensor["datatype"], tuple(tensor["shape"]), tensor["data"]
        if told[:2] != (beside.datatype, shape) or told[2] not in (None, data):
            raise Violation(f"{call}: {tensor['name']} is {told} in its record, not {shape} {data!r}")

    @staticmethod
    def _check_tensor(call: Call, tensor: Record, expected: np.ndarray) -> None:
        data, shape = tensor["data"], tuple(tensor["shape"])
        if shape != expected.shape or tensor["datatype"] != call.kind.datatype:
            raise Violation(f"{call}: {tensor['name']} is {tensor['datatype']} {shape} in its record")
        if data is None and expected.nbytes <= MOST_TENSOR and not call.kind.text:
            raise Violation(f"{call}: {tensor['name']} of {expected.nbytes} bytes is not in its record")
        if data is not None and data != call.kind.encoded(expected):
            raise Violation(f"{call}: {tensor['name']} is {data[:80]!r} in its record")

    def _check_inner(self, record: Record) -> None:
        """Check a record of a step, of an execution that several requests wait for, or of a worker's call."""
        if record["model"] not in self._simulation.kinds and record["model"] != "nobody":
            raise Violation(f"a request to '{record['model']}' on behalf of another: {record}")

    def _note_batch(self, record: Record) -> None:
        """Requests of one batch say the same of it, and have its rows."""
        kind = KINDS[record["model"]]
        known = self._batches.setdefault(
            record["batch"], Counter(rows=record["batch_rows"], requests=record["batch_requests"])
        )
        known["have rows"] += record["rows"]
        known["have requests"] += 1
        told = (record["batch_rows"], record["batch_requests"])
        if told != (known["rows"], known["requests"]) or known["have requests"] > known["requests"]:
            raise Violation(f"batch {record['batch']} has {dict(known)}, and {record}")
        if not kind.sequence and (
            known["have rows"] > known["rows"]
            or (known["have requests"] == known["requests"] and known["have rows"] != known["rows"])
        ):
            raise Violation(f"batch {record['batch']} has {dict(known)}, and {record}")

    def end(self) -> None:
        """All is over, and every record has been taken.

        Raises:
            Violation: a request has none that has to have one, or a record is of nobody.
        """
        if not self.on:
            return
        self._take()
        if self._early:
            raise Violation(f"records of requests that are not over: {sorted(self._early)}")
        if self._simulation.is_faulty:
            return
        for call, status in self._ended.values():
            if self._must_have(call, status):
                raise Violation(f"{call}: it has status {status}, and no record")
        for number, span in self._spans.items():
            self._check_parent(number, span)
        self._check_links()
        if self._changes == 1 and self._access_rate == 1 and not self._simulation.demand.on:
            self._check_rates()

    def _must_have(self, call: Call, status: int | None) -> bool:
        """Whether it is sure that it was chosen, by settings that did not change."""
        number, kind = call.number, call.kind
        executed = not kind.reuses and (kind.name, number) in self._simulation.executions.count
        if call.wrong or not (status == 0 or executed):
            return False
        if self._changed_ns >= call.opened_ns or not self._is_on:
            return False
        said = dict(call.headers).get("traceparent", "")
        if joins(said):
            return is_sampled(said) or self._access_rate == 1
        whose = [kind.name if kind.name in self._own else ""]
        if self._simulation.demand.on:
            whose.append("")  # of a model that is not there yet nobody knows a sampling
        return self._access_rate == 1 or all(self._rates[name] == (1, -1) for name in whose)

    def _check_parent(self, number: int, span: Record) -> None:
        """A span is below another one of the same trace, which began before."""
        above = self._spans.get(span["parent"]) if span["inner"] else None
        if span["inner"] and span["traced"] and above is None:
            raise Violation(f"span {number} is below {span['parent']}, which there is not")
        if above is None:
            return
        told = (span["trace_id"], span["parent_id"])
        if told != (above["trace_id"], above["span_id"]) or span["arrived"] < above["arrived"]:
            raise Violation(f"span {number}, {span}, is below {above}")

    def _check_links(self) -> None:
        """A request that has shared an execution names that which has answered it."""
        inner = {(span["trace_id"], span["span_id"]): span for span in self._spans.values() if span["inner"]}
        for number, span in self._spans.items():
            if span["link"] is None:
                continue
            linked = inner.get(span["link"])
            if linked is not None and span["status"] == 0 and linked["status"] != 0:
                raise Violation(f"span {number}, {span}, shares an execution, which is {linked}")

    def _check_rates(self) -> None:
        """So many of all requests were traced as the settings say: all have records, for the log."""
        for whose, (rate, count) in self._rates.items():
            traced, requests = self._counts[whose, "traced"], self._counts[whose, "all"]
            expected = 0 if rate == 0 else requests // rate if count < 0 else min(requests // rate, count)
            if traced != expected:
                raise Violation(f"{traced} of {requests} requests of '{whose}' are traced: one of {rate}, {count}")
