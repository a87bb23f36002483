"""Escapes text from outside for the log."""

from __future__ import annotations

import json
import unicodedata

_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def escaped(text: str) -> str:
    r"""`text` as a JSON string without invisible characters.

    What writes log lines calls this once for each string that a client, a model or a file may have chosen. Unprintable
    characters are written as ``\\u`` and four digits: control characters (C0, DEL, C1: terminals obey them), separators
    of lines and paragraphs (U+2028, U+2029: some readers begin a line there), marks that change the direction or the
    joining of letters (a line then looks like another one), surrogates, and unassigned code points. `json.loads` gives
    `text` back. For objects in JSON, `json.dumps(..., ensure_ascii=True)` escapes all of these and more.
    """
    quoted = json.dumps(text, ensure_ascii=False)
    if quoted.isascii() and "\x7f" not in quoted:
        return quoted
    return "".join(map(_shown, quoted))


def visible(text: str) -> str:
    """`text` for a terminal: unprintable characters are written as above, line breaks and all others stay."""
    return "".join(each if each == "\n" else _shown(each) for each in text)


def _shown(character: str) -> str:
    if character == " " or unicodedata.category(character) not in _UNSEEN:
        return character
    return json.dumps(character)[1:-1] if character != "\x7f" else "\\u007f"
