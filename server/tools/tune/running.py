"""All of a search: trials under load, the results, and the changed configuration."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from inferd.server.errors import Misused
from inferd.server.pb import model_config_pb2 as pb
from inferd.server.tools.files import check_writable
from inferd.server.tools.tables import table
from inferd.server.tools.tune.configurations import applied, axes_of, lines, setting_of
from inferd.server.tools.tune.pair import Pair
from inferd.server.tools.tune.search import Search, Setting, Tried, Wanted
from inferd.server.tools.tune.trial import CONFIG


def tune(wanted: Wanted, *, write: bool, out: Path | None) -> int:
    """Search, print the trials and the best one, and with `write` put it into the model's configuration.

    Raises:
        CallFailed: the model cannot be served with its own configuration.
        Misused: the model cannot be tuned.
    """
    if out is not None:
        check_writable("--out", out, ".json")
    with (
        _interrupted(),
        tempfile.TemporaryDirectory(prefix="inferd-tune-") as folder,
        Pair(wanted, Path(folder)) as pair,
    ):
        config = pair.config
        if config.HasField("ensemble_scheduling") or config.model_transaction_policy.decoupled:
            raise Misused(f"tune: model '{wanted.model}' is an ensemble or decoupled: tune the models that it asks")
        start = setting_of(config)
        search = Search(pair.measure, _tell, wanted.runs)
        print(f"{wanted.model}, as it is: {start.text()}", file=sys.stderr)
        best = search.settle(search.climb(start, axes_of(config, start, wanted)))
    first = search.tried[start]
    _print_front(search)
    if out is not None:
        out.write_text(json.dumps({"tool": "inferd tune", "model": wanted.model, "tried": _as_json(search)}, indent=1))
    if best.best is None:
        print("no tried configuration is within the limits")
        return 1
    gain = f", {best.rate / first.rate:.2f} x what it is" if first.rate else ""
    print(f"\nbest of {len(search.tried)}: {best.setting.text()}: {best.rate:.1f} inferences/s{gain}\n")
    print(lines(config, best.setting))
    if write:
        _write(wanted.repository / wanted.model, config, best.setting)
    return 0


@contextlib.contextmanager
def _interrupted() -> Iterator[None]:
    """End on other signals as on Ctrl-C, so no servers or folders are left behind."""
    former = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    changed = [each for each, handler in former.items() if handler is signal.SIG_DFL]
    for each in changed:
        signal.signal(each, signal.default_int_handler)
    try:
        yield
    finally:
        for each in changed:
            signal.signal(each, signal.SIG_DFL)


def _tell(tried: Tried) -> None:
    if tried.best is None:
        said = tried.problem.splitlines()[0]
    else:
        said = f"{tried.rate:.1f} inferences/s at {tried.best.level:g} in flight, p99 {tried.best.p99 / 1e3:.2f} ms"
        said += f", {tried.memory_mb} MiB"
        if tried.noise:
            said += "; noise: the turns say more than in flight / latency, which is shown"
    print(f"  {tried.setting.text()}: {said}", file=sys.stderr, flush=True)


def _print_front(search: Search) -> None:
    rows = [
        (
            each.setting.text(),
            f"{each.rate:.1f}",
            f"{each.best.level:g}",
            f"{each.best.p50 / 1e3:.2f}",
            f"{each.best.p99 / 1e3:.2f}",
            each.memory_mb,
        )
        for each in search.front()
        if each.best is not None
    ]
    if rows:
        print("nothing that was tried is better than these in throughput, latency and memory:\n")
        print(table(("setting", "inferences/s", "in flight", "p50 ms", "p99 ms", "MiB"), rows, "lrrrrr"))


def _as_json(search: Search) -> list[Mapping[str, Any]]:
    return [
        {
            "batch": setting.batch,
            "instances": setting.instances,
            "delay_us": setting.delay_us,
            "threads": setting.threads,
            "adaptive": setting.adaptive,
            "preferred": setting.preferred,
            "memory_mb": tried.memory_mb,
            "problem": tried.problem,
            "inferences": tried.rate,
            "noise": tried.noise,
            "level": tried.best.as_dict() if tried.best else None,
        }
        for setting, tried in search.tried.items()
    ]


def _write(folder: Path, completed: pb.ModelConfig, setting: Setting) -> None:
    """Change the model's config.pbtxt, and keep the former one beside it."""
    path = folder / CONFIG
    config = completed
    if path.exists():
        config = text_format.Parse(path.read_text(), pb.ModelConfig())
        config.backend = config.backend or completed.backend
        shutil.copyfile(path, path.with_name(f"{CONFIG}.before-tune"))
    path.write_text("# Changed by `inferd tune`.\n" + text_format.MessageToString(applied(config, setting)))
    print(f"written: {path}")
