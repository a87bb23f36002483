"""The pages of `--help`. Each option has a line of its own, so that users can search for it, and its meaning below.

cyclopts knows the commands, their options and their meanings. Its own pages need rich, whose import takes longer than
all the rest of a page.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from inferd.server.program import COMMANDS, GROUPS, MEANING, named, program

if TYPE_CHECKING:
    from cyclopts import App
    from cyclopts.argument import Argument

ASKED = ("--help", "-h")
WIDTH = 100  # the longest line, even on a wider terminal
NOTHING = ("", "false")  # defaults that are not shown


def asked(tokens: Sequence[str]) -> str:
    """The page that a command line requests; empty if it requests none, or an unknown one.

    A group's name alone also requests its page.
    """
    before = list(tokens[: tokens.index("--")] if "--" in tokens else tokens)
    rest = [token for token in before if token not in ASKED]
    chain = named(rest)
    if chain in COMMANDS:
        return page(chain) if len(rest) != len(before) else ""
    return page(chain) if rest == list(chain) else ""


def page(chain: tuple[str, ...]) -> str:
    """The page of a command, of a group, or of the program, which is ()."""
    parts = list(_of_command(chain) if chain in COMMANDS else _of_group(chain))
    return "\n\n".join(parts) + "\n"


def _of_group(chain: tuple[str, ...]) -> Iterator[str]:
    yield f"Usage: {' '.join(['inferd', *chain])} COMMAND"
    yield _wrapped(GROUPS.get(chain, MEANING))
    entries = []
    for each, command in COMMANDS.items():
        if each[: len(chain)] != chain:
            continue
        inner = each[: len(chain) + 1]
        entry = (inner[-1], GROUPS.get(inner, command.summary))
        if entry not in entries:
            entries.append(entry)
    yield "Commands:\n" + "\n".join(map(_entry, entries))
    if chain:
        yield _wrapped(f"`inferd {' '.join(chain)} COMMAND --help` has the options of one.")
    else:
        yield "Options:\n" + "\n".join(
            map(
                _entry,
                [
                    ("--help, -h", "This page, or that of a command."),
                    ("--version", "The version, the build and the frameworks."),
                ],
            )
        )


def _of_command(chain: tuple[str, ...]) -> Iterator[str]:
    root = program()
    apps = [root]
    for name in chain:
        apps.append(apps[-1][name])
    with root.app_stack(apps):
        arguments = [each for each in apps[-1].assemble_argument_collection(parse_docstring=True) if each.show]
    options = [each for each in arguments if each.index is None]
    others = [each for each in arguments if each.index is not None]
    yield f"Usage: {' '.join(['inferd', *chain])} {COMMANDS[chain].usage or _usage(others, options)}"
    yield from map(_wrapped, _meaning(apps[-1]))
    if others:
        yield "Arguments:\n" + "\n".join(map(_described, others))
    headings = _headings(chain)
    part: list[str] = []
    heading = "Options"
    for each in options:
        if each.name in headings:
            if part:
                yield f"{heading}:\n" + "\n".join(part)
            heading, part = headings[each.name], []
        part.append(_described(each))
    if part:
        yield f"{heading}:\n" + "\n".join(part)


def _headings(chain: tuple[str, ...]) -> dict[str, str]:
    """The first options of the parts of a long list, and their headings."""
    if chain != ("serve",):
        return {}
    from inferd.server.settings import sections

    return {f"--{part[0].name.replace('_', '-')}": heading for heading, part in sections()}


def _meaning(app: App) -> Iterator[str]:
    """The paragraphs of a command's docstring before its arguments."""
    import inspect  # imported only here, because it is slow

    for paragraph in inspect.cleandoc(app.help).split("\n\n"):
        if paragraph.startswith(("Args:", "Raises:", "Returns:")):
            return
        yield paragraph


def _usage(others: Iterable[Argument], options: Iterable[Argument]) -> str:
    said = [f"{_label(each)}" for each in options if each.required]
    said.append("[OPTIONS]")
    for each in others:
        name = _name(each) + ("..." if each.is_var_positional() else "")
        said.append(name if each.required else f"[{name}]")
    return " ".join(said)


def _described(argument: Argument) -> str:
    label = _label(argument)
    default = _default(argument)
    if argument.required:
        label += " [required]"
    elif default not in NOTHING:
        label += f" [default: {default}]"
    return _entry((label, argument.parameter.help or ""))


def _name(argument: Argument) -> str:
    """The name of a positional argument."""
    return argument.name.lstrip("-").upper()


def _label(argument: Argument) -> str:
    """An option's spellings and value."""
    names = sorted((name for name in argument.names if name.startswith("-")), key=lambda name: name[:2] != "--")
    if argument.index is not None:
        return ", ".join([_name(argument), *names])
    value = _value(argument.hint)
    return ", ".join(names) + (f" {value}" if value else "")


def _value(hint: Any) -> str:
    """The placeholder of an option's value, by its type; empty for a switch."""
    inner = [each for each in get_args(hint) if each not in (type(None), Ellipsis)]
    if get_origin(hint) is Literal:
        return "|".join(map(str, inner))
    if get_origin(hint) is tuple:
        return f"{_value(inner[0])}..."
    if inner:
        return "|".join(filter(None, map(_value, inner)))
    return "" if hint is bool else str(hint.__name__).upper()


def _default(argument: Argument) -> str:
    """The default as written on the command line; empty without one."""
    default = argument.field_info.default
    if default is None or default is argument.field_info.empty:
        return ""
    if isinstance(default, tuple):
        return " ".join(map(str, default))
    return str(default).lower() if isinstance(default, bool) else str(default)


def _entry(entry: tuple[str, str]) -> str:
    label, meaning = entry
    return f"  {label}\n{_wrapped(meaning, ' ' * 6)}".rstrip()


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(
        " ".join(text.split()),
        min(_columns(), WIDTH),
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _columns() -> int:
    """The width of the terminal."""
    told = os.environ.get("COLUMNS", "")
    if told.isdecimal() and int(told) > 0:
        return int(told)
    try:
        return os.get_terminal_size(1).columns or WIDTH
    except OSError:
        return WIDTH
