"""`${NAME}` and `${NAME:-default}` in a config.pbtxt: values of the server's environment.

ModelConfig shows a configuration to clients, and the author of a model need not be the operator of the server. So only
variables that the operator allows by name or pattern are available; one that sounds like a secret must be allowed by
its full name.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from inferd.server.errors import ConfigError
from inferd.server.settings import DEFAULTS

log = logging.getLogger("inferd.config")

SECRETS = re.compile(r"SECRET|TOKEN|PASS|KEY|CREDENTIAL|AUTH|COOKIE|PRIVATE|DSN|SIGNATURE", re.IGNORECASE)
"""Parts of the names of secrets."""

_VARIABLE = r"""(?P<literal> \$\$\{ )
  | \$\{ (?P<name> [A-Za-z_][A-Za-z0-9_]* ) (?: :- (?P<default> [^}\n]* ) )? \}
  | (?P<wrong> \$\{ )"""
_OUTSIDE = re.compile(rf"""\#[^\n]* | (?P<quote> ["'] ) | {_VARIABLE}""", re.VERBOSE)
_INSIDE = {
    quote: re.compile(rf"\\. | (?P<quote> {quote} ) | {_VARIABLE}", re.VERBOSE | re.DOTALL) for quote in ("'", '"')
}
_PLACEHOLDER = re.compile(r"""\$\{[^}"'\n]{0,64}\}?""")
_OF_A_PARAMETER = re.compile(r"\bstring_value\s*:?\s*\Z")
"""The text before a parameter's value. Templates of configurations leave placeholders there, which models look for."""
_FORBIDDEN = re.compile(r"""["'\\\x00-\x1f\x7f]""")
"""Characters in a value that would end a string or a line of the configuration."""


@dataclass(frozen=True, slots=True)
class Variables:
    """The environment variables that configurations may use.

    Attributes:
        allowed: names, or patterns of names as shells have them.
        environment: of the server.
    """

    allowed: Sequence[str] = DEFAULTS.config_variable
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def fill(self, text: str, path: Path) -> str:
        """The text of a configuration with values for variables; its line breaks stay where they are.

        `$${` stands for `${`. Comments stay as they are. So does, with a warning, a `${...}` in a parameter's
        string_value that cannot mean a variable: it has no default, and contains no name or a name that is not allowed.

        Raises:
            ConfigError: a variable may not be used, is not set and has no default, or its value fits no text.
        """
        if "${" not in text:
            return text
        parts: list[str] = []
        wrong: list[str] = []
        done, pattern = 0, _OUTSIDE
        of_a_parameter = False
        while found := pattern.search(text, done):
            parts.append(text[done : found.start()])
            done = found.end()
            if found["literal"]:
                parts.append("${")
            elif of_a_parameter and self._is_a_placeholder(found):
                parts.append(found.group())
                log.warning(
                    "%s:%d: %s is left as it is in the value of a parameter: it names no variable that a "
                    "configuration may use",
                    path,
                    _line(text, done),
                    _PLACEHOLDER.findall(text[found.start() :])[0],
                )
            elif found["wrong"]:
                expected = "expected ${NAME} or ${NAME:-default}; for the text itself write $${"
                wrong.append(f"{path}:{_line(text, done)}: {expected}")
            elif found["name"]:
                try:
                    parts.append(self._value(found["name"], found["default"]))
                except ConfigError as error:
                    wrong.append(f"{path}:{_line(text, done)}: {error}")
            else:
                parts.append(found.group())
                if found["quote"]:
                    of_a_parameter = pattern is _OUTSIDE and bool(
                        _OF_A_PARAMETER.search(text[max(0, found.start() - 64) : found.start()])
                    )
                    pattern = _INSIDE[found["quote"]] if pattern is _OUTSIDE else _OUTSIDE
        if wrong:
            raise ConfigError("\n".join(wrong))
        return "".join((*parts, text[done:]))

    def _is_a_placeholder(self, found: re.Match[str]) -> bool:
        if found["wrong"]:
            return True
        return found["name"] is not None and found["default"] is None and not self._may_use(found["name"])

    def _value(self, name: str, default: str | None) -> str:
        if not self._may_use(name):
            raise ConfigError(
                f"variable {name} may not be used by a configuration: the server would need "
                f"--config-variable={name}; there is {', '.join(self.allowed) or 'none'}"
            )
        value = self.environment.get(name) or default
        if value is None:
            raise ConfigError(
                f"variable {name} is not set or empty: set it for the server, or write ${{{name}:-default}}"
            )
        if _FORBIDDEN.search(value):
            raise ConfigError(f"variable {name} has a quote, a backslash or a control character in its value")
        return value

    def _may_use(self, name: str) -> bool:
        if name in self.allowed:
            return True
        return not SECRETS.search(name) and any(fnmatchcase(name, pattern) for pattern in self.allowed)


def _line(text: str, end: int) -> int:
    return text.count("\n", 0, end) + 1
