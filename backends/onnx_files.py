"""The files beside an ONNX model in which its weights lie."""

from __future__ import annotations

import re
from pathlib import Path

_LOCATION = re.compile(rb"\n\x08location\x12(?=.[^\0])", re.DOTALL)
"""The bytes before a file's name in the external_data of a TensorProto: an entry with the key "location"."""
PIECE = 1 << 20
LONGEST_ENTRY = 13 + (1 << 14)  # bytes of such an entry: its front, the length, a name of 16,383 bytes


def named_files(path: Path) -> set[str]:
    """Names that the model gives to files with its weights; a few may be something else.

    The search goes in pieces, because it keeps the GIL during each.
    """
    names = set()
    text = b""
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            text = text[-LONGEST_ENTRY:] + piece
            for found in _LOCATION.finditer(text):
                size, begin = text[found.end()], found.end() + 1
                if size & 0x80:  # a varint of two bytes: no path is longer
                    size, begin = size & 0x7F | text[begin] << 7, begin + 1
                name = text[begin : begin + size]
                if len(name) == size:  # else the next piece has the rest
                    names.add(name.decode(errors="surrogateescape"))
    return names
