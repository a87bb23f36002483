"""One level of load: windows until they agree, with the server's statistics of them."""

from __future__ import annotations

import os
import socket
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from inferd.server.tools.perf.plan import LoadPlan
from inferd.server.tools.perf.requests import Model, tensors_of
from inferd.server.tools.reach import Reach
from inferd_client._calling import ENCODINGS, STATUSES
from inferd_client.driver import Driver, Fixed, Sequences, Workload
from inferd_client.driver.report import Report
from inferd_client.grpc import InferResult
from inferd_client.utils import InferenceServerException

BUSY = 0.9
"""Above this share of a core, the driver itself may have been too slow."""
AGREEING = 3  # windows
PERCENTILES = (50, 90, 95, 99, 99.9)


@dataclass(frozen=True, slots=True)
class Account:
    """The server's statistics of a model so far: counts and nanoseconds."""

    requests: int = 0
    executions: int = 0
    inferences: int = 0
    times: Mapping[str, int] = field(default_factory=dict)  # queue, input, compute, output
    cpu: float = 0.0  # seconds of the server's process; 0: not known

    def since(self, before: Account) -> Account:
        """The difference to earlier statistics."""
        return Account(
            self.requests - before.requests,
            self.executions - before.executions,
            self.inferences - before.inferences,
            {name: ns - before.times.get(name, 0) for name, ns in self.times.items()},
            self.cpu - before.cpu,
        )


PARTS = {"queue": "queue", "input": "compute_input", "compute": "compute_infer", "output": "compute_output"}
"""Parts of a request's time in the server, and the fields of InferStatistics that have them."""


class TimedRequest(NamedTuple):
    """A request and its responses; times in nanoseconds of the monotonic clock.

    Attributes:
        turn: the number of its tensors among those of the load.
        due: when it was, or should have been, sent.
        answers: when each response with tensors came; of a unary call there is one.
        ended: when the last response, which may be empty, came.
        sequence: the id of the request's sequence; 0: it has none.
        outputs: the tensors of each response by name, if they are kept.
    """

    turn: int
    due: int
    answers: tuple[int, ...]
    ended: int
    sequence: int = 0
    outputs: tuple[Mapping[str, Any], ...] = ()

    def figures(self) -> dict[str, float]:
        """The figures of GOODPUT, in microseconds."""
        found = {"request_latency": (self.ended - self.due) / 1e3}
        if self.answers:
            found["time_to_first_token"] = (self.answers[0] - self.due) / 1e3
        if len(self.answers) > 1:
            found["inter_token_latency"] = (self.answers[-1] - self.answers[0]) / 1e3 / (len(self.answers) - 1)
        return found

    def between(self) -> Iterator[float]:
        """Microseconds from response to response."""
        for one, next_one in zip(self.answers, self.answers[1:], strict=False):
            yield (next_one - one) / 1e3


@dataclass(slots=True)
class Level:
    """The results of a level; times in microseconds.

    Attributes:
        model: the measured model.
        level: requests in flight, or requests per second that were due.
        stable: whether the last windows agreed.
        errors: by gRPC status.
        server: time of a request in each part of the server's work; empty if the server does not tell.
        batch: rows of an execution; 0: not known.
        histogram: (bound, calls), only buckets that have some.
        sample: the text of one error.
        time_to_first_token, inter_token_latency: of streams: from a request to its first response, and from response to
            response.
        output_token_throughput: of streams: responses per second.
        goodput: requests per second within all limits of the plan; None: there are none.
        timed: each request, if the plan lists them.
        boundaries: the beginnings and ends of the windows, in nanoseconds of the monotonic clock.
    """

    model: str
    level: float
    kind: str
    stable: bool
    windows: int
    seconds: float
    requests: int
    rate: float
    inferences: float
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    p999: float
    max: float
    errors: dict[str, int]
    server: dict[str, float]
    batch: float
    client_cpu: float
    server_cpu: float
    driver_busy: bool
    histogram: list[tuple[float, int]]
    sample: str = ""
    time_to_first_token: dict[str, float] = field(default_factory=dict)
    inter_token_latency: dict[str, float] = field(default_factory=dict)
    output_token_throughput: float = 0.0
    goodput: float | None = None
    timed: tuple[TimedRequest, ...] = ()
    boundaries: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON, without the list of requests."""
        found = asdict(replace(self, timed=()))
        del found["timed"], found["boundaries"]
        return found


class Accounts:
    """Asks a server for its statistics of a model."""

    def __init__(self, client: Any, plan: LoadPlan, metadata: Mapping[str, str], process: int | None) -> None:
        self._client = client
        self._plan = plan
        self._metadata = metadata
        self._process = process

    def look(self) -> Account:
        """The present statistics; empty if the server does not tell."""
        try:
            found = self._client.get_inference_statistics(
                self._plan.model, self._plan.version, headers=self._metadata, client_timeout=10
            )
        except InferenceServerException:
            return Account(cpu=cpu_of(self._process))
        times: Counter[str] = Counter()
        requests = executions = inferences = 0
        for each in found.model_stats:
            stats = each.inference_stats
            requests += stats.success.count
            executions += each.execution_count
            inferences += each.inference_count
            for name, part in PARTS.items():
                times[name] += getattr(stats, part).ns
        return Account(requests, executions, inferences, dict(times), cpu_of(self._process))


def cpu_of(process: int | None) -> float:
    """Seconds of CPU that the threads of a process have used, without its workers'; 0 if they cannot be read."""
    if process is None:
        return 0.0
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def process_of(url: str) -> int | None:
    """The process on this machine that listens at a URL; None if it is elsewhere, or cannot be found."""
    if url.startswith("unix:"):
        with socket.socket(socket.AF_UNIX) as sock:
            try:
                sock.connect(url.removeprefix("unix:").removeprefix("//"))
                found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            except OSError:
                return None
            return int.from_bytes(found[:4], "little") or None
    host, _, port = url.rpartition(":")
    if host not in ("127.0.0.1", "localhost", "[::1]", "0.0.0.0"):
        return None
    nodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == int(port):
                nodes.add(f"socket:[{fields[9]}]")
    return _holder(nodes)


