"""The arguments of `inferd perf`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from inferd.server.errors import Misused
from inferd.server.tools.files import check_writable

MOST_LEVELS = 1_000_000


@dataclass(frozen=True, slots=True)
class Range:
    """Levels of load.

    Attributes:
        first, last: the ends, which are measured, too.
        step: between two; with a binary search the least distance that matters.
    """

    first: float
    last: float
    step: float

    def levels(self) -> list[float]:
        """All of them."""
        count = int((self.last - self.first) / self.step + 1e-9) + 1
        return [self.first + i * self.step for i in range(count)]


def range_of(option: str, text: str) -> Range:
    """The range of "FIRST", "FIRST:LAST" or "FIRST:LAST:STEP".

    Raises:
        Misused: the text has another form.
    """
    try:
        parts = [float(part) for part in text.split(":")]
    except ValueError:
        parts = []
    if not 1 <= len(parts) <= 3 or not all(0 < part < math.inf for part in parts):
        raise Misused(f"{option}: expected FIRST, FIRST:LAST or FIRST:LAST:STEP, numbers above 0, got {text!r}")
    first, last, step = parts[0], *(parts[1:2] or parts[:1]), *(parts[2:3] or [1.0])
    if last < first:
        raise Misused(f"{option}: the last level {last:g} is below the first {first:g}")
    return Range(first, last, step)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The plan of a measurement.

    Attributes:
        model, version: the measured model.
        rows: of each request's batch.
        concurrency: requests in flight; None: `rate` or `periods` decides.
        rate: requests per second.
        gaps: seconds between requests, in turn; `rate` is then their mean rate. Empty: `scattered` decides.
        periods: how many requests begin together (first), how many a level has (last), and how many more begin after
            each period (step).
        period: a period ends when each of its requests has had this number of responses.
        scattered: whether requests come independently of each other, and not at a fixed pace.
        connections: their number.
        most_in_flight: with a rate: the most requests in flight; others wait in the client, and their wait counts.
        window: seconds of a measurement.
        window_requests: the least requests of a window, which may become longer; 0: any number.
        requests: exactly how many a level has, in place of windows; 0: windows. Further requests end the sequences that
            have begun.
        stability: share by which the last three windows may differ.
        trials: windows of a level, at most.
        percentile: of latency, which must be stable and within the limit; 0: the mean.
        limit_ms: limit of the latency; 0: none.
        search: find the highest level within the limit, by halves.
        warm_up: seconds before each level.
        warm_up_requests: exactly this number before each level, instead of `warm_up`; 0: `warm_up` decides.
        longest: seconds for all levels; 0: any number.
        shapes, data, letters, text: of the sent tensors; see `requests`.
        parameters: of each request.
        shared: "system" or "cuda": the kind of shared memory for tensors.
        device: of CUDA shared memory.
        output_bytes: of an output in shared memory whose size the model does not fix.
        streaming: each request goes through a stream.
        compression: of requests, "gzip" or "deflate".
        sequence_length: requests of a sequence, for models with sequences.
        sequence_variation: share by which the length of a sequence may differ from that.
        sequence_ids: the first and the last id of sequences.
        sequences: with a rate: how many run at a time; else each request in flight has its own sequence.
        goodput: figures of GOODPUT, and the milliseconds of each that a good request does not exceed.
        listed: whether the results list each request.
    """

    model: str
    version: str = ""
    rows: int = 1
    concurrency: Range | None = Range(1, 1, 1)
    rate: Range | None = None
    gaps: tuple[float, ...] = ()
    periods: Range | None = None
    period: int = 10
    scattered: bool = False
    connections: int = 1
    most_in_flight: int = 1024
    window: float = 1.0
    window_requests: int = 0
    requests: int = 0
    stability: float = 0.1
    trials: int = 10
    percentile: int = 0
    limit_ms: float = 0.0
    search: bool = False
    warm_up: float = 0.5
    warm_up_requests: int = 0
    longest: float = 0.0
    shapes: tuple[str, ...] = ()
    data: str = "random"
    letters: int = 128
    text: str = ""
    parameters: tuple[tuple[str, str | bool | int | float], ...] = ()
    shared: str = ""
    device: int = 0
    output_bytes: int = 102400
    streaming: bool = False
    compression: str = ""
    sequence_length: int = 20
    sequence_variation: float = 0.2
    sequence_ids: tuple[int, int] = (1, (1 << 32) - 1)
    sequences: int = 4
    goodput: tuple[tuple[str, float], ...] = ()
    listed: bool = False

    def __post_init__(self) -> None:
        if self.search and not self.limit_ms:
            raise Misused("--binary-search: it needs --latency-threshold, the limit that it searches for")
        if self.percentile not in (0, 50, 90, 95, 99):
            raise Misused(f"--percentile: expected 50, 90, 95 or 99, got {self.percentile}")
        if self.rows < 1 or self.connections < 1 or self.window <= 0 or self.trials < 1:
            raise Misused("--batch-size, --connections, --measurement-interval, --max-trials: expected more than 0")
        if self.sequence_length < 1 or not 0 <= self.sequence_variation < 1 or self.sequences < 1:
            raise Misused(
                "--sequence-length, --num-of-sequences: expected more than 0; --sequence-length-variation: 0 to 99"
            )
        if min(self.requests, self.warm_up_requests) < 0 or self.period < 1:
            raise Misused("--request-count, --warmup-request-count: expected 0 or more; --request-period: 1 or more")
        if (self.levels.last - self.levels.first) / self.levels.step >= MOST_LEVELS:
            raise Misused(f"--concurrency-range, --request-rate-range: expected at most {MOST_LEVELS} levels")
        if self.letters < 0 or self.output_bytes < 1 or self.most_in_flight < 1:
            raise Misused(
                "--string-length: expected 0 or more; --output-shared-memory-size, --max-in-flight: 1 or more"
            )
        if not (0 <= self.stability < math.inf and 0 <= self.limit_ms < math.inf):
            raise Misused("--stability-percentage, --latency-threshold: expected 0 or more")
        if not (0 <= self.warm_up < math.inf and 0 <= self.longest < math.inf):
            raise Misused("--warmup, --max-duration: expected seconds, 0 or more")
        if self.shared and self.compression:
            raise Misused("--grpc-compression-algorithm: with shared memory there is nothing to compress")

    @property
    def levels(self) -> Range:
        """The levels of requests in flight, or of the rate."""
        if self.periods is not None:
            return Range(self.periods.last, self.periods.last, 1)
        chosen = self.rate or self.concurrency
        assert chosen is not None
        return chosen

    @property
    def kind(self) -> str:
        """The unit of a level."""
        if self.periods is not None:
            return "periodic_concurrency"
        return "rate" if self.rate is not None else "concurrency"

    @property
    def metric(self) -> str:
        """The name in Level of the value that must be stable."""
        return f"p{self.percentile}" if self.percentile else "mean"


