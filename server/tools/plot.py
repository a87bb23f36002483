"""`inferd plot`: pictures of results of `inferd perf`."""

from __future__ import annotations

import html
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from inferd.backends.installing import pip_install
from inferd.server.errors import Misused
from inferd.server.tools.files import check_writable

PARTS = ("queue", "input", "compute", "output")
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#999999")
REST = "elsewhere"
"""The rest of a request's time: the network, HTTP/2, and the client."""


@dataclass(frozen=True, slots=True)
class Run:
    """The results of one model in a file of `inferd perf --out`, and the name that they have in pictures."""

    name: str
    results: dict[str, Any]

    @property
    def levels(self) -> list[dict[str, Any]]:
        """In order."""
        return sorted((each for each in self.results["levels"] if each["requests"]), key=lambda each: each["level"])

    def values(self, key: str) -> list[float]:
        """A value of each level."""
        return [each[key] for each in self.levels]


def read(paths: Sequence[Path]) -> list[Run]:
    """The runs of files.

    Raises:
        Misused: a file has another form.
    """
    found = []
    for path in paths:
        try:
            results = json.loads(path.read_text())
        except OSError as error:
            raise Misused(f"{path}: {(error.strerror or str(error)).lower()}") from None
        except ValueError as error:
            raise Misused(f"{path}: it is not JSON: {error}") from None
        if not isinstance(results, dict) or results.get("tool") != "inferd perf" or not results.get("levels"):
            raise Misused(f"{path}: expected a file that `inferd perf --out run.json` has written")
        if not any(each["requests"] for each in results["levels"]):
            raise Misused(f"{path}: no request of this run was answered")
        models = list(dict.fromkeys(each.get("model", results["model"]) for each in results["levels"]))
        for model in models:
            levels = [each for each in results["levels"] if each.get("model", model) == model]
            if not any(each["requests"] for each in levels):
                continue
            name = f"{path.stem} {model}" if len(models) > 1 else path.stem
            found.append(Run(name, {**results, "model": model, "levels": levels}))
    return found


def plot(paths: Sequence[Path], out: Path) -> None:
    """Draw runs: into one .html, or into .png or .svg.

    Raises:
        Misused: a file is no run, or matplotlib is not installed.
    """
    check_writable("--out", out, ".html", ".png", ".svg")
    if not paths:
        raise Misused("plot: name files that `inferd perf --out run.json` has written")
    runs = read(paths)
    try:
        import matplotlib
    except ImportError:
        raise Misused(f"plot: it needs matplotlib: {pip_install('inferd[plot]')}") from None
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True})
    drawings = _drawings(runs)
    if out.suffix == ".html":
        out.write_text(_page(runs, drawings))
        return
    columns = 2
    rows = -(-len(drawings) // columns)
    figure, places = _figure(rows, columns)
    for place, drawing in zip(places, drawings, strict=False):
        drawing(place)
    for place in places[len(drawings) :]:
        place.set_visible(False)
    figure.savefig(out, dpi=110)


def _figure(rows: int, columns: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * columns, 4.2 * rows), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).ravel())


def _drawings(runs: Sequence[Run]) -> list[Callable[[Any], None]]:
    """Functions that draw into axes, one for each picture."""
    found: list[Callable[[Any], None]] = [lambda axes: _latency_by_rate(axes, runs)]
    told = [run for run in runs if any(run.values("server"))]
    found += [partial(_parts, run=run, named=len(runs) > 1) for run in told]
    if any(any(run.values("batch")) for run in runs):
        found.append(lambda axes: _batches(axes, runs))
    found.append(lambda axes: _distributions(axes, runs))
    return found


def _latency_by_rate(axes: Any, runs: Sequence[Run]) -> None:
    for run, colour in zip(runs, COLOURS * len(runs), strict=False):
        rates = run.values("rate")
        for metric, style in (("p50", "-"), ("p99", "--")):
            times = [value / 1e3 for value in run.values(metric)]
            axes.plot(rates, times, style, marker="o", markersize=4, color=colour, label=f"{run.name} {metric}")
        for each in run.levels:
            axes.annotate(
                f"{each['level']:g}",
                (each["rate"], each["p50"] / 1e3),
                textcoords="offset points",
                xytext=(4, -11),
                fontsize=7,
            )
    axes.set(xlabel="requests per second", ylabel="latency, ms", yscale="log", title="Latency by throughput")
    axes.set_xlim(left=0)
    axes.legend(fontsize=8)


