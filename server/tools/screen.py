"""The screen of `inferd top` (extra `tui`)."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import replace

from rich.text import Text
from textual.app import App, ComposeResult
from textual.widgets import DataTable, Footer, Input, Static

from inferd.server.tools.looking import Target
from inferd.server.tools.rates import SORTS, Choice, Look, Rates, between
from inferd.server.tools.rows import COLUMNS, cells, summary

BARS = "▁▂▃▄▅▆▇█"
KEPT = 20
"""How many values the line of requests per second shows."""


class Screen(App[None]):
    """A table of models that changes.

    Args:
        target: the source.
        interval: seconds between two looks.
        first: the first look.
        choice: the models that are shown at first.
    """

    TITLE = "inferd top"
    BINDINGS = [  # noqa: RUF012 - the library's way
        ("q", "quit", "quit"),
        ("s", "sort", "sort by the next column"),
        ("i", "idle", "idle models"),
        ("slash", "filter", "filter by name"),
    ]
    CSS = "Static { height: 1; padding: 0 1; } #server { text-style: bold; } #problem { color: red; }"
    CSS += " Input { display: none; }"

    def __init__(self, target: Target, interval: float, first: Look, choice: Choice) -> None:
        super().__init__()
        self._target = target
        self._interval = interval
        self._before = first
        self._after = first
        self._choice = choice
        self._past: dict[tuple[str, str], deque[float]] = defaultdict(lambda: deque(maxlen=KEPT))

    def compose(self) -> ComposeResult:
        # texts have brackets, as of an IPv6 address: they are no markup
        self._server = Static(f"{self._target.url}  a look every {self._interval:g} s", id="server", markup=False)
        self._problem = Static("", id="problem", markup=False)
        self._table: DataTable[Text] = DataTable(cursor_type="row", zebra_stripes=True)
        yield self._server
        yield self._problem
        yield self._table
        yield Input(self._choice.pattern, placeholder="names, with * and ?; Enter")
        yield Footer()

    def on_mount(self) -> None:
        for column in (*COLUMNS, "requests"):
            self._table.add_column(column, key=column)
        self.set_interval(self._interval, self._refresh)

    async def _refresh(self) -> None:
        try:
            after = await asyncio.to_thread(self._target.look)
        except (OSError, ValueError) as error:
            self._problem.update(str(error))
            return
        self._problem.update("")
        self._before, self._after = self._after, after
        rates = between(self._before, after)
        for each in rates.models:
            self._past[each.model, each.version].append(each.requests)
        self._show(rates)

    def _show(self, rates: Rates) -> None:
        choice = self._choice
        chosen = f"  by {choice.sort}" + (f", {choice.pattern}" if choice.pattern else "")
        self._server.update(summary(rates) + chosen + ("" if choice.idle else ", without idle ones"))
        self._table.clear()
        for each in choice.of(rates.models):
            self._table.add_row(*map(Text, (*cells(each), sparkline(self._past[each.model, each.version]))))

    def _choose(self, choice: Choice) -> None:
        self._choice = choice
        self._show(between(self._before, self._after))

    def action_sort(self) -> None:
        self._choose(replace(self._choice, sort=SORTS[(SORTS.index(self._choice.sort) + 1) % len(SORTS)]))

    def action_idle(self) -> None:
        self._choose(replace(self._choice, idle=not self._choice.idle))

    def action_filter(self) -> None:
        field = self.query_one(Input)
        field.display = True
        field.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.input.display = False
        self._table.focus()
        self._choose(replace(self._choice, pattern=event.value))


def sparkline(values: Iterable[float]) -> str:
    """The values as bars."""
    kept = list(values)
    most = max(kept, default=0.0)
    return "".join(BARS[round((len(BARS) - 1) * value / most)] if most else BARS[0] for value in kept)
