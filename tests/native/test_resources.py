"""Guards every resource of memory alike: blocks that are nobody else's, caps, growth, trim, counters, refusals."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.memory_speed import MappedMemory, random_operations, view_of
from inferd._native.cuda import closing
from inferd._native.cuda.device import device
from inferd._native.cuda.memory import DevicePool, PageLocked
from inferd._native.memory import resource as memory
from tests.threads import in_threads

MIB = 1 << 20
LIMIT = 64 * MIB
OUT_OF_MEMORY = 2

KINDS = {
    "host": memory.host,
    "mapped": lambda: MappedMemory(LIMIT, 8 * MIB),
    "page-locked": lambda: PageLocked(device(0), LIMIT),
    "device": lambda: DevicePool(device(0), LIMIT),
}
CAPPED = [kind for kind in KINDS if kind != "host"]


# Every block is given back, every slab returned, and the device was used in order.
pytestmark = pytest.mark.usefixtures("native_counters", "stub")


@pytest.fixture(params=KINDS)
def resource(request):
    resource = KINDS[request.param]()
    yield resource
    resource.trim()


@pytest.fixture(params=CAPPED)
def capped(request):
    resource = KINDS[request.param]()
    yield resource
    resource.trim()


def spans_of(blocks):
    return sorted((block.address, block.address + block.size) for block in blocks)


def test_threads_take_and_give_at_random(resource):
    """What one thread holds no other gets, whatever the sizes; and in the end nothing is in use."""
    before = resource.usage()

    def work(seed):
        return random_operations(resource, seed, 20_000, 60, 1 * MIB, resource.name != "device")

    found = in_threads(work, range(1, 5))
    assert [wrong for wrong, _ in found] == [0] * 4
    after = resource.usage()
    assert after["used"] == before["used"]
    assert after["refused"] - before["refused"] == sum(refused for _, refused in found)
    assert after["limit"] == 0 or after["held"] <= after["limit"]
    resource.trim()
    assert resource.name == "host" or resource.usage()["held"] == 0


@settings(deadline=None)  # the stub's memory is fresh pages, which a busy machine is slow to give
@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 3 * MIB)), max_size=60))
def test_blocks_alive_together_never_overlap(steps):
    for make in KINDS.values():
        resource, alive = make(), []
        used = resource.usage()["used"]
        for take, number in steps:
            if take or not alive:
                alive.append(resource.take(number))
                assert alive[-1].size >= number
                assert alive[-1].address % 256 == 0
            else:
                alive.pop(number % len(alive))
            spans = spans_of(alive)
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
            if resource.name != "host":
                assert resource.usage()["used"] == sum(block.size for block in alive)
        alive.clear()
        assert resource.usage()["used"] == used


def test_counters_and_counts(resource):
    before = memory.live_counters()["blocks"], resource.usage()["used"]
    block = resource.take(100_000)
    usage = resource.usage()
    assert memory.live_counters()["blocks"] == before[0] + 1
    assert usage["used"] == before[1] + block.size
    assert usage["held"] >= usage["used"]
    assert usage["peak"] >= usage["used"]
    del block
    assert (memory.live_counters()["blocks"], resource.usage()["used"]) == before


def test_cap_is_never_passed_and_the_refusal_says_why(capped):
    blocks = []
    with pytest.raises(MemoryError) as caught:
        while True:
            blocks.append(capped.take(3 * MIB))
    usage = capped.usage()
    assert len(blocks) >= 0.75 * LIMIT / (3 * MIB)
    assert usage["held"] <= LIMIT
    assert str(caught.value) == (
        f"no {capped.name} memory: asked for {3 * MIB} bytes; {usage['used']} are in use, {usage['held']} held of at "
        f"most {LIMIT}"
    )
    del caught
    blocks.pop()
    blocks.append(capped.take(3 * MIB))  # what was given back is there again


def test_impossible_sizes_are_refused(capped):
    for size in (LIMIT + 1, 1 << 46, (1 << 64) - 1):
        with pytest.raises(MemoryError, match=f"asked for {size} bytes"):
            capped.take(size)
    assert capped.usage()["used"] == 0


def test_whole_cap_in_one_block(capped):
    block = capped.take(LIMIT)
    assert block.size == LIMIT
    with pytest.raises(MemoryError):
        capped.take(1)
    del block
    assert capped.trim() == LIMIT


def test_small_blocks_leave_no_hole_behind(capped):
    """A burst of small blocks, given back in another order, does not keep a large one from being taken."""
    small = [capped.take(4096) for _ in range(1000)]
    held = capped.usage()["held"]
    del small[::2]
    small.clear()
    large = capped.take(held)
    assert capped.usage()["held"] == held
    assert large.size == held


def test_slabs_make_room_for_a_block_larger_than_them(capped):
    capped.reserve(LIMIT)
    assert capped.usage()["held"] == LIMIT
    assert capped.take(LIMIT - 2 * MIB).size >= LIMIT - 2 * MIB


def test_reserve_obtains_ahead_and_trim_returns_what_is_free(capped):
    assert capped.reserve(4 * MIB)
    held = capped.usage()["held"]
    assert held >= 4 * MIB
    block = capped.take(MIB)
    assert capped.usage()["held"] == held
    assert not capped.reserve(LIMIT + 2 * MIB)
    assert capped.usage()["held"] <= LIMIT
    capped.trim()
    assert 0 < capped.usage()["held"] < LIMIT
    del block
    capped.trim()
    assert capped.usage()["held"] == 0


def test_a_limit_that_no_slab_fills_is_not_reserved():
    capped = MappedMemory(5 * MIB, 2 * MIB)
    assert not capped.reserve(5 * MIB)
    assert capped.reserve(4 * MIB)
    capped.trim()


@pytest.mark.parametrize(("kind", "call"), [("page-locked", "cuMemHostAlloc"), ("device", "cuMemAlloc_v2")])
def test_driver_without_memory(stub, kind, call):
    resource = KINDS[kind]()
    for _ in range(2):
        stub.fail(call, OUT_OF_MEMORY)
    with pytest.raises(MemoryError, match=rf"no {kind} memory: asked for 8 bytes; 0 are in use, 0 held"):
        resource.take(8)
    assert resource.take(8).size == 256
    resource.trim()


def test_page_locked_memory_is_that_of_the_nearest_node():
    assert PageLocked(device(0), LIMIT).numa_node == 0


@pytest.mark.parametrize("kind", CAPPED)
def test_memory_stays_until_its_last_block_is_back(kind, stub):
    """An answer may be the last to hold memory of a server that is gone: it is whole until then, and the event loop,
    which gives it back, does not wait for the device."""
    pool = KINDS[kind]()
    block = view_of(pool, 4096)
    held = [line for line in stub.report() if "memory" in line]
    del pool
    assert [line for line in stub.report() if "memory" in line] == held
    assert kind == "device" or len(bytes(block)) == 4096
    with stub.loop():
        del block
    closing.wait_closed()
