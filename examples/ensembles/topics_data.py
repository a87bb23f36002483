"""Sentences of Python's own reference, which comes with every interpreter, and their topics."""

from __future__ import annotations

import re
from pydoc_data.topics import topics

TOPICS = {
    "strings": ("string-methods", "formatstrings", "strings"),
    "collections": ("typesseq", "typesmapping", "typesseq-mutable", "sequence-types"),
    "classes": ("class", "attribute-access", "customization", "objects"),
    "control flow": ("compound", "raise", "break", "pass"),
    "debugger": ("debugger",),
}
LABELS = tuple(TOPICS)


def _sentences(names: tuple[str, ...]) -> set[str]:
    """Prose; examples and grammar are left out."""
    paragraphs = re.split(r"\n\s*\n", "\n\n".join(topics[name] for name in names))
    prose = (" ".join(paragraph.split()) for paragraph in paragraphs if not paragraph.startswith("     "))
    found = {sentence for text in prose for sentence in re.split(r"(?<=[.!?])\s+", text)}
    return {sentence for sentence in found if 5 <= len(sentence.split()) <= 40 and "=" not in sentence}


def load() -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """(sentence, topic) for training, and every eighth held out for testing."""
    found = [(text, topic) for topic, names in enumerate(TOPICS.values()) for text in sorted(_sentences(names))]
    return [pair for i, pair in enumerate(found) if i % 8], found[::8]
