"""A whole run: levels one after the other, or the search for the highest within a limit."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from inferd.server.errors import Misused
from inferd.server.tools.perf.measuring import (
    Accounts,
    Interrupted,
    Level,
    Load,
    Subject,
    Unary,
    at_once,
    measure,
    process_of,
    summed,
)
from inferd.server.tools.perf.plan import Files, LoadPlan
from inferd.server.tools.perf.profile import write_profile
from inferd.server.tools.perf.report import UNITS, histogram_text, level_table, remarks, write
from inferd.server.tools.perf.requests import Data, Model, Requests, confirmed, model_of, serialised
from inferd.server.tools.perf.streaming import Streams
from inferd.server.tools.reach import CallFailed, Reach, failure
from inferd_client.utils import InferenceServerException

Tell = Callable[[str], None]


def run(reach: Reach, plans: Sequence[LoadPlan], files: Files) -> int:
    """Measure, print and write. Returns the exit status: 1 when a call failed, or no level is within the limit.

    After ^C what was measured before is printed and written.

    Args:
        plans: one for each model; only the models differ.

    Raises:
        KeyboardInterrupt: after ^C.
        CallFailed: a call other than those of the load failed.
        Misused: a plan makes no sense for its model.
    """
    plan = plans[0]
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    measured = _run_plans(reach, plans, quiet=False)
    levels, server = measured.levels, measured.server
    if measured.interrupted and not levels:
        raise KeyboardInterrupt
    print(level_table(levels))
    print(*remarks(levels), sep="\n")
    best = best_of(levels, plan)
    if plan.limit_ms:
        what = f"{plan.metric} within {plan.limit_ms:g} ms"
        rate = sum(each.rate for each in best)
        print(f"{what}: {best[0].level:g} at most, {rate:.1f} requests/s" if best else f"{what}: at no level")
    for shown in best or levels[-len(plans) :]:
        print(f"\n{histogram_text(shown)}")
    facts = {
        "tool": "inferd perf",
        "started": started,
        "url": reach.url,
        "server": {"name": server.name, "version": server.version},
        "model": ", ".join(each.model for each in plans),
        "rows": plan.rows,
        "metric": plan.metric,
        "limit_ms": plan.limit_ms,
    }
    for path in files.out:
        write(path, levels, facts)
        print(f"written: {path}", file=sys.stderr)
    if files.profile is not None:
        write_profile(files.profile, levels, measured.sent)
        print(f"written: {files.profile}", file=sys.stderr)
    if measured.interrupted:
        raise KeyboardInterrupt
    return 1 if (plan.limit_ms and not best) or any(each.errors for each in levels) else 0


def levels_of(reach: Reach, plans: Sequence[LoadPlan]) -> list[Level]:
    """The levels of plans, one for each model, without output.

    Raises:
        CallFailed: the server cannot be asked.
        Misused: a plan makes no sense for its model.
    """
    measured = _run_plans(reach, plans, quiet=True)
    if measured.interrupted:
        raise KeyboardInterrupt
    return measured.levels


@dataclass(slots=True)
class Measured:
    """A whole run.

    Attributes:
        server: its metadata.
        sent: the tensors that were sent to each model, by name.
        interrupted: whether ^C ended the run.
    """

    server: Any
    levels: list[Level] = field(default_factory=list)
    sent: dict[str, Data] = field(default_factory=dict)
    interrupted: bool = False


def _run_plans(reach: Reach, plans: Sequence[LoadPlan], *, quiet: bool) -> Measured:
    with reach.client() as client:
        try:
            found = Measured(client.get_server_metadata(headers=reach.metadata, client_timeout=reach.timeout))
            models = [model_of(client, reach, plan) for plan in plans]
            _measure(client, reach, [_fitting(*each) for each in zip(plans, models, strict=True)], models, found, quiet)
            return found
        except InferenceServerException as error:
            raise failure(reach, error) from None
        except OSError as error:
            raise CallFailed(f"{reach.url}: {error}") from None


def best_of(levels: Sequence[Level], plan: LoadPlan) -> list[Level]:
    """For each model, the level with the highest rate within the limit, if there is one."""
    found: dict[float, list[Level]] = {}
    for each in levels:
        found.setdefault(each.level, []).append(each)
    able = [group for group in found.values() if all(within(each, plan) for each in group)]
    return max(able, key=lambda group: sum(each.rate for each in group), default=[])


def within(level: Level, plan: LoadPlan) -> bool:
    """Whether the latency of a level is within the limit."""
    return not plan.limit_ms or (level.requests > 0 and getattr(level, plan.metric) <= plan.limit_ms * 1e3)


def _fitting(plan: LoadPlan, model: Model) -> LoadPlan:
    """The plan for a model.

    Raises:
        Misused: it makes no sense for the model.
    """
    plan = replace(plan, streaming=plan.streaming or model.decoupled)
    if model.sequences and plan.compression and not plan.streaming:
        raise Misused("--grpc-compression-algorithm: requests of sequences are compressed with --streaming only")
    if plan.periods is not None and (not plan.streaming or model.sequences):
        raise Misused("--periodic-concurrency-range: expected --streaming or a decoupled model, without sequences")
    if not plan.streaming and any(name != "request_latency" for name, _ in plan.goodput):
        raise Misused("--goodput: without --streaming a request has a request_latency only")
    return plan


def _measure(
    client: Any, reach: Reach, plans: Sequence[LoadPlan], models: Sequence[Model], found: Measured, quiet: bool
) -> None:
    process = process_of(reach.url) if len(plans) == 1 else None  # several models share the process's CPU time
    ends = time.monotonic() + plans[0].longest if plans[0].longest else 0.0
    with contextlib.ExitStack() as stack:
        makers = []
        for plan, model in zip(plans, models, strict=True):
            requests = Requests(client, model, plan)
            found.sent[plan.model] = requests.data
            makers.append(_maker(client, reach, plan, model, requests, process, stack))
        _sweep(plans, ends, makers, found, quiet)


def _maker(
    client: Any,
    reach: Reach,
    plan: LoadPlan,
    model: Model,
    made: Requests,
    process: int | None,
    stack: contextlib.ExitStack,
) -> Callable[[float], Load]:
    """The maker of a level's load; the stack keeps its requests."""
    accounts = Accounts(client, plan, reach.metadata, process)
    if made.data.expected and (plan.shared or (model.sequences and not plan.streaming)):
        raise Misused("--input-data: validation_data needs responses outside of shared memory, of sequences in streams")
    requests = stack.enter_context(made)
    if plan.streaming:
        return partial(Streams, reach, plan, model, requests, made.data, accounts)
    messages = [serialised(plan, each) for each in requests]
    return partial(Unary, reach, plan, model, messages, confirmed(client, reach, plan, requests, made.data), accounts)


