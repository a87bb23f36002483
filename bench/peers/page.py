"""docs/performance.md: its tables and pictures, from the recorded results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.peers.comparison import INFERD_C, INFERD_DIGITS, INFERD_PYTHON, TRITON_C, TRITON_DIGITS, TRITON_PYTHON
from bench.table import rule
from inferd.server.tools.plot import COLOURS

BENCH = Path(__file__).resolve().parents[1]
RESULTS = BENCH / "results" / "peers.json"
DOCS = BENCH.parent / "docs"
PAGE = DOCS / "performance.md"
BEGIN, END = "<!-- figures: python -m bench.peers -->", "<!-- end of the figures -->"
LIKE_FOR_LIKE = [
    (ours.name, theirs.name)
    for ours, theirs in ((INFERD_C, TRITON_C), (INFERD_PYTHON, TRITON_PYTHON), (INFERD_DIGITS, TRITON_DIGITS))
]
MARGIN = 1.05
"""Differences below this are noise."""
FIGURES = {"cpu_us": "CPU of the server", "p50_us": "p50", "p99_us": "p99"}
INKS = {"light": "#24292f", "dark": "#e6edf3"}


def best(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """For each figure, that of the best round."""
    found: dict[str, Any] = {"rate": max(each["rate"] for each in rounds)}
    for key in FIGURES:
        found[key] = min((each[key] for each in rounds if each[key] is not None), default=None)
    return found


def _cell(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _best_of(row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: best(rounds) for name, rounds in row["ways"].items() if rounds}


def _where_peers_are_better(found: dict[str, Any]) -> Iterator[str]:
    for row in found["rows"].values():
        bests = _best_of(row)
        for ours, theirs in LIKE_FOR_LIKE:
            if ours not in bests or theirs not in bests:
                continue
            a, b = bests[ours], bests[theirs]
            said = [
                f"{name} {_cell(b[key], 1)} beside {_cell(a[key], 1)} µs"
                for key, name in FIGURES.items()
                if a[key] and b[key] and a[key] > MARGIN * b[key]
            ]
            if b["rate"] > MARGIN * a["rate"]:
                said.append(f"{b['rate']:,.0f} beside {a['rate']:,.0f} answers a second")
            if said:
                yield f"- {row['title']}: **{theirs}** has {'; '.join(said)} of {ours}."


def _row_table(row: dict[str, Any]) -> Iterator[str]:
    yield f"### {row['title']}"
    yield ""
    yield from rule("", "CPU of the server, µs", "answers/s", "p50, µs", "p99, µs")
    for name, figures in _best_of(row).items():
        cells = (
            _cell(figures["cpu_us"], 1),
            _cell(figures["rate"]),
            _cell(figures["p50_us"]),
            _cell(figures["p99_us"]),
        )
        yield f"| {name} | {' | '.join(cells)} |"
    yield ""


def _overload_table(found: dict[str, Any]) -> Iterator[str]:
    yield "### Overload"
    yield ""
    yield from rule(
        "", "capacity/s", "offered", "right answers/s", "of capacity", "refused", "lost", "p99 of the accepted, ms"
    )
    for name, said in found["overload"].items():
        for factor in ("2", "5"):
            one = said[factor]
            cells = (
                _cell(said["capacity"]),
                f"{factor} x",
                _cell(one["goodput"]),
                f"{one['goodput'] / said['capacity']:.0%}",
                _cell(sum(one["refused"].values())),
                _cell(one["lost"]),
                one["accepted_p99_ms"],
            )
            yield f"| {name} | {' | '.join(cells)} |"
    yield ""


def _loading_table(found: dict[str, Any]) -> Iterator[str]:
    yield "### 500 requests a second while a model.py is loaded and unloaded without pause"
    yield ""
    yield from rule("", "loads", "p50, ms: calm, loading", "p99", "p99.9", "max")
    for name, said in found["loading"].items():
        pairs = [
            f"{said['calm'][key] / 1e3:.2f}, {said['loading'][key] / 1e3:.2f}" for key in ("p50", "p99", "p999", "max")
        ]
        yield f"| {name} | {said['loading']['loads']} | {' | '.join(pairs)} |"
    yield ""


def _starts_table(found: dict[str, Any]) -> Iterator[str]:
    yield "### Start and memory"
    yield ""
    yield from rule(
        "", "from the start to the first right answer, s", "resident memory then, MiB", "of it private to a model.py"
    )
    for name, said in found["starts"].items():
        yield f"| {name} | {said['seconds']:.2f} | {said['mib']:.0f} | {_cell(said.get('model_mib'))} |"
    yield ""


def _picture(stem: str, text: str) -> list[str]:
    return [
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{stem}-dark.svg">',
        f'<img alt="{text}" src="{stem}-light.svg"></picture>',
        "",
    ]


def _section(found: dict[str, Any]) -> Iterator[str]:
    machine, effort = found["machine"], found["effort"]
    dates = sorted(row["date"] for row in found["rows"].values())
    load = ", ".join(f"{value:.2f}" for value in found["load_average_before"])
    yield (
        f"{dates[0]} to {dates[-1]}. "
        + "; ".join(f"{k}: {v}" for k, v in machine.items())
        + (f"; load average before: {load}. {effort['rounds']} rounds of {effort['seconds']:g} s.")
    )
    yield ""
    yield "; ".join(f"{name}: {version}" for name, version in found["versions"].items()) + "."
    yield ""
    better = list(_where_peers_are_better(found))
    yield "### Where a peer is better"
    yield ""
    yield from better or ["Nowhere in this run, by more than 5 %."]
    yield ""
    yield from _picture("performance-cpu", "CPU of the server for each request of 64 bytes, by server")
    yield from _picture("performance-curves", "p99 by throughput, by server")
    for row in found["rows"].values():
        yield from _row_table(row)
    yield from _overload_table(found)
    yield from _picture("performance-overload", "Right answers a second at and beyond the capacity")
    yield from _loading_table(found)
    yield from _picture("performance-loading", "Times of requests while models are loaded")
    yield from _starts_table(found)
    if found["absent"]:
        yield "Left out: " + "; ".join(text.splitlines()[0][:200] for text in found["absent"]) + "."


def write(found: dict[str, Any]) -> None:
    """Put the figures into the page, and draw its pictures."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text("\n".join([before + BEGIN, "", *_section(found), "", END + after]))
    drawings: dict[str, Callable[[Any, str], None]] = {
        "cpu": lambda axes, ink: _draw_cpu(axes, ink, found),
        "curves": lambda axes, _: _draw_curves(axes, found),
        "overload": lambda axes, _: _draw_overload(axes, found),
        "loading": lambda axes, _: _draw_loading(axes, found),
    }
    for name, drawing in drawings.items():
        for shade, ink in INKS.items():
            _draw(DOCS / f"performance-{name}-{shade}.svg", ink, drawing)