def _holder(nodes: set[str]) -> int | None:
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            if any(str(each.readlink()) in nodes for each in (process / "fd").iterdir()):
                return int(process.name)
        except OSError:
            continue
    return None


# ---- windows --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Window:
    """What the client measured in a window, and the server's statistics of the same time."""

    report: Report
    account: Account
    timed: tuple[TimedRequest, ...] = ()  # of streams; of unary calls if they are listed
    boundaries: tuple[int, int] = (0, 0)

    def metric(self, name: str) -> float:
        """A value of its latencies: the mean or a percentile."""
        return float(getattr(self.report.latency, name))


class Interrupted(KeyboardInterrupt):
    """^C, with the results so far.

    Attributes:
        found: of an interrupted window a Window, of an interrupted level a list of Level.
    """

    def __init__(self, found: Any) -> None:
        super().__init__()
        self.found = found


class Load(Protocol):
    """Makes requests."""

    def window(self, seconds: float, requests: int) -> Window:
        """Make requests for `seconds`, at least `requests`; for 0 seconds: exactly `requests`.

        Raises:
            Interrupted: by ^C.
        """

    def close(self) -> None:
        """End connections."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model under load.

    Attributes:
        plan: what to measure.
        load: makes its requests.
    """

    plan: LoadPlan
    load: Load


