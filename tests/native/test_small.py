"""Guards small memory: pieces keep their bytes and never overlap, whatever is taken, given and resized; what waits is
bounded and goes back when it is asked for."""

import random

from hypothesis import given
from hypothesis import strategies as st

from tests.native.smalls import SmallsProbe

SIZES = st.one_of(st.integers(0, 1100), st.sampled_from([15, 16, 17, 1023, 1024, 1025, 5000, 70_000]))
STEPS = st.lists(st.tuples(st.sampled_from(["take", "take", "give", "resize"]), SIZES, st.integers(0, 1 << 30)))
KEPT = 64 << 10  # bytes of each size


@given(STEPS)
def test_pieces_keep_their_bytes_whatever_others_do(steps):
    probe = SmallsProbe()
    held: list[tuple[int, bytes]] = []
    for action, size, choice in steps:
        if action == "take":
            data = random.Random(choice).randbytes(size)
            address = probe.take(size)
            assert address % 16 == 0
            probe.write(address, data)
            held.append((address, data))
        elif held and action == "give":
            address, data = held.pop(choice % len(held))
            assert probe.read(address, len(data)) == data
            probe.give(address)
        elif held:
            address, data = held.pop(choice % len(held))
            address = probe.resize(address, size)
            assert probe.read(address, min(size, len(data))) == data[:size]
            data = random.Random(choice).randbytes(size)
            probe.write(address, data)
            held.append((address, data))
    for address, data in held:
        assert probe.read(address, len(data)) == data
        probe.give(address)


def test_what_waits_is_bounded_and_is_given_back():
    probe = SmallsProbe()
    for size in (48, 1024):
        pieces = [probe.take(size) for _ in range(5000)]
        assert len(set(pieces)) == len(pieces)
        for address in pieces:
            probe.give(address)
    assert probe.waiting <= KEPT // 48 + 1 + KEPT // 1024 + 1
    probe.clear()
    assert probe.waiting == 0


def test_more_than_there_can_be_is_refused():
    probe = SmallsProbe()
    address = probe.take(10)
    for size in (1 << 62, (1 << 64) - 1, (1 << 64) - 16):
        assert probe.take(size) == 0
        assert probe.resize(address, size) == 0
    probe.write(address, b"0123456789")
    assert probe.read(address, 10) == b"0123456789"
    probe.give(address)
    probe.give(0)
