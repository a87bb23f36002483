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
    assert {option: text.partition(",")[0] for option, text in DERIVED.findall(PAGE.read_text())} == {
        "io-threads": "one for each four cores that the process may use",
        "max-held-bytes": "a quarter of the memory",
        "client-shm-max-regions-per-user": "half of what all may have",
    }


def test_held_bytes_are_a_quarter_of_the_memory(native):
    assert native()["max_held_bytes"] == 10 * GIB
    assert native(max_held_bytes=GIB)["max_held_bytes"] == GIB


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (7, 1), (8, 2), (40, 10)])
def test_there_is_an_io_thread_for_each_four_cores(native, monkeypatch, cores, threads):
    monkeypatch.setattr(door, "cores", lambda: cores)
    assert native()["io_threads"] == threads
    assert native(io_threads=3)["io_threads"] == 3


@pytest.mark.parametrize(("given", "most"), [({}, 2), ({"user_regions": 3}, 3), ({"max_byte_size": 128}, 1)])
def test_a_user_may_have_half_of_the_regions_and_of_their_bytes(region, given, most):
    memory = SharedMemory(SharedMemoryPolicy(**{"max_regions": 4, **given}))
    user = User(os.getuid(), os.getpid())
    for number in range(most):
        memory.register_system(user, f"{number}", region, 0, 64)
    with pytest.raises(Exhausted):
        memory.register_system(user, "one more", region, 0, 64)
    memory.close()