def _parts(axes: Any, run: Run, named: bool) -> None:
    """Stacked bars: the parts of the mean time of a request."""
    levels = [each for each in run.levels if each["server"]]
    bottom = [0.0] * len(levels)
    heights = {part: [each["server"][part] / 1e3 for each in levels] for part in PARTS}
    heights[REST] = [max(each["mean"] - sum(each["server"][part] for part in PARTS), 0.0) / 1e3 for each in levels]
    for (part, values), colour in zip(heights.items(), (*COLOURS[:4], "#bbbbbb"), strict=True):
        axes.bar(range(len(levels)), values, bottom=bottom, color=colour, label=part, width=0.7)
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    axes.set_xticks(range(len(levels)), [f"{each['level']:g}" for each in levels])
    title = "Where the time goes" + (f": {run.name}" if named else "")
    axes.set(xlabel=_kind(run), ylabel="mean of a request, ms", title=title)
    axes.legend(fontsize=8)


def _batches(axes: Any, runs: Sequence[Run]) -> None:
    for run, colour in zip(runs, COLOURS * len(runs), strict=False):
        axes.plot(run.values("level"), run.values("batch"), marker="o", markersize=4, color=colour, label=run.name)
    axes.set(xlabel=_kind(runs[0]), ylabel="rows of an execution", title="Batch sizes")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)


def _distributions(axes: Any, runs: Sequence[Run]) -> None:
    """The share of calls that took longer, at each run's level with the highest rate."""
    for run, colour in zip(runs, COLOURS * len(runs), strict=False):
        level = max(run.levels, key=lambda each: each["rate"])
        total = sum(calls for _, calls in level["histogram"])
        times, shares, seen = [], [], 0
        for bound, calls in level["histogram"]:
            times.append(bound / 1e3)
            shares.append((total - seen) / total)
            seen += calls
        axes.plot(times, shares, color=colour, label=f"{run.name} at {level['level']:g}", drawstyle="steps-post")
    title = "Calls that took longer, at the highest throughput"
    axes.set(xlabel="ms", ylabel="share of calls", xscale="log", yscale="log", title=title)
    axes.legend(fontsize=8)


def _kind(run: Run) -> str:
    return "requests per second that were due" if run.levels[0]["kind"] == "rate" else "requests in flight"


def _page(runs: Sequence[Run], drawings: Sequence[Callable[[Any], None]]) -> str:
    """One self-contained file without scripts."""
    pictures = []
    for drawing in drawings:
        figure, (axes,) = _figure(1, 1)
        drawing(axes)
        text = io.StringIO()
        figure.savefig(text, format="svg")
        pictures.append(text.getvalue()[text.getvalue().index("<svg") :])
    facts = "".join(
        f"<li><b>{html.escape(run.name)}</b>: {html.escape(run.results['model'])} of {html.escape(run.results['url'])} "
        f"({html.escape(run.results['server']['name'])} {html.escape(run.results['server']['version'])}), "
        f"{html.escape(run.results['started'])}</li>"
        for run in runs
    )
    keys = ("level", "rate", "inferences", "mean", "p50", "p90", "p95", "p99", "p999", "max", "batch")
    head = "".join(f"<th>{key}</th>" for key in ("run", *keys))
    rows = "".join(
        f"<tr><td>{html.escape(run.name)}</td>" + "".join(f"<td>{each[key]:,.1f}</td>" for key in keys) + "</tr>"
        for run in runs
        for each in run.levels
    )
    style = (
        "body{font:14px sans-serif;margin:2em;max-width:100em}div{display:flex;flex-wrap:wrap}"
        "svg{width:44em;height:auto}td,th{padding:.2em .8em;text-align:right}table{border-collapse:collapse}"
        "tr:nth-child(even){background:#f4f4f4}"
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>inferd perf</title><style>{style}</style>'
        f"<h1>inferd perf</h1><ul>{facts}</ul><div>{''.join(pictures)}</div>"
        f"<h2>Figures</h2><p>Times in microseconds.</p><table><tr>{head}</tr>{rows}</table></html>\n"
    )
