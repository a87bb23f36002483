"""Translates tritonserver's spelling of the command line: for `serve`, and commands that show its options."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Iterator, Sequence

from inferd.server.errors import Misused
from inferd.server.foreign import FOREIGN, Foreign, Refused, Replaced
from inferd.server.settings import Settings

TRUTH = {"true": "true", "1": "true", "false": "false", "0": "false"}
ALIASES = {"model-store": "model-repository"}
ANY_CASE = {"model-control-mode"}
"""Options whose values tritonserver takes in upper case, too."""
FLAGS = {field.name.replace("_", "-") for field in dataclasses.fields(Settings) if field.type == "bool"}
VALUED = {"config"} | {field.name.replace("_", "-") for field in dataclasses.fields(Settings) if field.type != "bool"}
REPOSITORY = "model-repository"
"""The option that an argument of `serve` without an option's name stands for."""
OTHER_VARIABLES = ("INFERD_CONFIG", "INFERD_DEBUG_COUNTERS", "INFERD_CACHE")
OF_KUBERNETES = re.compile(r"INFERD_(SERVICE|PORT)(_|$)")


def translated(tokens: Sequence[str], warn: list[str]) -> list[str]:
    """The tokens in this program's spelling: aliases replaced, `--x true` joined, tritonserver's other options removed.

    The first token is the command. Another token that is neither an option nor the value of one is a model repository.

    Lines about options that were ignored or replaced are appended to `warn`.

    Raises:
        Misused: options are refused or lack their value; the text names all of them.
    """
    kept: list[str] = []
    wrong: list[str] = []
    rest = iter(range(len(tokens)))
    for i in rest:
        option, equals, value = tokens[i].partition("=")
        if not option.startswith("--"):
            kept.append(tokens[i] if option.startswith("-") or i == 0 else f"--{REPOSITORY}={tokens[i]}")
            continue
        name = ALIASES.get(option[2:], option[2:])
        foreign = FOREIGN.get(name)
        if not equals and _takes_next(name, foreign, tokens[i + 1 : i + 2]):
            value, equals = tokens[next(rest)], "="
        if name in ANY_CASE:
            value = value.lower()
        if name in FLAGS and equals and value.lower() not in TRUTH:
            wrong.append(f"--{name}: expected true or false, got {value!r}")
        elif name in VALUED and not equals and (i + 1 == len(tokens) or tokens[i + 1].startswith("--")):
            wrong.append(f"--{name}: it needs a value")
        elif foreign is None:
            kept.append(f"--{name}{equals}{value}")
            if name in VALUED and not equals:
                kept.append(tokens[next(rest)])
        else:
            try:
                kept += _judge(name, foreign, value, warn)
            except Misused as error:
                wrong.append(str(error))
    if wrong:
        raise Misused("\n".join(wrong))
    return kept


def _takes_next(name: str, foreign: Foreign | None, following: Sequence[str]) -> bool:
    """Whether the token after the option is its value."""
    if not following:
        return False
    if foreign is None:
        return name in ANY_CASE or (name in FLAGS and not following[0].startswith("-"))
    return following[0].lower() in TRUTH if foreign.is_flag else not following[0].startswith("--")


def _judge(name: str, foreign: Foreign, value: str, warn: list[str]) -> list[str]:
    """The options of this program in place of one of tritonserver's; empty if it has no effect."""
    said = TRUTH.get(value.lower(), value.lower()) if foreign.is_flag else value.lower()
    if foreign.is_flag and not said:
        said = "true"
    if isinstance(foreign, Refused):
        if said not in foreign.harmless:
            hint = f" (only {' or '.join(foreign.harmless)} is accepted)" if foreign.harmless else ""
            raise Misused(f"--{name}: {foreign.reason}{hint}")
    elif said not in foreign.silent:
        if isinstance(foreign, Replaced):
            instead = f"--{foreign.option}={foreign.value.format(said)}"
            warn.append(f"--{name} is deprecated: it is taken for {instead}")
            return [instead]
        warn.append(f"--{name} is ignored: {foreign.reason}")
    return []


def unknown_variables(environment: Iterable[str]) -> Iterator[str]:
    """A line for each INFERD_ variable that is no option; Kubernetes makes some for a Service of that name."""
    known = {*(f"INFERD_{field.name.upper()}" for field in dataclasses.fields(Settings)), *OTHER_VARIABLES}
    for name in sorted(environment):
        if name.startswith("INFERD_") and name not in known and not OF_KUBERNETES.match(name):
            near = difflib.get_close_matches(name, known, n=1)
            yield f"{name} is ignored: there is no such option{f', did you mean {near[0]}?' if near else ''}"
