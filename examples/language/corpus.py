"""What the models of this example are trained on: Python's own reference, which comes with every interpreter."""

from __future__ import annotations

import json
import re
from collections import Counter
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
    """Whether a sentence speaks of what goes wrong: the classes of the sentiment example."""
    return BAD_NEWS.search(sentence) is not None


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
        """The words that are used more than once, the most frequent first."""
        counts = Counter(word for text in texts for word in split(text))
        room = SPEAKER1 - UNKNOWN - 1
        return cls([word for word, count in counts.most_common(room) if count > 1])

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
