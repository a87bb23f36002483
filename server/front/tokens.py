"""The file of tokens: each line has a token and the rights of its bearer.

    # token                     RPC groups               models, by pattern
    3f0c7a1e5d                  groups=inference,health  models=resnet*,bert
    9b2e44c0aa                  all
    c41d02ee87                  groups=model-repository  models=mine*  overrides
    *                           groups=health

A line allows only what it says: a token alone may call nothing, `all` means every group. Without `models` every model
may be used. `overrides` allows loads with a configuration and files, which means running code in the server. The line
`*` is for callers without a token; without it they may do nothing. Several tokens may have the same rights, so one can
replace another. A comment begins a line or follows a blank.

A part of a line could allow more than the whole line, where the file was cut or a disk has put zeros. So the last line
must end with a line break, a control character makes the file invalid, and a changed file is used only when two looks
have found the same file.
"""

from __future__ import annotations

import logging
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from inferd._native.service.tokens import GROUPS, TokenTable
from inferd.server.engine.housekeeping.regular_files import read_regular

log = logging.getLogger("inferd.access")

ANYBODY = "*"
ALL = "all"
OVERRIDES = "overrides"
MAX_TOKEN = 256
EXPECTED = "expected TOKEN [all] [groups=A,B] [models=PATTERN,PATTERN] [overrides]"
_HIDDEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029]")  # some would end a line or a pattern
_TOKEN = re.compile(r"[A-Za-z0-9\-._~+/]+=*")  # b64token of RFC 6750

_OTHERS = {stat.S_IROTH: "read", stat.S_IWOTH: "change", stat.S_IROTH | stat.S_IWOTH: "read and change"}

SETTLING = 0.02
"""Seconds between two looks at the start."""
PATIENCE = 50
"""The most looks, at the start, at a file that is being written."""

_Look = tuple[int, ...]


class TokenFileError(ValueError):
    """A file of tokens that cannot be used. The text names file and line, and never a token."""


@dataclass(frozen=True, slots=True)
class Rights:
    """The rights of one line; `models` is None for every model."""

    groups: tuple[str, ...] = ()
    models: tuple[str, ...] | None = None
    overrides: bool = False


def parse(data: bytes, name: str, key: bytes) -> TokenTable:
    """The tokens in a file's content.

    Args:
        data: the content.
        name: of the file, for messages.
        key: of the tokens' ids, see `TokenTable`.

    Raises:
        TokenFileError: a line is wrong or was cut, or two lines are of one token.
    """
    if data and not data.endswith(b"\n"):
        raise TokenFileError(f"{name}: the last line has no end: a file that was cut could allow more than was written")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise TokenFileError(f"{name}: is not UTF-8") from None
    if hidden := _HIDDEN.search(text):
        number = text.count("\n", 0, hidden.start()) + 1
        raise TokenFileError(f"{name}:{number}: the line has a control character: a disk may have lost a part of it")
    table, known, anybody = TokenTable(key), dict[str, int](), False
    for number, words in _lines(text):
        where = f"{name}:{number}"
        spelled = " ".join(words[1:])  # most lines of a long file have the rights of another one
        if words[0] == ANYBODY:
            rights = _rights(words[1:], where)
            is_new, anybody = not anybody, True
            table.allow_anybody(rights.groups, rights.models, overrides=rights.overrides)
        else:
            _check(words[0], where)
            if spelled not in known:
                rights = _rights(words[1:], where)
                known[spelled] = table.add_rights(rights.groups, rights.models, overrides=rights.overrides)
            if not spelled:
                log.warning("%s: a token without rights: write 'all', or groups=", where)
            is_new = table.add(words[0], known[spelled])
        if not is_new:
            raise TokenFileError(f"{where}: the token stands there more than once")
    return table


def _lines(text: str) -> Iterator[tuple[int, list[str]]]:
    """The words of each line that has any, without comments, and its number."""
    begin, number = 0, 0
    while (end := text.find("\n", begin)) >= 0:
        number += 1
        words = text[begin:end].split()
        comment = next((i for i, word in enumerate(words) if word[0] == "#"), len(words))
        if comment:
            yield number, words[:comment]
        begin = end + 1


def _check(token: str, where: str) -> None:
    if len(token) > MAX_TOKEN or not _TOKEN.fullmatch(token):
        raise TokenFileError(
            f"{where}: a token is 1 to {MAX_TOKEN} of the characters A-Z a-z 0-9 - . _ ~ + / and = last"
        )


def _rights(words: list[str], where: str) -> Rights:
    given: dict[str, tuple[str, ...]] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key in given or key not in ((ALL, OVERRIDES) if not equals else ("groups", "models")):
            raise TokenFileError(f"{where}: {EXPECTED}")
        given[key] = tuple(filter(None, value.split(",")))
    if ALL in given and "groups" in given:
        raise TokenFileError(f"{where}: 'all' stands for every group: write it, or groups=")
    groups = GROUPS if ALL in given else given.get("groups", ())
    for group in groups:
        if group not in GROUPS:
            raise TokenFileError(f"{where}: unknown group {group!r}, expected some of {', '.join(GROUPS)}")
    return Rights(groups, given.get("models"), OVERRIDES in given)


class TokenFile:
    """A file of tokens that may change while the server runs.

    Args:
        path: of the file.
        key: of the tokens' ids, see `TokenTable`.
    """

    def __init__(self, path: Path, key: bytes) -> None:
        self._path = path
        self._key = key
        self._used: _Look | None = None  # of the content that was used or rejected last
        self._seen: _Look | None = None  # the previous look

    def first(self) -> TokenTable:
        """The tokens at the start. Blocks for two looks at least.

        Raises:
            TokenFileError: the file cannot be read, is wrong, or does not stay the same.
        """
        for _ in range(PATIENCE):
            table = self.changed()
            if table is not None:
                return table
            time.sleep(SETTLING)
        raise TokenFileError(f"{self._path}: the file changes again and again")

    def changed(self) -> TokenTable | None:
        """The tokens, if the file has changed, and this look and the previous one have found the same file. May block.

        Raises:
            TokenFileError: the file cannot be read, or is wrong; once for each change.
        """
        look = self._look()
        before, self._seen = self._seen, look
        if look == self._used or look != before:
            return None
        try:
            data = read_regular(self._path)
        except OSError as error:
            self._used = look
            raise TokenFileError(f"{self._path}: {error.strerror}") from None
        if self._look() != look:
            self._seen = None
            return None  # it is being written
        if verb := _OTHERS.get(look[-1] & (stat.S_IROTH | stat.S_IWOTH)):
            log.warning("%s: every user of this machine can %s the tokens: expected mode 600 or 640", self._path, verb)
        try:
            table = parse(data, str(self._path), self._key)
        except TokenFileError:
            self._used = look
            raise
        self._used = look  # not after a lack of memory: the next look tries again
        return table

    def _look(self) -> _Look:
        """A value that differs between contents."""
        try:
            status = self._path.stat()
        except OSError as error:
            return (error.errno or 0, 0)
        return (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_dev, status.st_mode)
