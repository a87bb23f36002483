"""`inferd top`: the present work of a server, as a table."""

from __future__ import annotations

import json
import sys
import time

from inferd.backends.installing import pip_install
from inferd.server.tools.looking import Target
from inferd.server.tools.rates import Choice, Look, between
from inferd.server.tools.rows import table


def once(target: Target, interval: float, form: str, choice: Choice) -> int:
    """Print the work of one interval.

    Args:
        target: the source.
        interval: seconds.
        form: "table" or "json".
        choice: the shown models.

    Returns:
        The exit status.
    """
    try:
        before = target.look()
        time.sleep(interval)
        rates = between(before, target.look(), choice)
    except (OSError, ValueError) as error:
        print(f"inferd: top: {target.url}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(rates.as_json()) if form == "json" else "\n".join(table(rates)))
    return 0


def watch(target: Target, interval: float, choice: Choice) -> int:
    """Show the work on the terminal until the user stops it; the exit status."""
    try:
        from inferd.server.tools.screen import Screen
    except ImportError:
        line = pip_install("inferd[tui]")
        print(f"inferd: top: the screen needs textual: {line}; or use --once, which does not need it", file=sys.stderr)
        return 1
    first: Look
    try:
        first = target.look()
    except (OSError, ValueError) as error:
        print(f"inferd: top: {target.url}: {error}", file=sys.stderr)
        return 1
    Screen(target, interval, first, choice).run()
    return 0
