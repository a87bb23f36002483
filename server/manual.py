"""How `--help` looks: each option on a line of its own, whole, so that it can be searched for; its meaning below."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from server.settings import sections, written

if TYPE_CHECKING:
    from cyclopts.help import HelpEntry, HelpPanel

WIDTH = 100  # lines are not made longer on a wide terminal
DEFAULTS = {f"--{field.name.replace('_', '-')}": written(field.default) for _, part in sections() for field in part}
NOTHING = (None, "", "()", '""', "false", "False")  # defaults that need not be said
HEADINGS = {f"--{part[0].name.replace('_', '-')}": heading for heading, part in sections()}
FIRST = next(iter(HEADINGS))  # an option that only `serve` has


class Manual:
    """A formatter of help for cyclopts; consoles are rich's."""

    def __call__(self, console: Any, options: Any, panel: HelpPanel) -> None:  # noqa: ARG002
        """Write one panel of a command's help."""
        lines: list[str] = []
        headings = HEADINGS if any(entry.display_labels[0] == FIRST for entry in panel.entries) else {}
        for entry in panel.entries:
            heading = headings.get(entry.display_labels[0]) or ("" if lines else panel.title)
            if heading:
                lines += ["", f"{heading}:"] if lines else [f"{heading}:"]
            lines.append(f"  {_signature(entry)}")
            lines += textwrap.wrap(
                _plain(console, entry.description),
                min(console.width, WIDTH),
                initial_indent=" " * 6,
                subsequent_indent=" " * 6,
                break_on_hyphens=False,
                break_long_words=False,
            )
        if lines:
            console.print("\n".join(lines) + "\n", highlight=False, markup=False, soft_wrap=True)

    def render_usage(self, console: Any, options: Any, usage: Any) -> None:  # noqa: ARG002
        console.print(f"Usage: {_plain(console, usage).removeprefix('Usage: ')}\n", highlight=False, markup=False)


def _signature(entry: HelpEntry) -> str:
    """The option, what is given to it, and its default."""
    label = ", ".join(entry.display_labels_with_metavar)
    if entry.choices:
        label = label.replace("CHOICE", "|".join(entry.choices))
    if entry.required:
        return f"{label} [required]"
    default = DEFAULTS.get(entry.display_labels[0]) or entry.default
    return label if default in NOTHING else f"{label} [default: {default}]"


def _plain(console: Any, text: Any) -> str:
    with console.capture() as captured:
        console.print(text, highlight=False, soft_wrap=True)
    return " ".join(captured.get().split())
