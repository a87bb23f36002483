"""Streams: each of them has one request in flight, which may have any number of answers."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import inferd_client.grpc as grpcclient
from inferd_client.driver.report import Latency, Report
from server.tools.perf.measuring import Accounts, Window
from server.tools.perf.plan import LoadPlan
from server.tools.perf.requests import Model, Tensors, inputs_of
from server.tools.reach import Reach


class Streams:
    """So many streams, each of a client of its own."""

    def __init__(
        self, reach: Reach, plan: LoadPlan, model: Model, tensors: Sequence[Tensors], accounts: Accounts, level: float
    ) -> None:
        self._accounts = accounts
        requests = [inputs_of(model, each) for each in tensors]
        lengths = random.Random(1)
        first, last = plan.sequence_ids
        ids = itertools.cycle(range(first, last + 1))
        self._streams = [Stream(reach, plan, model, requests, i, ids, lengths) for i in range(max(1, round(level)))]

    def window(self, seconds: float, requests: int) -> Window:  # noqa: ARG002 - streams end their requests
        """See Load; it ends when the requests that are under way have."""
        before, cpu, started = self._accounts.look(), time.process_time(), time.perf_counter()
        for each in self._streams:
            each.begin(started + seconds)
        for each in self._streams:
            each.idle.wait()
        elapsed, cpu = time.perf_counter() - started, time.process_time() - cpu
        ended = sorted(value for each in self._streams for value in each.whole)
        first = tuple(value for each in self._streams for value in each.first)
        between = tuple(value for each in self._streams for value in each.between)
        failed = sum(each.failed for each in self._streams)
        return Window(_report(ended, failed, elapsed, cpu), self._accounts.look().since(before), first, between)

    def close(self) -> None:
        """End them."""
        for each in self._streams:
            each.close()


class Stream:
    """A stream that sends the next request when the one before is answered to its end.

    Args:
        turn: the request to begin with.
        ids, lengths: of sequences, for all streams.
    """

    def __init__(
        self,
        reach: Reach,
        plan: LoadPlan,
        model: Model,
        requests: Sequence[Any],
        turn: int,
        ids: Iterator[int],
        lengths: random.Random,
    ) -> None:
        self.idle = threading.Event()
        self._plan = plan
        self._model = model
        self._requests = requests
        self._turn = turn
        self._ids = ids
        self._lengths = lengths
        self._sequence = self._step = self._steps = 0
        self._ends = self._sent = self._last = 0.0
        self._reset()
        self._client = reach.client()
        self._client.start_stream(self._told, headers=reach.metadata, compression_algorithm=plan.compression or None)

    def _reset(self) -> None:
        self.whole: list[float] = []
        self.first: list[float] = []
        self.between: list[float] = []
        self.failed = 0

    def begin(self, ends: float) -> None:
        """Send requests until then."""
        self._reset()
        self._ends = ends
        self.idle.clear()
        self._send()

    def _send(self) -> None:
        self._turn += 1
        self._sent = time.perf_counter()
        self._last = 0.0
        self._client.async_stream_infer(
            self._plan.model,
            self._requests[self._turn % len(self._requests)],
            self._plan.version,
            enable_empty_final_response=self._model.decoupled,
            **(self._place() if self._model.sequences else {}),
        )

    def _place(self) -> dict[str, Any]:
        """Of the next request, in a sequence."""
        if self._step == self._steps:
            least, most = (self._plan.sequence_length * (1 + way * self._plan.sequence_variation) for way in (-1, 1))
            self._steps = self._lengths.randint(max(1, int(least)), max(1, int(most)))
            self._sequence, self._step = next(self._ids), 0
        self._step += 1
        return {
            "sequence_id": self._sequence,
            "sequence_start": self._step == 1,
            "sequence_end": self._step == self._steps,
        }

    def _told(self, result: grpcclient.InferResult | None, error: Exception | None) -> None:
        now = time.perf_counter()
        if error is not None:
            self.failed += 1
            self._step = self._steps  # the server has ended its sequence, too
            if self._model.decoupled:
                return  # its end follows
        elif result is not None and result.names:
            if self._last:
                self.between.append((now - self._last) * 1e6)
            else:
                self.first.append((now - self._sent) * 1e6)
            self._last = now
        if self._model.decoupled and not (
            result is not None and result.get_response().parameters["triton_final_response"].bool_param
        ):
            return
        self.whole.append((now - self._sent) * 1e6)
        if now < self._ends or self._step != self._steps:
            self._send()
        else:
            self.idle.set()

    def close(self) -> None:
        """End it."""
        self._client.close()


def _report(ended: Sequence[float], failed: int, seconds: float, cpu: float) -> Report:
    """As the driver has it."""

    def at(share: float) -> float:
        return ended[min(len(ended) - 1, int(share * len(ended)))] if ended else 0.0

    mean = sum(ended) / len(ended) if ended else 0.0
    latency = Latency(mean, at(0.5), at(0.9), at(0.95), at(0.99), at(0.999), ended[-1] if ended else 0.0)
    histogram = sorted(Counter(float(f"{value:.3g}") for value in ended).items())
    return Report(
        requests=len(ended),
        answered=len(ended),
        cancelled=0,
        reset=0,
        lost=0,
        correct=len(ended) - failed,
        deadlines=0,
        statuses={0: len(ended) - failed, **({2: failed} if failed else {})},
        wrong={},
        samples=[],
        seconds=seconds,
        rate=len(ended) / seconds,
        bytes_sent=0,
        bytes_received=0,
        driver_cpu_seconds=cpu,
        latency=latency,
        histogram=histogram,
    )
