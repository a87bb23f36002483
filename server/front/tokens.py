"""The file of tokens: one a line, with what its bearer may do.

    # token                     RPC groups               models, by pattern
    3f0c7a1e5d                  groups=inference,health  models=resnet*,bert
    9b2e44c0aa
    *                           groups=health

A token without `groups` may call everything, one without `models` use every model. The line `*` is of callers that send
no token; without it they may do nothing. Several tokens may have the same rights, so that one can replace another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from _native.transport.access import GROUPS

ANYBODY = "*"
MAX_TOKEN = 256
_TOKEN = re.compile(r"[A-Za-z0-9\-._~+/]+=*")  # b64token of RFC 6750


class TokenFileError(ValueError):
    """A file of tokens that cannot be used. The text names file and line, and never a token."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line. The token is "" for callers without one; `models` is None for every model."""

    token: str
    groups: tuple[str, ...]
    models: tuple[str, ...] | None

    def __repr__(self) -> str:
        return f"Entry(groups={self.groups}, models={self.models})"  # never the token


def parse(text: str, name: str) -> tuple[Entry, ...]:
    """The entries of a file's text; `name` is for messages.

    Raises:
        TokenFileError: a line is wrong, or two lines are of one token.
    """
    entries = tuple(_entries(text, name))
    tokens = [entry.token for entry in entries]
    if len(set(tokens)) != len(tokens):
        raise TokenFileError(f"{name}: a token stands there more than once")
    return entries


def _entries(text: str, name: str) -> Iterator[Entry]:
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#", 1)[0].split()
        if words:
            yield _entry(words, f"{name}:{number}")


def _entry(words: list[str], where: str) -> Entry:
    token = "" if words[0] == ANYBODY else words[0]
    if token and (len(token) > MAX_TOKEN or not _TOKEN.fullmatch(token)):
        raise TokenFileError(
            f"{where}: a token is 1 to {MAX_TOKEN} of the characters A-Z a-z 0-9 - . _ ~ + / and = last"
        )
    rights: dict[str, tuple[str, ...]] = {}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or key not in ("groups", "models") or key in rights:
            raise TokenFileError(f"{where}: expected TOKEN [groups=A,B] [models=PATTERN,PATTERN]")
        rights[key] = tuple(filter(None, value.split(",")))
    for group in rights.get("groups", ()):
        if group not in GROUPS:
            raise TokenFileError(f"{where}: unknown group {group!r}, expected some of {', '.join(GROUPS)}")
    return Entry(token, rights.get("groups", GROUPS), rights.get("models"))


class TokenFile:
    """A file of tokens that may change while the server runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: object = None

    def changed(self) -> tuple[Entry, ...] | None:
        """The entries, unless the file is as it was at the last call. May block.

        Raises:
            TokenFileError: it cannot be read, or is wrong; once for each change.
        """
        try:
            status = self._path.stat()
            seen: object = (status.st_mtime_ns, status.st_size, status.st_ino)
            text = self._path.read_text("utf-8") if seen != self._seen else None
        except OSError as error:
            seen, text, problem = error.errno, None, error.strerror
        except UnicodeDecodeError:
            problem = "is not UTF-8"
        else:
            problem = ""
        if seen == self._seen:
            return None
        self._seen = seen
        if text is None:
            raise TokenFileError(f"{self._path}: {problem}")
        return parse(text, str(self._path))
