"""Streams: each of them has one request in flight, which may have any number of responses."""

from __future__ import annotations

import itertools
import math
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import inferd_client.grpc as grpcclient
from inferd.server.tools.perf.measuring import Accounts, Interrupted, TimedRequest, Window
from inferd.server.tools.perf.plan import LoadPlan
from inferd.server.tools.perf.requests import Data, Model, Request, difference, tensors_of
from inferd.server.tools.reach import Reach
from inferd_client.driver.report import Latency, Report
from inferd_client.utils import InferenceServerException

UNKNOWN = 2  # gRPC's status for a response with an error text


class Streams:
    """Streams, each with a client of its own: a fixed number, or with a rate as many as the due requests need.

    With a rate, a due request waits if no stream is free, and its wait counts.

    Args:
        level: of streams, or requests per second.
    """

    def __init__(
        self,
        reach: Reach,
        plan: LoadPlan,
        model: Model,
        requests: Sequence[Request],
        data: Data,
        accounts: Accounts,
        level: float,
    ) -> None:
        first, last = plan.sequence_ids
        ids = itertools.cycle(range(first, last + 1))
        self._make = partial(Stream, reach, plan, model, requests, data, ids, random.Random(1), self._over, self._heard)
        self._accounts = accounts
        self._rate = level if plan.rate is not None else 0.0
        self._gaps = itertools.cycle(plan.gaps) if plan.gaps else None
        self._periods = plan.periods
        self._period = plan.period
        self._left = 0.0  # requests of the window that have not begun
        self._unready = 0  # requests of the period that lack answers
        self._scattered = plan.scattered
        self._most = plan.sequences if model.sequences else plan.most_in_flight
        self._chance = random.Random(2)
        self._quiet = threading.Condition()
        self._streams: list[Stream] = []
        self._free: deque[Stream] = deque()
        self._waiting: deque[float] = deque()  # when requests were due
        self._busy = 0
        self._ends = 0.0
        if not self._rate and self._periods is None:
            for _ in range(max(1, round(level))):
                self._free.append(self._another())

    def _another(self) -> Stream:
        made = self._make(len(self._streams))
        self._streams.append(made)
        return made

    def window(self, seconds: float, requests: int) -> Window:
        """See Load. The window ends with its last request."""
        if self._periods is not None:
            return self._measured(0.0, round(self._periods.last) if seconds else requests)
        found = self._measured(seconds, requests)
        while seconds and found.report.requests < requests and found.report.requests > found.report.lost:
            seconds = max(seconds, seconds * (requests - found.report.requests) / found.report.requests)
            found = self._measured(seconds, requests)
        return found

    def _measured(self, seconds: float, requests: int) -> Window:
        for each in self._streams:
            each.reset()
        before, cpu, started = self._accounts.look(), time.process_time(), time.perf_counter()
        self._ends = started + (seconds or math.inf)
        self._left = math.inf if seconds else requests

        def window() -> Window:
            ended = time.perf_counter()
            report = _report(self._streams, ended - started, time.process_time() - cpu)
            timed = tuple(each for stream in self._streams for each in stream.timed)
            return Window(report, self._accounts.look().since(before), timed, (int(started * 1e9), int(ended * 1e9)))

        try:
            if self._rate:
                self._pace(started)
            if self._periods is not None:
                self._add(round(self._periods.first))
            self._go_on()
            with self._quiet:
                self._quiet.wait_for(lambda: self._busy == 0)
                self._waiting.clear()  # no stream is left for these requests
        except KeyboardInterrupt:
            raise Interrupted(window()) from None
        return window()

    def _add(self, count: int) -> None:
        """Begin `count` more requests together, if so many are left."""
        with self._quiet:
            count = min(count, int(self._left))
            self._left -= count
            self._unready += count
            self._busy += count
            chosen = [self._free.popleft() if self._free else None for _ in range(count)]
        for each in chosen:
            (each or self._another()).send(time.perf_counter())

    def _heard(self, answers: int, over: bool) -> None:
        """A request has had `answers` responses, and is over or not. If that ends the period, more requests begin."""
        if self._periods is None or not (answers < self._period if over else answers == self._period):
            return
        with self._quiet:
            self._unready -= 1
            begins = self._unready == 0
        if begins:
            self._add(round(self._periods.step))

    def _pace(self, due: float) -> None:
        """Send requests when they are due, until the window's end."""
        while self._left > 0:
            if self._gaps is not None:
                due += next(self._gaps)
            else:
                due += self._chance.expovariate(self._rate) if self._scattered else 1 / self._rate
            if due >= self._ends:
                break
            self._left -= 1
            time.sleep(max(due - time.perf_counter(), 0.0))
            with self._quiet:
                stream = self._free.popleft() if self._free else None
                if stream is None and sum(not each.lost for each in self._streams) >= self._most:
                    self._waiting.append(due)
                    continue
                self._busy += 1
            (stream or self._another()).send(due)
        if self._left > 0:
            time.sleep(max(self._ends - time.perf_counter(), 0.0))

    def _go_on(self) -> None:
        """Have free streams send the remaining requests of the window."""
        now = time.perf_counter()
        with self._quiet:
            chosen = [each for each in self._free if self._goes_on(each, now)]
            for each in chosen:
                self._free.remove(each)
            self._busy += len(chosen)
        for each in chosen:
            each.send(now)

    def _over(self, stream: Stream) -> None:
        """A stream's request has ended, or the stream itself."""
        due = now = time.perf_counter()
        with self._quiet:
            if not stream.lost and self._waiting:
                due = self._waiting.popleft()
            elif stream.lost or not self._goes_on(stream, now):
                if not stream.lost:
                    self._free.append(stream)
                self._busy -= 1
                self._quiet.notify()
                return
        stream.send(due)

    def _goes_on(self, stream: Stream, now: float) -> bool:
        """Whether the stream's next request follows at once, and is counted. After the window's end only requests of an
        open sequence follow."""
        if self._rate or self._periods is not None or now >= self._ends or self._left <= 0:
            return stream.amid_sequence and (now >= self._ends or self._left <= 0)
        self._left -= 1
        return True

    def close(self) -> None:
        """End them."""
        for each in self._streams:
            each.close()


