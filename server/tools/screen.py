"""The screen of `inferd top` (extra `tui`)."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Iterable

from textual.app import App, ComposeResult
from textual.widgets import DataTable, Footer, Static

from server.tools.looking import Target
from server.tools.rates import Look, between
from server.tools.rows import COLUMNS, cells, summary

BARS = "▁▂▃▄▅▆▇█"
KEPT = 20
"""How many values the line of requests per second shows."""


class Screen(App[None]):
    """A table of models that changes.

    Args:
        target: the source.
        interval: seconds between two looks.
        first: the first look.
    """

    TITLE = "inferd top"
    BINDINGS = [("q", "quit", "quit")]  # noqa: RUF012 - the library's way
    CSS = "Static { height: 1; padding: 0 1; } #server { text-style: bold; } #problem { color: red; }"

    def __init__(self, target: Target, interval: float, first: Look) -> None:
        super().__init__()
        self._target = target
        self._interval = interval
        self._before = first
        self._past: dict[tuple[str, str], deque[float]] = defaultdict(lambda: deque(maxlen=KEPT))

    def compose(self) -> ComposeResult:
        yield Static(f"{self._target.url}  a look every {self._interval:g} s", id="server")
        yield Static("", id="problem")
        yield DataTable(cursor_type="row", zebra_stripes=True)
        yield Footer()

    def on_mount(self) -> None:
        table = self.query_one(DataTable)
        for column in (*COLUMNS, "requests"):
            table.add_column(column, key=column)
        self.set_interval(self._interval, self._refresh)

    async def _refresh(self) -> None:
        problem = self.query_one("#problem", Static)
        try:
            after = await asyncio.to_thread(self._target.look)
        except (OSError, ValueError) as error:
            problem.update(str(error))
            return
        problem.update("")
        rates = between(self._before, after)
        self._before = after
        self.query_one("#server", Static).update(summary(rates))
        table = self.query_one(DataTable)
        table.clear()
        for each in rates.models:
            past = self._past[each.model, each.version]
            past.append(each.requests)
            table.add_row(*cells(each), sparkline(past))


def sparkline(values: Iterable[float]) -> str:
    """The values as bars."""
    kept = list(values)
    most = max(kept, default=0.0)
    return "".join(BARS[round((len(BARS) - 1) * value / most)] if most else BARS[0] for value in kept)
