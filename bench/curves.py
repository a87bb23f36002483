"""Curves: what one unit of work costs as there is more of it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """One size and what it costs, by unit."""

    size: int
    cost: float
    counted: float = 0.0


@dataclass(frozen=True)
class Curve:
    """One axis of growth."""

    name: str
    title: str
    unit: str
    points: tuple[Point, ...]
    counted: str = ""  # a second quantity, counted at each point beside the cost

    @property
    def slope(self) -> float:
        """Least squares of the logarithms."""
        xs = [math.log(point.size) for point in self.points]
        ys = [math.log(max(point.cost, 1e-9)) for point in self.points]
        x, y = sum(xs) / len(xs), sum(ys) / len(ys)
        above = sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True))
        return above / sum((a - x) ** 2 for a in xs)