class Stream:
    """A stream: sends a request on demand, and calls back after the last response.

    Args:
        turn: the index of the stream's first request.
        ids, lengths: of sequences; all streams share them.
        over: called with the stream when its request has ended.
        heard: called at each response with the number of the request's responses, and once more with True at its end.

    Attributes:
        timed: the requests that have ended.
        statuses: how many of them had which status.
        wrong: how many of them had another response than the data expect.
        lost: whether the stream itself has ended.
    """

    def __init__(
        self,
        reach: Reach,
        plan: LoadPlan,
        model: Model,
        requests: Sequence[Request],
        data: Data,
        ids: Iterator[int],
        lengths: random.Random,
        over: Callable[[Stream], None],
        heard: Callable[[int, bool], None],
        turn: int,
    ) -> None:
        self._plan = plan
        self._model = model
        self._requests = requests
        self._expected = data.expected
        self._turn = turn - 1
        self._ids = ids
        self._lengths = lengths
        self._over = over
        self._heard = heard
        self._sequence = self._step = self._steps = 0
        self._due = 0.0
        self._answers: list[int] = []
        self._outputs: list[dict[str, Any]] = []
        self._wrong = ""
        self._pending = self._failed = False
        self._losing = threading.Lock()
        self.lost = False
        self.reset()
        self._client = reach.client()
        self._client.start_stream(self._told, headers=reach.metadata, compression_algorithm=plan.compression or None)

    def reset(self) -> None:
        """Forget the measurements."""
        self.timed: list[TimedRequest] = []
        self.statuses: Counter[int] = Counter()
        self.wrong = 0
        self.losses = 0
        self.sample = ""

    @property
    def amid_sequence(self) -> bool:
        """Whether the current sequence has further requests."""
        return self._step != self._steps

    def send(self, due: float) -> None:
        """Send the next request, which was due then."""
        self._turn += 1
        self._due = due
        self._answers, self._outputs = [], []
        self._wrong = ""
        self._failed = False
        self._pending = True
        inputs, outputs = self._requests[self._turn % len(self._requests)]
        place = self._place() if self._model.sequences else {}
        try:
            self._client.async_stream_infer(
                self._plan.model,
                inputs,
                self._plan.version,
                outputs,
                enable_empty_final_response=self._model.decoupled,
                parameters=dict(self._plan.parameters),
                **place,
            )
        except InferenceServerException as error:
            self._lose(error)

    def _place(self) -> dict[str, Any]:
        """The sequence arguments of the next request."""
        if not self.amid_sequence:
            least, most = (self._plan.sequence_length * (1 + way * self._plan.sequence_variation) for way in (-1, 1))
            self._steps = self._lengths.randint(max(1, int(least)), max(1, int(most)))
            self._sequence, self._step = next(self._ids), 0
        self._step += 1
        return {
            "sequence_id": self._sequence,
            "sequence_start": self._step == 1,
            "sequence_end": not self.amid_sequence,
        }

    def _told(self, result: grpcclient.InferResult | None, error: InferenceServerException | None) -> None:
        now = time.monotonic_ns()
        if not self._pending and (error is None or error.status() is None):
            return  # a further response, which is not expected
        final = not self._model.decoupled
        if error is not None:
            self.sample = self.sample or str(error)
            if error.status() is not None:
                self._lose(error)
                return
            self._failed = True
            self._step = self._steps  # the server has ended its sequence, too
        elif result is not None:
            if result.names:
                self._take(result, now)
            final = final or result.get_response().parameters["triton_final_response"].bool_param
        if final:
            turn, outputs = self._turn % len(self._requests), tuple(self._outputs)
            sequence = self._sequence if self._model.sequences else 0
            self.timed.append(TimedRequest(turn, int(self._due * 1e9), tuple(self._answers), now, sequence, outputs))
            self.statuses[UNKNOWN if self._failed else 0] += 1
            self.wrong += bool(self._wrong)
            self.sample = self.sample or self._wrong
            self._pending = False
            self._heard(len(self._answers), True)
            self._over(self)

    def _take(self, result: grpcclient.InferResult, now: int) -> None:
        """A response with tensors."""
        self._answers.append(now)
        self._heard(len(self._answers), False)
        if self._plan.listed and not self._plan.shared:
            self._outputs.append(tensors_of(result))
        if self._expected and len(self._answers) == 1:
            self._wrong = difference(result, self._expected[self._turn % len(self._requests)])

    def _lose(self, error: InferenceServerException) -> None:
        """The stream has ended, and with it the running request."""
        self.sample = self.sample or str(error)
        with self._losing:  # the sending thread and the callback may both find out; one reports the request
            pending, self._pending = self._pending, False
            if not self.lost:
                self.lost = True
                self._step = self._steps
        if pending:
            self.losses += 1
            self._over(self)

    def close(self) -> None:
        """End it."""
        self._client.close()