@contextlib.contextmanager
def under_load(reach: Reach, plans: Sequence[LoadPlan], level: float) -> Iterator[Callable[[float], list[Level]]]:
    """A function that puts all models under load for a time, at this level.

    Raises:
        CallFailed: the server cannot be asked.
        Misused: a plan makes no sense for its model.
    """
    subjects: list[Subject] = []
    with reach.client() as client, contextlib.ExitStack() as stack:
        try:
            for each in plans:
                model = model_of(client, reach, each)
                plan = _fitting(each, model)
                load = _maker(client, reach, plan, model, Requests(client, model, plan), None, stack)(level)
                stack.callback(load.close)
                subjects.append(Subject(plan, load))
        except InferenceServerException as error:
            raise failure(reach, error) from None
        pool = stack.enter_context(ThreadPoolExecutor(len(subjects)))

        def measured(seconds: float) -> list[Level]:
            windows = at_once(subjects, pool, seconds, 1)
            return [summed([own], each.plan, level) for own, each in zip(windows, subjects, strict=True)]

        yield measured


def _sweep(
    plans: Sequence[LoadPlan], ends: float, makers: Sequence[Callable[[float], Load]], run: Measured, quiet: bool
) -> None:
    """Measure the levels of the plans, until ^C."""
    plan = plans[0]
    measured: dict[float, list[Level]] = {}

    def at(level: float) -> bool:
        """Measure a level. Returns whether it is within the limit."""
        said = f"{level:g} {UNITS[plan.kind]}"
        loads: list[Load] = []
        try:
            loads += [make(level) for make in makers]
            subjects = [Subject(each, load) for each, load in zip(plans, loads, strict=True)]
            tell = _silent if quiet else (lambda text: _progress(f"{said}: {text}"))
            found = measured[level] = measure(subjects, level, ends, tell)
        except Interrupted as interrupt:
            measured[level] = interrupt.found
            raise
        finally:
            for load in loads:
                load.close()
        if not quiet:
            _progress("")
            rate, p99 = sum(each.rate for each in found), max(each.p99 for each in found)
            print(f"{said}: {rate:.1f} requests/s, p99 {p99:.0f} us", file=sys.stderr, flush=True)
        return all(within(each, plan) for each in found)

    levels = plan.levels.levels()
    try:
        if plan.search:
            _search(levels, at)
        else:
            for level in levels:
                if not at(level) or (ends and time.monotonic() > ends):
                    break
    except KeyboardInterrupt:
        run.interrupted = True
        if not quiet:
            _progress("")
    run.levels += [each for level in sorted(measured) for each in measured[level]]


def _search(levels: Sequence[float], at: Callable[[float], bool]) -> None:
    """Find the highest level within the limit by bisection."""
    low, high = 0, len(levels) - 1
    if not at(levels[low]) or low == high or at(levels[high]):
        return
    while high - low > 1:
        middle = (low + high) // 2
        if at(levels[middle]):
            low = middle
        else:
            high = middle


def _silent(text: str) -> None:
    """Print nothing."""


def _progress(text: str) -> None:
    """Print one line that changes, on a terminal."""
    if sys.stderr.isatty():
        print(f"\r{text:100.100}\r" if not text else f"\r{text:100.100}", end="", file=sys.stderr, flush=True)
