"""Guards the defaults that the server derives from the machine or from another option: the page says what it does."""

from __future__ import annotations

import os
import re
from multiprocessing import shared_memory
from pathlib import Path
from types import SimpleNamespace

import pytest

from inferd.server.composition import door
from inferd.server.engine.instances.shared_memory import SharedMemory, SharedMemoryPolicy, User
from inferd.server.errors import Exhausted
from inferd.server.front.access import Access
from inferd.server.front.listeners import ListenPolicy
from inferd.server.settings import Settings

GIB = 1 << 30
PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
DERIVED = re.compile(r"^\| `--([\w-]+)` \| `0` \| .*?\b0(?::| for) ((?!no |any |none)[^;.]*)", re.MULTILINE)


def number(option, pattern):
    """The number in the page's text of an option, in place of the one group of the pattern."""
    found = re.fullmatch(pattern, dict(DERIVED.findall(PAGE.read_text()))[option])
    assert found, f"--{option}: another text than {pattern}"
    return int(found[1])


@pytest.fixture
def native(monkeypatch):
    """What the native door is made with, by settings, on a machine of 40 cores and 40 GiB."""
    monkeypatch.setattr(door, "cores", lambda: 40)
    monkeypatch.setattr(door, "usable_memory", lambda: 40 * GIB)
    monkeypatch.setattr(door, "NativeDoor", lambda *_, **given: given)

    def made(**options):
        settings = Settings(model_repository=("models",), **options)
        return door.make_door(settings, SimpleNamespace(infer=None), ListenPolicy(), Access(), native_infer=True)

    return made


@pytest.fixture
def region():
    """The key of an object of 64 bytes."""
    made = shared_memory.SharedMemory(create=True, size=64)
    yield made.name
    made.close()
    made.unlink()


def test_every_derived_default_is_tested_here():
    """An option whose 0 stands for something else than no limit is one of those below."""
    options = [option for option, _ in DERIVED.findall(PAGE.read_text())]
    shared_memory = ["client-shm-max-regions-per-user", "client-shm-max-byte-size-per-user"]
    assert options == [*shared_memory, "io-threads", "max-held-bytes"]


def test_held_bytes_are_the_part_of_the_memory_that_the_page_names(native):
    part = number("max-held-bytes", r"1/(\d+) of the memory")
    assert native()["max_held_bytes"] == 40 * GIB // part
    assert native(max_held_bytes=GIB)["max_held_bytes"] == GIB


def test_there_is_an_io_thread_for_as_many_cores_as_the_page_names(native, monkeypatch):
    each = number("io-threads", r"one for each (\d+) cores that the process may use, and at least one")
    for cores, threads in ((1, 1), (2 * each - 1, 1), (2 * each, 2), (10 * each, 10)):
        monkeypatch.setattr(door, "cores", lambda cores=cores: cores)
        assert native()["io_threads"] == threads
    assert native(io_threads=3)["io_threads"] == 3


@pytest.mark.parametrize(("given", "most"), [({}, 2), ({"user_regions": 3}, 3), ({"max_byte_size": 128}, 1)])
def test_a_user_may_have_half_of_the_regions_and_of_their_bytes(region, given, most):
    assert dict(DERIVED.findall(PAGE.read_text()))["client-shm-max-regions-per-user"].startswith("half of what all may")
    memory = SharedMemory(SharedMemoryPolicy(**{"max_regions": 4, **given}))
    user = User(os.getuid(), os.getpid())
    for number in range(most):
        memory.register_system(user, f"{number}", region, 0, 64)
    with pytest.raises(Exhausted):
        memory.register_system(user, "one more", region, 0, 64)
    memory.close()