def _report(streams: Sequence[Stream], seconds: float, cpu: float) -> Report:
    """The report, in the driver's form."""
    ended = sorted(each.figures()["request_latency"] for stream in streams for each in stream.timed)
    lost = sum(each.losses for each in streams)
    statuses: Counter[int] = sum((each.statuses for each in streams), Counter())
    wrong = sum(each.wrong for each in streams)

    def at(share: float) -> float:
        return ended[min(len(ended) - 1, int(share * len(ended)))] if ended else 0.0

    mean = sum(ended) / len(ended) if ended else 0.0
    latency = Latency(mean, at(0.5), at(0.9), at(0.95), at(0.99), at(0.999), ended[-1] if ended else 0.0)
    histogram = sorted(Counter(float(f"{value:.3g}") for value in ended).items())
    return Report(
        requests=len(ended) + lost,
        answered=len(ended),
        cancelled=0,
        reset=0,
        lost=lost,
        correct=statuses[0] - wrong,
        deadlines=0,
        statuses=dict(statuses),
        wrong={"bytes": wrong} if wrong else {},
        samples=[each.sample for each in streams if each.sample][:1],
        seconds=seconds,
        rate=len(ended) / seconds if seconds else 0.0,
        bytes_sent=0,
        bytes_received=0,
        driver_cpu_seconds=cpu,
        latency=latency,
        histogram=histogram,
    )