class Unary:
    """Calls of ModelInfer, made by the native driver."""

    def __init__(
        self,
        reach: Reach,
        plan: LoadPlan,
        model: Model,
        messages: Sequence[bytes],
        expected: Sequence[bytes] | None,
        accounts: Accounts,
        level: float,
    ) -> None:
        headers = [(name.encode(), value.encode()) for name, value in reach.headers]
        if plan.compression:
            headers.append((b"grpc-encoding", plan.compression.encode()))
        bodies = [packed(each, plan.compression) for each in messages]
        self._work: Workload = Fixed(bodies, expected, compressed=bool(plan.compression))
        self._count = len(messages)
        self._shared = plan.shared
        if model.sequences:
            first, last = plan.sequence_ids
            self._work = Sequences(
                messages,
                length=plan.sequence_length,
                variation=plan.sequence_variation,
                first_id=first,
                last_id=last,
            )
        self._accounts = accounts
        most = max(1, round(level))
        if plan.rate is not None:
            most = plan.sequences if model.sequences else plan.most_in_flight
        connections = min(plan.connections, most)
        self._driver = Driver(reach.url, connections=connections, context=reach.tls())
        self._options: dict[str, Any] = {"headers": headers, "gaps": plan.gaps, "listed": plan.listed}
        self._options |= {"in_flight": most // connections, "more": most % connections}
        if plan.rate is not None:
            self._options |= {"rate": level, "scattered": plan.scattered}

    def window(self, seconds: float, requests: int) -> Window:
        """See Load."""
        before, started = self._accounts.look(), time.monotonic_ns()
        try:
            report = self._driver.run(self._work, seconds=seconds, requests=0 if seconds else requests, **self._options)
            while seconds and report.requests < requests and self._driver.alive:
                seconds = max(seconds, seconds * (requests - report.requests) / max(report.requests, 1))
                before, started = self._accounts.look(), time.monotonic_ns()
                report = self._driver.run(self._work, seconds=seconds, **self._options)
        except KeyboardInterrupt:
            partial = self._driver.interrupted()
            if partial is None or not partial.answered:
                raise
            raise Interrupted(self._window(replace(partial, lost=0), before, started)) from None
        return self._window(report, before, started)

    def _window(self, report: Report, before: Account, started: int) -> Window:
        timed = tuple(
            TimedRequest(
                call.number % self._count,
                call.due_ns,
                (call.ended_ns,),
                call.ended_ns,
                call.sequence,
                (tensors_of(InferResult(call.answer)),) if call.answer and not self._shared else (),
            )
            for call in report.calls
        )
        ended = time.monotonic_ns()
        return Window(replace(report, calls=[]), self._accounts.look().since(before), timed, (started, ended))

    def close(self) -> None:
        """End its connections."""
        self._driver.close()


def packed(message: bytes, encoding: str) -> bytes:
    """A message, compressed if there is an encoding."""
    if not encoding:
        return message
    packer = zlib.compressobj(wbits=ENCODINGS[encoding])
    return packer.compress(message) + packer.flush()


def agree(windows: Sequence[Window], plan: LoadPlan) -> bool:
    """Whether the last windows differ little enough in rates and latencies."""
    last = windows[-AGREEING:]
    if len(last) < AGREEING:
        return False
    for values in ([each.report.rate for each in last], [each.metric(plan.metric) for each in last]):
        middle = sum(values) / len(values)
        if any(abs(value - middle) > plan.stability * middle for value in values):
            return False
    return True


def measure(subjects: Sequence[Subject], level: float, ends: float, tell: Callable[[str], None]) -> list[Level]:
    """Measure all models at the same time, until their windows agree, or enough windows were made, or time is up.

    Args:
        ends: in time.monotonic(); 0: never.
        tell: called with the progress.

    Returns:
        the results of each model.

    Raises:
        Interrupted: by ^C; it has the results of what was measured.
    """
    plan = subjects[0].plan
    windows: list[list[Window]] = [[] for _ in subjects]
    trials = 1 if plan.requests or plan.periods else plan.trials
    try:
        _measured(subjects, windows, trials, ends, tell)
    except KeyboardInterrupt as interrupt:
        if isinstance(interrupt, Interrupted):  # only a single model's load has a partial window
            windows[0].append(interrupt.found)
        measured = [
            summed(known, each.plan, level) for known, each in zip(windows, subjects, strict=True) if all(windows)
        ]
        raise Interrupted(measured) from None
    return [summed(known, each.plan, level) for known, each in zip(windows, subjects, strict=True)]


def _measured(
    subjects: Sequence[Subject], windows: list[list[Window]], trials: int, ends: float, tell: Callable[[str], None]
) -> None:
    """Add windows of each model."""
    plan = subjects[0].plan
    with ThreadPoolExecutor(len(subjects)) as pool:
        try:
            if plan.warm_up_requests:
                at_once(subjects, pool, 0, plan.warm_up_requests)
            elif plan.warm_up > 0:
                at_once(subjects, pool, plan.warm_up, 0)
        except Interrupted:
            raise KeyboardInterrupt from None  # nothing was measured
        size = (0.0, plan.requests) if plan.requests else (plan.window, plan.window_requests)
        while len(windows[0]) < trials and not (ends and windows[0] and time.monotonic() > ends):
            for known, found in zip(windows, at_once(subjects, pool, *size), strict=True):
                known.append(found)
            last = [known[-1].report for known in windows]
            tell(
                f"window {len(windows[0])}: {sum(each.rate for each in last):.0f} requests/s, "
                f"p99 {max(each.latency.p99 for each in last):.0f} us"
            )
            if all(agree(known, each.plan) for known, each in zip(windows, subjects, strict=True)):
                break
            if not any(each.answered for each in last):
                break


def at_once(subjects: Sequence[Subject], pool: Executor, seconds: float, requests: int) -> list[Window]:
    """A window of each model, all at the same time; see `Load.window`."""
    if len(subjects) == 1:
        return [subjects[0].load.window(seconds, requests)]
    return [each.result() for each in [pool.submit(each.load.window, seconds, requests) for each in subjects]]


def summed(windows: Sequence[Window], plan: LoadPlan, level: float) -> Level:
    """The results of the windows that count together."""
    exact = plan.requests or (plan.periods is not None and round(plan.periods.last))
    stable = agree(windows, plan)
    counted = windows[-AGREEING:] if stable else windows
    reports = [each.report for each in counted]
    seconds = sum(each.seconds for each in reports)
    answered = sum(each.answered for each in reports)
    stable = stable or (bool(exact) and answered >= exact)
    buckets: Counter[float] = Counter()
    errors: Counter[str] = Counter()
    for each in reports:
        buckets.update(dict(each.histogram))
        for status, calls in each.statuses.items():
            if status != 0:
                errors[STATUSES[status] if 0 <= status < len(STATUSES) else "no status"] += calls
        for name in ("lost", "reset"):
            if getattr(each, name):
                errors[name] += getattr(each, name)
        if other := sum(calls for what, calls in each.wrong.items() if what != "status"):
            errors["wrong answer"] += other
    histogram = sorted(buckets.items())
    shares = percentiles(histogram, PERCENTILES)
    right = answered - sum(calls for name, calls in errors.items() if name not in ("lost", "reset"))
    done = sum(each.account.requests for each in counted)
    executions = sum(each.account.executions for each in counted)
    server = {}
    if done:
        server = {name: sum(each.account.times[name] for each in counted) / done / 1e3 for name in PARTS}
    cpu = sum(each.driver_cpu_seconds for each in reports)
    timed = [each for window in counted for each in window.timed]
    streamed = plan.streaming
    first = [each.figures()["time_to_first_token"] for each in timed if each.answers] if streamed else []
    return Level(
        model=plan.model,
        level=level,
        kind=plan.kind,
        stable=stable,
        windows=len(windows),
        seconds=seconds,
        requests=answered,
        rate=right / seconds if seconds else 0.0,
        inferences=right * plan.rows / seconds if seconds else 0.0,
        mean=sum(each.latency.mean * each.answered for each in reports) / answered if answered else 0.0,
        p50=shares[0],
        p90=shares[1],
        p95=shares[2],
        p99=shares[3],
        p999=shares[4],
        max=max((each.latency.max for each in reports), default=0.0),
        errors=dict(errors),
        server=server,
        batch=sum(each.account.inferences for each in counted) / executions if executions else 0.0,
        client_cpu=cpu / answered * 1e6 if answered else 0.0,
        server_cpu=sum(each.account.cpu for each in counted) / answered * 1e6 if answered else 0.0,
        driver_busy=seconds > 0 and cpu / seconds > BUSY,
        histogram=histogram,
        sample=next((text for each in reports for text in each.samples), ""),
        time_to_first_token=spread(first),
        inter_token_latency=spread([value for each in timed for value in each.between()]),
        output_token_throughput=sum(len(each.answers) for each in timed) / seconds if streamed and seconds else 0.0,
        goodput=_good(timed if streamed else None, histogram, answered - right, plan) / seconds
        if plan.goodput and seconds
        else None,
        timed=tuple(timed) if plan.listed else (),
        boundaries=tuple(at for each in counted for at in each.boundaries) if plan.listed else (),
    )


def _good(
    timed: Iterable[TimedRequest] | None, histogram: Sequence[tuple[float, int]], failed: int, plan: LoadPlan
) -> int:
    """How many requests are within the limits of the plan; None as requests: only their latencies are known."""
    limits = {name: ms * 1e3 for name, ms in plan.goodput}
    if timed is None:
        return max(sum(calls for us, calls in histogram if us <= limits["request_latency"]) - failed, 0)
    good = sum(
        all(value <= limits.get(name, value) for name, value in each.figures().items()) and bool(each.answers)
        for each in timed
    )
    return max(good - failed, 0)


def percentiles(histogram: Sequence[tuple[float, int]], shares: Sequence[float]) -> list[float]:
    """For each share in per cent, the bound that this share of calls did not exceed; 0 without calls."""
    total = sum(calls for _, calls in histogram)
    found = []
    for share in shares:
        seen = 0
        value = 0.0
        for bound, calls in histogram:
            seen += calls
            value = bound
            if seen >= share / 100 * total:
                break
        found.append(value)
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles; empty without values."""
    if not values:
        return {}
    ordered = sorted(values)
    found = {"mean": sum(ordered) / len(ordered), "max": ordered[-1]}
    for share in (50, 90, 95, 99):
        found[f"p{share}"] = ordered[min(len(ordered) - 1, int(share / 100 * len(ordered)))]
    return found
