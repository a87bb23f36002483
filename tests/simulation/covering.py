"""Pairwise covering: few combinations of features, in which any two that may meet do meet.

What excludes what is told by rules, each of two features. From these follows what else cannot be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from random import Random

Choice = tuple[str, str]  # a feature and its value
Row = dict[str, str]
CANDIDATES = 12  # of which the one that covers most is taken


@dataclass(frozen=True)
class Rule:
    """A feature has these values only where another feature has one of its allowed ones.

    Attributes:
        feature, values: what the rule is about.
        other, allowed: and what it needs.
        why: empty, if the server refuses anything else; or what the world cannot play.
    """

    feature: str
    values: tuple[str, ...]
    other: str
    allowed: tuple[str, ...]
    why: str = ""


class Space:
    """All combinations that may be.

    Args:
        features: their values, the usual one first.
        rules: what excludes what.
    """

    def __init__(self, features: Mapping[str, Sequence[str]], rules: Sequence[Rule]) -> None:
        self.features = {name: tuple(values) for name, values in features.items()}
        self.excluded: dict[frozenset[Choice], Rule] = {}
        for rule in rules:
            others = set(self.features[rule.other]) - set(rule.allowed)
            if not set(rule.values) <= set(self.features[rule.feature]):
                raise ValueError(f"{rule} is about values that '{rule.feature}' does not have")
            for mine, its in product(rule.values, sorted(others)):
                self.excluded[frozenset({(rule.feature, mine), (rule.other, its)})] = rule
        # sets of choices as bits: what each excludes, and those of each feature
        choices = [(name, value) for name, values in self.features.items() for value in values]
        self._bits = {choice: 1 << place for place, choice in enumerate(choices)}
        self._apart = dict.fromkeys(choices, 0)
        for pair in self.excluded:
            one, two = pair
            self._apart[one] |= self._bits[two]
            self._apart[two] |= self._bits[one]
        self._of = {name: sum(self._bits[name, value] for value in values) for name, values in self.features.items()}

    def completed(self, row: Row, random: Random | None = None) -> Row | None:
        """With values for all features; without `random` the usual ones where they may be. None: there are none."""
        may = sum(self._bits.values())
        for choice in row.items():
            may &= ~self._apart[choice]
        if any(not may & self._bits[choice] for choice in row.items()):
            return None
        return self._fill(dict(row), [name for name in self.features if name not in row], may, random)

    def _fill(self, row: Row, left: list[str], may: int, random: Random | None) -> Row | None:
        if not left:
            return row
        name = min(left, key=lambda each: (may & self._of[each]).bit_count())  # where the choice is least
        values = [value for value in self.features[name] if may & self._bits[name, value]]
        if random is not None:
            random.shuffle(values)
        rest = [each for each in left if each != name]
        for value in values:
            row[name] = value
            if (found := self._fill(row, rest, may & ~self._apart[name, value], random)) is not None:
                return found
            del row[name]
        return None

    def pairs(self) -> Iterator[tuple[Choice, Choice]]:
        """Any two values of two features that some combination has."""
        random = Random(0)  # a combination drawn has more pairs that none before it has than a usual one
        seen: set[tuple[Choice, Choice]] = set()
        for one, two in combinations(self.features, 2):
            for mine, its in product(self.features[one], self.features[two]):
                pair = (one, mine), (two, its)
                if pair not in seen:
                    row = self.completed({one: mine, two: its}, random)
                    if row is None:
                        continue
                    seen |= pairs_of({name: row[name] for name in self.features})
                yield pair


def pairs_of(row: Row) -> set[tuple[Choice, Choice]]:
    """The pairs of choices in this combination."""
    return set(combinations(row.items(), 2))


def covering(space: Space, seed: int = 0) -> list[Row]:
    """Combinations that have all pairs; always the same ones."""
    random = Random(seed)
    left = dict.fromkeys(space.pairs())
    rows: list[Row] = []
    while left:
        one, two = next(iter(left))
        best: Row = {}
        most = -1
        for _ in range(CANDIDATES):
            row = space.completed(dict((one, two)), random)
            assert row is not None  # of a pair of the space
            row = {name: row[name] for name in space.features}
            covers = sum(pair in left for pair in pairs_of(row))
            if covers > most:
                best, most = row, covers
        rows.append(best)
        for pair in pairs_of(best):
            left.pop(pair, None)
    return rows
