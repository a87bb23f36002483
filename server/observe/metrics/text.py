"""The text formats of Prometheus (0.0.4) and OpenMetrics (1.0.0).

In OpenMetrics the name of a counter's samples ends with `_total`. Triton's names do not: so that they are the same in
both formats, counters with these names have the type `unknown` in OpenMetrics.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})

Sample = tuple[str, float]
"""Labels as text, and the value."""


@dataclass(frozen=True, slots=True)
class Family:
    """The common part of all samples of one name.

    Attributes:
        name: of the samples; for a histogram without its suffixes.
        help: one sentence.
        kind: counter, gauge or histogram.
    """

    name: str
    help: str
    kind: str = "gauge"

    def head(self, *, openmetrics: bool) -> bytes:
        """The lines before its samples."""
        name, kind = self.name, self.kind
        if openmetrics and kind == "counter":
            name, kind = (name.removesuffix("_total"), kind) if name.endswith("_total") else (name, "unknown")
        text = self.help.translate(_ESCAPES) if openmetrics else self.help.replace("\\", r"\\").replace("\n", r"\n")
        return encoded(f"# HELP {name} {text}\n# TYPE {name} {kind}\n")

    def samples(self, samples: Iterable[Sample]) -> bytes:
        """The samples of the family, each on its line."""
        return encoded("".join(f"{self.name}{braced(labels)} {number(value)}\n" for labels, value in samples))


def encoded(text: str) -> bytes:
    """A part of the page. Texts of models may have surrogates, which UTF-8 cannot have: they become question marks."""
    return text.encode(errors="replace")


def written(labels: Mapping[str, object]) -> str:
    """Labels as text, without the braces, in the order of their names as in Triton."""
    return ",".join(f'{name}="{str(value).translate(_ESCAPES)}"' for name, value in sorted(labels.items()))


def braced(labels: str) -> str:
    return f"{{{labels}}}" if labels else ""


def number(value: float) -> str:
    """A value as both formats write it."""
    if isinstance(value, int):
        return str(value)
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(value)
