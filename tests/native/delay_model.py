"""What an adaptive delay should do, in plain Python: the documented rule, with the numbers that the queue goes by."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Batches:
    """The line through sizes and times of batches: weighted means, newer ones weigh more."""

    seen: int = 0
    rows: float = 0.0
    ns: float = 0.0
    squares: float = 0.0
    products: float = 0.0
    slope: float = 0.0

    @property
    def row_ns(self) -> int:
        return int(self.slope)

    @property
    def fixed_ns(self) -> int:
        return int(self.ns - self.slope * self.rows)

    def latest(self, rows: int, end: int) -> int:
        """When a batch of so many rows begins that is to be executed by `end`."""
        return end - self.fixed_ns - rows * self.row_ns

    def executed(self, rows: int, ns: int) -> None:
        self.seen += 1
        if self.seen == 1:
            return  # the first one warms up
        took = float(min(max(ns, 1), 100_000_000_000))
        if self.seen > 8:
            took = min(took, 4.0 * (self.fixed_ns + rows * self.row_ns + 1))
        weight = 1.0 / (min(self.seen, 33) - 1)
        self.rows += weight * (rows - self.rows)
        self.ns += weight * (took - self.ns)
        self.squares += weight * (rows * rows - self.squares)
        self.products += weight * (rows * took - self.products)
        variance = self.squares - self.rows * self.rows
        if variance > 1 / 16:
            self.slope = max((self.products - self.rows * self.ns) / variance, 0.0)
        self.slope = min(self.slope, self.ns / self.rows)


@dataclass
class Gap:
    """The time until the next request, with a number of requests waiting."""

    mean: int = 0
    seen: int = 0


@dataclass
class Delay:
    """When to stop waiting."""

    batches: Batches = field(default_factory=Batches)
    gaps: dict[int, Gap] = field(default_factory=dict)  # by the number that waits, 64 for all above
    asked: tuple[int, int] | None = None  # how many waited, and since when: the next arrival tells how long it took
    since: int | None = None  # the instance that asked waits

    def ask(self, count: int, now: int) -> None:
        """An instance finds so many requests."""
        if self.since is None:
            self.since = now
            self.asked = count, now
        elif self.asked is None or self.asked[0] != count:
            self.asked = count, now

    def take(self) -> None:
        self.since = None

    def arrived(self, now: int) -> None:
        if self.asked is None:
            return
        count, begin = self.asked
        gap = self.gaps.setdefault(min(count, 64), Gap())
        gap.seen = min(gap.seen + 1, 16)
        gap.mean += int((min(now - begin, self.batches.fixed_ns) - gap.mean) / gap.seen)
        self.asked = (count + 1, now) if self.since is not None else None

    def gap(self, count: int) -> int:
        known = [number for number in self.gaps if number <= max(count, 1)]
        return self.gaps[max(known)].mean if known else 0

    def pays(self, count: int, rows: int) -> bool:
        """Whether those that wait lose less than the next one gains."""
        gap = self.gap(count)
        if self.batches.fixed_ns < 100_000:
            return False  # not worth the waking
        return count * gap + rows * self.batches.row_ns < self.batches.fixed_ns - gap

    def due(self, count: int, rows: int, idle: int) -> int:
        """Until when `count` requests wait."""
        assert self.since is not None
        assert self.asked is not None
        if idle or not self.pays(count, rows):
            return self.since
        return min(self.asked[1] + 3 * self.gap(count), self.since + self.batches.fixed_ns)
