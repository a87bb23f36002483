"""A whole run: levels one after the other, or the search for the highest within a limit."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from inferd_client.utils import InferenceServerException
from server.errors import Misused
from server.tools.perf.measuring import Accounts, Level, Load, Subject, Unary, measure, process_of
from server.tools.perf.plan import Files, LoadPlan
from server.tools.perf.report import histogram_text, level_table, remarks, write
from server.tools.perf.requests import Model, Requests, model_of, serialised
from server.tools.perf.streaming import Streams
from server.tools.reach import CallFailed, Reach, failure

Tell = Callable[[str], None]


def run(reach: Reach, plans: Sequence[LoadPlan], files: Files) -> int:
    """Measure, print and write; the exit status of the command: 1 when a call failed, or no level is within the limit.

    Args:
        plans: one for each model; only the models differ.

    Raises:
        CallFailed: the server cannot be asked.
        Misused: a plan makes no sense for its model.
    """
    plan = plans[0]
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    levels, server = _asked(reach, plans, quiet=False)
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
    return 1 if (plan.limit_ms and not best) or any(each.errors for each in levels) else 0


def levels_of(reach: Reach, plan: LoadPlan) -> list[Level]:
    """The levels of a plan, without output.

    Raises:
        CallFailed: the server cannot be asked.
        Misused: the plan makes no sense for the model.
    """
    return _asked(reach, [plan], quiet=True)[0]


def _asked(reach: Reach, plans: Sequence[LoadPlan], *, quiet: bool) -> tuple[list[Level], Any]:
    """The levels, and the server's metadata."""
    with reach.client() as client:
        try:
            server = client.get_server_metadata(headers=reach.metadata, client_timeout=reach.timeout)
            models = [model_of(client, reach, plan) for plan in plans]
            return _levels(client, reach, plans, models, quiet=quiet), server
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


def _levels(
    client: Any, reach: Reach, plans: Sequence[LoadPlan], models: Sequence[Model], *, quiet: bool
) -> list[Level]:
    process = process_of(reach.url) if len(plans) == 1 else None  # several models share the process's CPU time
    ends = time.monotonic() + plans[0].longest if plans[0].longest else 0.0
    with contextlib.ExitStack() as stack:
        makers = [_maker(client, reach, plan, model, process, stack) for plan, model in zip(plans, models, strict=True)]
        return _swept(plans, ends, makers, quiet)


def _maker(
    client: Any, reach: Reach, plan: LoadPlan, model: Model, process: int | None, stack: contextlib.ExitStack
) -> Callable[[float], Load]:
    """What makes the load of a level; the stack keeps its requests."""
    accounts = Accounts(client, plan, reach.metadata, process)
    streams = plan.streaming or model.decoupled
    if model.sequences and plan.compression and not streams:
        raise Misused("--grpc-compression-algorithm: requests of sequences are compressed with --streaming only")
    requests = stack.enter_context(Requests(client, model, plan))
    if streams:
        return partial(Streams, reach, plan, model, requests, accounts)
    messages = [serialised(plan, each) for each in requests]
    return partial(Unary, reach, plan, model, messages, accounts)


@contextlib.contextmanager
def under_load(reach: Reach, plan: LoadPlan, level: float) -> Iterator[Load]:
    """A level's load, for windows that the caller makes.

    Raises:
        CallFailed: the server cannot be asked.
        Misused: the plan makes no sense for the model.
    """
    with reach.client() as client, contextlib.ExitStack() as stack:
        try:
            load = _maker(client, reach, plan, model_of(client, reach, plan), None, stack)(level)
        except InferenceServerException as error:
            raise failure(reach, error) from None
        stack.callback(load.close)
        yield load


def _swept(
    plans: Sequence[LoadPlan], ends: float, makers: Sequence[Callable[[float], Load]], quiet: bool
) -> list[Level]:
    plan = plans[0]
    measured: dict[float, list[Level]] = {}

    def at(level: float) -> bool:
        """Measure a level. Returns whether it is within the limit."""
        said = f"{level:g} {'requests/s' if plan.rate is not None else 'in flight'}"
        loads: list[Load] = []
        try:
            loads += [make(level) for make in makers]
            subjects = [Subject(each, load) for each, load in zip(plans, loads, strict=True)]
            tell = _silent if quiet else (lambda text: _progress(f"{said}: {text}"))
            found = measured[level] = measure(subjects, level, ends, tell)
        finally:
            for load in loads:
                load.close()
        if not quiet:
            _progress("")
            rate, p99 = sum(each.rate for each in found), max(each.p99 for each in found)
            print(f"{said}: {rate:.1f} requests/s, p99 {p99:.0f} us", file=sys.stderr, flush=True)
        return all(within(each, plan) for each in found)

    levels = plan.levels.levels()
    if plan.search:
        _search(levels, at)
    else:
        for level in levels:
            if not at(level) or (ends and time.monotonic() > ends):
                break
    return [each for level in sorted(measured) for each in measured[level]]


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
