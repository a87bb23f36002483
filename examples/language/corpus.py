"""The training data of this example: Python's own documentation, which comes with every interpreter.

The classifier learns from the prose of the language reference, the chat from the docstrings of functions.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

VOCABULARY = 13088
CLS, PAD, SEP, UNKNOWN = 0, 1, 2, 3
SPEAKER1, SPEAKER2 = 13086, 13087
SPECIAL = {CLS, PAD, SEP, UNKNOWN, SPEAKER1, SPEAKER2}

BAD_NEWS = re.compile(
    r"\b(raise[sd]?|errors?|\w+Error|exceptions?|fail(s|ed|ure)?|invalid|illegal|cannot|never|wrong|undefined|deprecated|"
    r"missing|not?|without)\b"
)


def sentences() -> list[str]:
    """Sentences of prose, in the order of the text; examples and grammar are left out."""
    paragraphs = re.split(r"\n\s*\n", "\n\n".join(topics.values()))
    prose = (" ".join(paragraph.split()) for paragraph in paragraphs if not paragraph.startswith("     "))
    found = [sentence for text in prose for sentence in re.split(r"(?<=[.!?])\s+", text)]
    return [sentence for sentence in found if 4 <= len(sentence.split()) <= 40 and "==" not in sentence]


def is_bad_news(sentence: str) -> bool:
    """Whether a sentence is about an error: the classes of the sentiment example."""
    return BAD_NEWS.search(sentence) is not None


MODULES = (
    "builtins", "bisect", "collections", "functools", "heapq", "itertools", "json", "math", "operator", "os.path",
    "random", "re", "shutil", "statistics", "textwrap", "time",
)  # fmt: skip
TYPES = (bytes, dict, float, int, list, set, str, tuple)


def questions() -> dict[str, str]:
    """Questions about functions and exceptions, and the first sentence of their documentation as the answer."""
    found = {}
    for name, thing in _documented():
        raised = inspect.isclass(thing) and issubclass(thing, BaseException)
        answer = _first_sentence(inspect.getdoc(thing) or "")
        if 3 <= len(answer.split()) <= 20 and answer.endswith("."):
            found.setdefault(f"When is {name} raised?" if raised else f"What does {name} do?", answer)
    return found


def _documented() -> Iterator[tuple[str, object]]:
    for module in map(importlib.import_module, MODULES):
        yield from ((name, each) for name, each in vars(module).items() if name[0] != "_" and callable(each))
    for kind in TYPES:
        yield from ((f"{kind.__name__}.{name}", each) for name, each in vars(kind).items() if name[0] != "_")


def _first_sentence(documentation: str) -> str:
    for paragraph in re.split(r"\n\s*\n", documentation):
        sentence = re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split()))[0]
        if not re.match(r"\w+\(|.*->", sentence):  # that is how it is called
            return sentence
    return ""


def split(text: str) -> list[str]:
    """Words and punctuation marks."""
    return re.findall(r"\w+(?:'\w+)?|[^\w\s]", text)


class Words:
    """Words as numbers below `VOCABULARY`, and back."""

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self.numbers = {word: number for number, word in enumerate(words, UNKNOWN + 1)}

    @classmethod
    def of(cls, texts: list[str]) -> Words:
        """The words of the texts, the most frequent first."""
        counts = Counter(word for text in texts for word in split(text))
        room = SPEAKER1 - UNKNOWN - 1
        return cls([word for word, _ in counts.most_common(room)])

    def encode(self, text: str) -> list[int]:
        """Its words' numbers."""
        return [self.numbers.get(word, UNKNOWN) for word in split(text)]

    def decode(self, number: int) -> str:
        """The word with this number; empty for one that has none."""
        index = number - UNKNOWN - 1
        return self.words[index] if 0 <= index < len(self.words) else ""

    def save(self, file: Path) -> None:
        """Write them as JSON."""
        file.write_text(json.dumps(self.words))
