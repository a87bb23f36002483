"""Guards the rate limiter: nothing is used twice, who deserves it most goes first, and nobody waits without need."""

import threading

from hypothesis import given
from hypothesis import strategies as st

from _native.scheduling.limiter import ClaimHandle, RateLimiter, Resource


def waiting(limiter: RateLimiter, count: int) -> None:
    """Return when so many claims wait."""
    for _ in range(10_000):
        if limiter.waiting == count:
            return
        threading.Event().wait(0.001)
    raise AssertionError(f"{limiter.waiting} claims wait, expected {count}")


class Waiter:
    """A claim that is acquired on a thread of its own; `order` gets its name then."""

    def __init__(self, name: str, claim: ClaimHandle, order: list[str]) -> None:
        self.claim = claim
        self._thread = threading.Thread(target=self._run, args=(name, order), daemon=True)
        self._thread.start()

    def _run(self, name: str, order: list[str]) -> None:
        self.claim.acquire()
        order.append(name)

    def join(self) -> None:
        self._thread.join(10)
        assert not self._thread.is_alive(), "the claim was not granted"
        self.claim.release()


def test_a_claim_is_granted_whole_and_given_back_whole():
    limiter, a, b = RateLimiter(), Resource("a", 3), Resource("b", 1)
    claim = ClaimHandle(limiter, [(a, 2), (b, 1)])
    claim.acquire()
    assert (claim.held, a.free, b.free) == (True, 1, 0)
    claim.acquire()  # held already
    assert (a.free, b.free) == (1, 0)
    claim.release()
    assert (claim.held, a.free, b.free) == (False, 3, 1)


def test_who_cannot_be_served_keeps_nobody_else_waiting():
    """Triton's limiter looks only at the first of those that wait."""
    limiter, a, b = RateLimiter(), Resource("a", 1), Resource("b", 1)
    holder = ClaimHandle(limiter, [(a, 1)])
    holder.acquire()
    order: list[str] = []
    blocked = Waiter("blocked", ClaimHandle(limiter, [(a, 1), (b, 1)]), order)
    waiting(limiter, 1)
    Waiter("other", ClaimHandle(limiter, [(b, 1)]), order).join()
    assert order == ["other"]
    holder.release()
    blocked.join()
    assert order == ["other", "blocked"]


def test_the_smallest_product_of_executions_and_priority_goes_first():
    limiter, pool = RateLimiter(), Resource("a", 1)
    claims = {
        "often": ClaimHandle(limiter, [(pool, 1)], 1),
        "low": ClaimHandle(limiter, [(pool, 1)], 5),
        "new": ClaimHandle(limiter, [(pool, 1)], 9),
    }
    for name, executions in (("often", 4), ("low", 1)):
        for _ in range(executions):
            claims[name].acquire()
            claims[name].release()
    holder = ClaimHandle(limiter, [(pool, 1)])
    holder.acquire()
    order: list[str] = []
    waiters = []
    for count, (name, claim) in enumerate(claims.items(), 1):  # their products are 4, 5 and 0
        waiters.append(Waiter(name, claim, order))
        waiting(limiter, count)
    holder.release()
    for name in ("new", "often", "low"):
        waiters[list(claims).index(name)].join()
    assert order == ["new", "often", "low"]


def test_more_of_a_resource_serves_those_that_wait():
    limiter, pool = RateLimiter(), Resource("a", 1)
    order: list[str] = []
    waiter = Waiter("w", ClaimHandle(limiter, [(pool, 2)]), order)
    waiting(limiter, 1)
    limiter.resize(pool, 2)
    waiter.join()
    limiter.resize(pool, 1)
    assert (pool.total, pool.free) == (1, 1)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=5), st.integers(3, 4))
def test_never_more_than_there_is(needs, total):
    """Instances that come and go on threads of their own never hold more than the pool, and all of them get on."""
    limiter, pool = RateLimiter(), Resource("a", total)
    held, most, guard = 0, 0, threading.Lock()

    def run(need: int) -> None:
        nonlocal held, most
        claim = ClaimHandle(limiter, [(pool, need)])
        for _ in range(5):
            claim.acquire()
            with guard:
                held += need
                most = max(most, held)
            with guard:
                held -= need
            claim.release()

    threads = [threading.Thread(target=run, args=(need,), daemon=True) for need in needs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert most <= total
    assert (pool.free, limiter.waiting) == (total, 0)
