"""All of a run: levels one after the other, or the highest within a limit."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from inferd_client.utils import InferenceServerException
from server.errors import Misused
from server.tools.perf.measuring import Accounts, Level, Unary, measure, process_of
from server.tools.perf.plan import Files, Plan
from server.tools.perf.report import histogram_text, level_table, remarks, write
from server.tools.perf.requests import Messages, Model, model_of, tensors_of
from server.tools.perf.streaming import Streams
from server.tools.reach import CallFailed, Reach, failure

Tell = Callable[[str], None]


def run(reach: Reach, plan: Plan, files: Files) -> int:
    """Measure, print and write; the exit status of the command: 1 when a call failed, or no level is within the limit.

    Raises:
        CallFailed: the server cannot be asked.
        Misused: the plan makes no sense for the model.
    """
    if (reach.root_cert is not None or reach.headers) and not plan.streaming:
        raise Misused("--root-cert, --header: only with --streaming; other loads of `inferd perf` are plain text")
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    with reach.client() as client:
        try:
            server = client.get_server_metadata(headers=reach.metadata, client_timeout=reach.timeout)
            model = model_of(client, reach, plan)
            levels = _levels(client, reach, plan, model)
        except InferenceServerException as error:
            raise failure(reach, error) from None
        except OSError as error:
            raise CallFailed(f"{reach.url}: {error}") from None
    print(level_table(levels))
    print(*remarks(levels), sep="\n")
    best = chosen(levels, plan)
    if plan.limit_ms:
        what = f"{plan.metric} within {plan.limit_ms:g} ms"
        print(f"{what}: {best.level:g} at most, {best.rate:.1f} requests/s" if best else f"{what}: at no level")
    shown = best or levels[-1]
    print(f"\n{histogram_text(shown)}")
    facts = {
        "tool": "inferd perf",
        "started": started,
        "url": reach.url,
        "server": {"name": server.name, "version": server.version},
        "model": plan.model,
        "rows": plan.rows,
        "metric": plan.metric,
        "limit_ms": plan.limit_ms,
    }
    for path in files.out:
        write(path, levels, facts)
        print(f"written: {path}", file=sys.stderr)
    return 1 if (plan.limit_ms and best is None) or any(each.errors for each in levels) else 0


def levels_of(reach: Reach, plan: Plan) -> list[Level]:
    """The levels of a plan, of unary calls, without a word.

    Raises:
        CallFailed: the server cannot be asked.
        Misused: the plan makes no sense for the model.
    """
    with reach.client() as client:
        try:
            return _levels(client, reach, plan, model_of(client, reach, plan), quiet=True)
        except InferenceServerException as error:
            raise failure(reach, error) from None
        except OSError as error:
            raise CallFailed(f"{reach.url}: {error}") from None


def chosen(levels: Sequence[Level], plan: Plan) -> Level | None:
    """The level with the highest rate within the limit; without limit, with the highest."""
    found = [each for each in levels if within(each, plan)]
    return max(found, key=lambda each: each.rate, default=None)


def within(level: Level, plan: Plan) -> bool:
    """Whether its latency is within the limit."""
    return not plan.limit_ms or (level.requests > 0 and getattr(level, plan.metric) <= plan.limit_ms * 1e3)


def _levels(client: Any, reach: Reach, plan: Plan, model: Model, *, quiet: bool = False) -> list[Level]:
    accounts = Accounts(client, plan, reach.metadata, process_of(reach.url))
    ends = time.monotonic() + plan.longest if plan.longest else 0.0
    if plan.streaming or model.decoupled:
        tensors = tensors_of(model, plan)
        return _swept(plan, ends, lambda level: Streams(reach, plan, model, tensors, accounts, level), quiet)
    with Messages(client, model, plan) as messages:
        return _swept(plan, ends, lambda level: Unary(reach.url, plan, messages, accounts, level), quiet)


def _swept(plan: Plan, ends: float, make: Callable[[float], Any], quiet: bool) -> list[Level]:
    measured: dict[float, Level] = {}

    def at(level: float) -> Level:
        said = f"{level:g} {'requests/s' if plan.rate is not None else 'in flight'}"
        load = make(level)
        try:
            measured[level] = measure(
                load, plan, level, ends, lambda text: None if quiet else _progress(f"{said}: {text}")
            )
        finally:
            load.close()
        found = measured[level]
        if quiet:
            return found
        _progress("")
        print(f"{said}: {found.rate:.1f} requests/s, p99 {found.p99:.0f} us", file=sys.stderr, flush=True)
        return found

    levels = plan.levels.levels()
    if plan.search:
        _search(levels, at, plan)
    else:
        for level in levels:
            if not within(at(level), plan) or (ends and time.monotonic() > ends):
                break
    return [measured[level] for level in sorted(measured)]


def _search(levels: Sequence[float], at: Callable[[float], Level], plan: Plan) -> None:
    """Measure as few as tell the highest within the limit."""
    low, high = 0, len(levels) - 1
    if not within(at(levels[low]), plan) or low == high or within(at(levels[high]), plan):
        return
    while high - low > 1:
        middle = (low + high) // 2
        if within(at(levels[middle]), plan):
            low = middle
        else:
            high = middle


def _progress(text: str) -> None:
    """One line that changes, on a terminal."""
    if sys.stderr.isatty():
        print(f"\r{text:100.100}\r" if not text else f"\r{text:100.100}", end="", file=sys.stderr, flush=True)
