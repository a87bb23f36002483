"""Each request of a run in a file, in the format of perf_analyzer's --profile-export-file, which genai-perf reads."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from inferd.server.tools.perf.measuring import Level
from inferd.server.tools.perf.requests import Data


def write_profile(path: Path, levels: Sequence[Level], sent: Mapping[str, Data]) -> None:
    """Write the requests of all levels; times are of the system's clock then, in nanoseconds.

    Args:
        sent: the tensors that each model was sent.
    """
    offset = time.time_ns() - time.monotonic_ns()
    experiments = [_experiment(each, sent[each.model], offset) for each in levels]
    found = {"experiments": experiments, "version": _version(), "service_kind": "triton", "endpoint": ""}
    path.write_text(json.dumps(found) + "\n")


def _experiment(level: Level, data: Data, offset: int) -> dict[str, Any]:
    @cache
    def inputs(turn: int) -> dict[str, Any]:
        return {name: _plain(array) for name, array in data.tensors[turn].items()}

    requests = []
    for each in sorted(level.timed, key=lambda timed: timed.due):
        said: dict[str, Any] = {"timestamp": each.due + offset}
        if each.sequence:
            said["sequence_id"] = each.sequence
        said["request_inputs"] = inputs(each.turn)
        said["response_timestamps"] = [at + offset for at in each.answers]
        outputs = each.outputs or ({},) * len(each.answers)
        said["response_outputs"] = [{name: _plain(array) for name, array in one.items()} for one in outputs]
        requests.append(said)
    mode = "request_rate" if level.kind == "rate" else "concurrency"
    value = level.level if level.kind == "rate" else round(level.level)
    return {
        "experiment": {"mode": mode, "value": value},
        "requests": requests,
        "window_boundaries": [at + offset for at in level.boundaries],
    }


def _plain(array: Any) -> Any:
    """A tensor in JSON: the element, or a flat list of several."""
    found = [each.decode("utf-8", "replace") if isinstance(each, bytes) else each for each in array.ravel().tolist()]
    return found[0] if len(found) == 1 else found


def _version() -> str:
    try:
        return version("inferd")
    except PackageNotFoundError:
        return ""
