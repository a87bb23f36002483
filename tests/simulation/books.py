"""What models say of themselves in their statistics, beside what clients have heard and instances have done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.simulation.kind import Kind
from tests.simulation.kinds import KINDS, STEPS
from tests.simulation.wire import Violation

if TYPE_CHECKING:
    from collections.abc import Collection

    from tests.simulation.models import Version


@dataclass
class Account:
    """The account of one model, over all of its versions.

    Attributes:
        asked: requests of clients that are over.
        good: of these, those that have good answers.
        success, failed: as the model tells.
    """

    asked: int = 0
    good: int = 0
    success: int = 0
    failed: int = 0


class Books:
    """The accounts of one simulation."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}

    def _account(self, name: str) -> Account:
        return self._accounts.setdefault(name, Account())

    def heard(self, kind: Kind, *, good: bool) -> None:
        """A client has got an answer, or an error, or has given up."""
        account = self._account(kind.name)
        account.asked += 1
        account.good += good

    def asked(self, kind: Kind, count: int) -> None:
        """So many requests are over, and nobody says how."""
        self._account(kind.name).asked += count

    def left(self, version: Version, *, all_looked_up: bool, is_faulty: bool) -> None:
        """A version has ended, and nothing of it is under way.

        Args:
            version: it.
            all_looked_up: no request was kept from the cache, as those are that lie in memory of clients.
            is_faulty: there may be no memory to count a batch of a new size.
        """
        stats = version.loaded.statistics()
        said, kind = stats.inference_stats, version.kind
        account = self._account(kind.name)
        account.success += said.success.count
        account.failed += said.fail.count
        over = said.success.count + said.fail.count
        looked_up = said.cache_hit.count + said.cache_miss.count
        problem = ""
        # the parts of a split request count, and are not looked up
        if (
            kind.caches
            and not kind.splits
            and (looked_up > over or (all_looked_up and looked_up < over and not kind.splits))
        ):
            problem = f"{looked_up} requests were looked up"
        backend = version.backend
        uncounted = backend.executed - stats.execution_count, backend.rows - stats.inference_count
        # a request that fails by itself, say for its client has taken its region away, is executed and does not count
        most = said.fail.count, said.fail.count * kind.rows
        if kind.repeats:  # rows count once, when they have been executed for the last time
            most = said.fail.count, backend.rows
        if counts_batches(kind) and not all(0 <= count <= limit for count, limit in zip(uncounted, most, strict=True)):
            problem = (
                f"{stats.execution_count} executions of {stats.inference_count} rows, and there were "
                f"{backend.executed} of {backend.rows}"
            )
        problem = (
            problem
            or self._time_of(version, uncounted[0], is_faulty=is_faulty)
            or responses_of(version, is_faulty=is_faulty)
        )
        counted = sum(each.compute_infer.count for each in stats.batch_stats)
        if counted != stats.execution_count and not is_faulty:
            problem = f"batches of all sizes are not {stats.execution_count}"
        if problem:
            raise Violation(f"the statistics of {version.prefix}, with {over} requests: {problem}")

    @staticmethod
    def _time_of(version: Version, uncounted: int, *, is_faulty: bool) -> str:
        """What is wrong with the times that a version tells; empty: nothing."""
        stats, kind, backend = version.loaded.statistics(), version.kind, version.backend
        said = stats.inference_stats
        parts = said.queue.ns + said.compute_input.ns + said.compute_infer.ns + said.compute_output.ns
        # nothing lies between them, but between steps, and where answers come one by one or from others' executions
        if parts != said.success.ns and not (kind.steps or kind.decoupled or kind.reuses):
            return f"successes took {said.success.ns} ns, and their parts {parts} ns"
        if not counts_batches(kind) or uncounted or is_faulty:
            return ""
        phases = [(each.compute_input, each.compute_infer, each.compute_output) for each in stats.batch_stats]
        told_ns = sum(part.ns for batch in phases for part in batch)
        if told_ns < backend.busy_ns:
            return f"{stats.execution_count} executions took {told_ns} ns, and its models have taken {backend.busy_ns}"
        told_ns = parts - said.queue.ns
        if said.fail.count == 0 and not (kind.reuses or kind.splits) and told_ns < backend.served_ns:
            return f"requests were computed for {told_ns} ns, and its models have taken {backend.served_ns} for them"
        return ""

    def check(self, kinds: Collection[str]) -> None:
        """All is over.

        Raises:
            Violation: a model has counted others than its clients have asked it.
        """
        shared = {name for other in kinds for name in STEPS[other] if name != other}
        if any(KINDS[name].asks for name in kinds):
            return  # what workers ask is not counted here
        for name, account in sorted(self._accounts.items()):
            if name in shared:
                continue
            most = account.asked
            if not account.good <= account.success <= account.success + account.failed <= most:
                raise Violation(f"the statistics of '{name}' do not add up: {account}")


def responses_of(version: Version, *, is_faulty: bool) -> str:
    """What is wrong with the responses that a version tells, by their places in those of a request; empty: nothing."""
    if is_faulty:
        return ""  # there may be no memory to count those of a new place
    stats, kind = version.loaded.statistics(), version.kind
    counts = [0] * len(stats.response_stats)
    for place, told in stats.response_stats.items():
        if int(place) >= len(counts):
            return f"responses {place} are told of {len(counts)}"
        counts[int(place)] = told.success.count + told.fail.count + told.empty_response.count + told.cancel.count
    if counts != sorted(counts, reverse=True):
        return f"{counts} responses were the first, the second and so on"
    if kind.decoupled and not kind.steps and stats.inference_stats.success.count > sum(counts[:1]):
        return f"{stats.inference_stats.success.count} requests succeeded, and {sum(counts[:1])} had a response"
    return ""


def counts_batches(kind: Kind) -> bool:
    """Whether each batch of which an instance knows counts: not one that fails, or has nobody's requests alone."""
    return not (
        kind.steps
        or (kind.sequence and not kind.repeats)
        or kind.fails
        or kind.clumsy
        or kind.stops
        or kind.decoupled
        or kind.style.startswith(("native", "gpu", "worker"))
    )
