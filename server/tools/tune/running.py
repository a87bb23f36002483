"""All of a search: trials under load, the results, and the changed configuration."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from inferd.server.errors import Misused
from inferd.server.tools.files import check_writable
from inferd.server.tools.tables import table
from inferd.server.tools.tune.configurations import all_axes, applied, lines, setting_of
from inferd.server.tools.tune.pair import Pair
from inferd.server.tools.tune.search import Search, Setting, Settings, Tried, Wanted
from inferd.server.tools.tune.trial import CONFIG
from inferd_client.pb import model_config_pb2 as pb


def tune(wanted: Wanted, *, write: bool, out: Path | None) -> int:
    """Search, print the trials and the best one, and with `write` put it into the models' configurations.

    Raises:
        CallFailed: a model cannot be served with its own configuration.
        Misused: a model cannot be tuned.
    """
    if out is not None:
        check_writable("--out", out, ".json")
    with (
        _interrupted(),
        tempfile.TemporaryDirectory(prefix="inferd-tune-") as folder,
        Pair(wanted, Path(folder)) as pair,
    ):
        configs = pair.configs
        for name, config in configs.items():
            if config.model_transaction_policy.decoupled:
                raise Misused(f"tune: model '{name}' is decoupled: tune the models that it asks")
        own = ((name, setting_of(each)) for name, each in configs.items() if not each.HasField("ensemble_scheduling"))
        start = Settings(tuple(own))
        search = Search(pair.measure, _tell, wanted.runs)
        print(f"{', '.join(wanted.models)}, as it is: {start.text()}", file=sys.stderr)
        best = search.settle(search.climb(start, all_axes(configs, start, wanted)))
    first = search.tried[start]
    _print_front(search)
    if out is not None:
        out.write_text(
            json.dumps({"tool": "inferd tune", "models": wanted.models, "tried": _as_json(search)}, indent=1)
        )
    if not best.best:
        print("no tried configuration is within the limits")
        return 1
    gain = f", {best.rate / first.rate:.2f} x what it is" if first.rate else ""
    print(f"\nbest of {len(search.tried)}: {best.setting.text()}: {_rates(best)} inferences/s{gain}")
    for name, setting in best.setting.of:
        print(
            f"\n# {name}\n{lines(configs[name], setting)}" if len(configs) > 1 else f"\n{lines(configs[name], setting)}"
        )
        if write:
            _write(wanted.repository / name, configs[name], setting)
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
    if not tried.best:
        said = tried.problem.splitlines()[0]
    else:
        said = f"{_rates(tried)} inferences/s at {tried.best[0].level:g} in flight, p99 {_worst(tried, 'p99'):.2f} ms"
        said += f", {tried.memory_mb} MiB"
        if tried.noise:
            said += "; noise: the turns say more than in flight / latency, which is shown"
    print(f"  {tried.setting.text()}: {said}", file=sys.stderr, flush=True)


def _rates(tried: Tried) -> str:
    if len(tried.best) == 1:
        return f"{tried.rate:.1f}"
    return ", ".join(f"{each.model} {rate:.1f}" for each, rate in zip(tried.best, tried.rates, strict=True))


def _worst(tried: Tried, name: str) -> float:
    """Milliseconds of the model that has the most."""
    return max(float(getattr(each, name)) for each in tried.best) / 1e3


def _print_front(search: Search) -> None:
    rows = [
        (
            each.setting.text(),
            _rates(each),
            f"{each.best[0].level:g}",
            f"{_worst(each, 'p50'):.2f}",
            f"{_worst(each, 'p99'):.2f}",
            each.memory_mb,
        )
        for each in search.front()
    ]
    if rows:
        print("nothing that was tried is better than these in throughput, latency and memory:\n")
        print(table(("setting", "inferences/s", "in flight", "p50 ms", "p99 ms", "MiB"), rows, "lrrrrr"))


def _as_json(search: Search) -> list[Mapping[str, Any]]:
    return [
        {
            "settings": {name: asdict(own) for name, own in setting.of},
            "memory_mb": tried.memory_mb,
            "problem": tried.problem,
            "inferences": tried.rate,
            "noise": tried.noise,
            "levels": [each.as_dict() for each in tried.best],
        }
        for setting, tried in search.tried.items()
    ]


def _write(folder: Path, completed: pb.ModelConfig, setting: Setting) -> None:
    """Change the model's config.pbtxt, and keep the former one beside it.

    Args:
        completed: the configuration as the server has completed it, which is written if the file cannot be read here.
    """
    path = folder / CONFIG
    config = completed
    if path.exists():
        with contextlib.suppress(text_format.ParseError):  # it has variables, whose values only the server knows
            config = text_format.Parse(path.read_text(), pb.ModelConfig())
            config.backend = config.backend or completed.backend
        shutil.copyfile(path, path.with_name(f"{CONFIG}.before-tune"))
    path.write_text("# Changed by `inferd tune`.\n" + text_format.MessageToString(applied(config, setting)))
    print(f"written: {path}")