GOODPUT = ("request_latency", "time_to_first_token", "inter_token_latency")
"""Figures of a request that --goodput may limit."""


def goodput_of(given: tuple[str, ...]) -> tuple[tuple[str, float], ...]:
    """The limits of texts "FIGURE:MILLISECONDS", as in genai-perf.

    Raises:
        Misused: a text has another form.
    """
    found = []
    for each in (part for text in given for part in text.split()):
        name, _, value = each.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = 0.0
        if name not in GOODPUT or not limit > 0:
            raise Misused(f"--goodput: expected FIGURE:MILLISECONDS, FIGURE {', '.join(GOODPUT)}, got {each!r}")
        found.append((name, limit))
    return tuple(found)


def gaps_of(path: Path) -> tuple[float, ...]:
    """The seconds between requests that a file has, in microseconds, one a line, as in perf_analyzer.

    Raises:
        Misused: the file cannot be read, or has other lines.
    """
    try:
        found = tuple(int(line) / 1e6 for line in path.read_text().split())
    except (OSError, ValueError) as error:
        raise Misused(f"--request-intervals {path}: expected a file of microseconds, one a line: {error}") from None
    if not found or min(found) < 0 or not max(found):
        raise Misused(f"--request-intervals {path}: expected microseconds of 0 or more, one of them above 0")
    return found


def ids_of(text: str) -> tuple[int, int]:
    """The ids of sequences of "FIRST" or "FIRST:LAST".

    Raises:
        Misused: the text has another form.
    """
    first, _, last = text.partition(":")
    try:
        found = int(first), int(last or (1 << 32) - 1)
    except ValueError:
        found = 0, 0
    if not 0 < found[0] <= found[1]:
        raise Misused(f"--sequence-id-range: expected FIRST or FIRST:LAST, numbers above 0, got {text!r}")
    return found


def parameters_of(given: tuple[str, ...]) -> tuple[tuple[str, str | bool | int | float], ...]:
    """The parameters of texts "NAME:VALUE:TYPE", as in perf_analyzer.

    Raises:
        Misused: a text has another form.
    """
    kinds = {"string": str, "int": int, "uint": int, "double": float}
    found: list[tuple[str, str | bool | int | float]] = []
    for each in given:
        name, _, rest = each.partition(":")
        value, _, kind = rest.rpartition(":")
        try:
            if kind == "bool" and value in ("true", "false"):
                found.append((name, value == "true"))
            else:
                found.append((name, kinds[kind](value)))
        except (KeyError, ValueError):
            raise Misused(
                "--request-parameter: expected NAME:VALUE:TYPE, where TYPE is string, bool, int, uint or double, got "
                f"{each!r}"
            ) from None
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Files:
    """The files of the results.

    Attributes:
        out: .json with everything, or .csv with a line for each level.
        profile: each request, in the format of perf_analyzer; None: not written.
    """

    out: tuple[Path, ...] = ()
    profile: Path | None = None

    def __post_init__(self) -> None:
        for path in self.out:
            check_writable("--out", path, ".json", ".csv")
        if self.profile is not None:
            check_writable("--profile-export-file", self.profile, ".json")