# ---------------------------------------------------------------------------------------------------------------------
# Pictures


def _draw(path: Path, ink: str, drawing: Callable[[Any, str], None]) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    inks = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), ink)
    # the salt makes the names of marks the same each time
    style: dict[str, Any] = {"svg.fonttype": "none", "svg.hashsalt": path.stem, "legend.labelcolor": ink, **inks}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(8.0, 4.4), layout="constrained")
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
        drawing(axes, ink)
        figure.savefig(path, transparent=True, metadata={"Date": None})


def _colour(name: str) -> str:
    return COLOURS[0] if name.startswith("inferd") else COLOURS[1] if name.startswith("Triton") else "#8c959f"


def _draw_cpu(axes: Any, ink: str, found: dict[str, Any]) -> None:
    values = {name: figures["cpu_us"] for name, figures in _best_of(found["rows"]["small_32"]).items()}
    names = sorted(values, key=lambda name: values[name], reverse=True)
    axes.barh(names, [values[name] for name in names], color=[_colour(name) for name in names])
    for at, name in enumerate(names):
        axes.annotate(f" {values[name]:.1f}", (values[name], at), va="center", fontsize=8, color=ink)
    axes.set(
        xscale="log", xlabel="µs of CPU a request (logarithmic)", title="CPU of the server, 64 bytes, 32 in flight"
    )


def _draw_curves(axes: Any, found: dict[str, Any]) -> None:
    markers: dict[str, Iterator[str]] = {}
    for name, points in found["curves"].items():
        marker = next(markers.setdefault(_colour(name), iter("os^Dv<>p")))
        axes.plot(
            [each["rate"] for each in points],
            [each["p99_us"] / 1e3 for each in points],
            marker=marker,
            markersize=5,
            color=_colour(name),
            label=name,
        )
    axes.set(xscale="log", yscale="log", xlabel="requests a second (each line ends where the server does not keep up)")
    axes.set(ylabel="p99, ms", title="Latency by throughput, 64 bytes, requests independent of each other")
    axes.legend(fontsize=7, frameon=False)


def _bars(axes: Any, groups: Sequence[str], series: dict[str, Sequence[float]]) -> None:
    width = 0.8 / len(series)
    for at, ((name, values), alpha) in enumerate(zip(series.items(), (1.0, 0.65, 0.4), strict=False)):
        places = [place + at * width for place in range(len(groups))]
        axes.bar(places, values, width, label=name, color=[_colour(group) for group in groups], alpha=alpha)
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(groups))], groups, fontsize=8)
    axes.legend(fontsize=8, frameon=False)


def _draw_overload(axes: Any, found: dict[str, Any]) -> None:
    said = found["overload"]
    series = {"capacity": [each["capacity"] for each in said.values()]}
    series |= {f"{factor} x offered": [each[factor]["goodput"] for each in said.values()] for factor in ("2", "5")}
    _bars(axes, list(said), series)
    axes.set(ylabel="right answers a second", title="Beyond the capacity of a busy model")


def _draw_loading(axes: Any, found: dict[str, Any]) -> None:
    said = found["loading"]
    series = {state: [each[state]["p99"] / 1e3 for each in said.values()] for state in ("calm", "loading")}
    _bars(axes, list(said), series)
    axes.set(ylabel="p99, ms", yscale="log", title="500 requests a second while a model.py loads and unloads")
