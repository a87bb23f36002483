"""Guards the regions of clients: which client finds which, how long their memory lives, bounds, shrinking objects."""

import gc
import os
import platform
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from inferd._native.memory.shm import CUDA, SHARED, SYSTEM, RegionError, Regions, Use
from tests.threads import in_threads

ROOT = Path(__file__).resolve().parents[2]
SIZE = 3 * 4096
PATTERN = bytes(range(256)) * (SIZE // 256)
ALICE, BOB = 1000, 1001


pytestmark = pytest.mark.usefixtures("native_counters")


@pytest.fixture
def regions(native_counters):
    regions = Regions(max_count=8, max_byte_size=1 << 20)
    yield regions
    regions.close()
    assert (regions.count, regions.byte_size) == (0, 0)


@pytest.fixture
def shared_object():
    """A shared memory object without a name, as a descriptor."""
    fd = os.memfd_create("region")
    os.write(fd, PATTERN)
    yield fd
    os.close(fd)


def add(regions, fd, name="a", *, scope=SHARED, offset=0, byte_size=SIZE, owner=0):
    regions.add_system(scope, name, f"/{name}", fd, offset, byte_size, trusted=False, writable=True, owner=owner)


def descriptors():
    gc.collect()  # of what earlier tests have left
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_region_is_found_until_it_is_removed(regions, shared_object):
    add(regions, shared_object, offset=4, byte_size=8)
    assert regions.find(SHARED, "a") == (SYSTEM, "a", "/a", 4, 8, 0)
    assert regions.entries(SHARED, SYSTEM) == [regions.find(SHARED, "a")]
    assert regions.entries(SHARED, CUDA) == []
    assert not regions.remove(SHARED, CUDA, "a"), "it is of the other kind"
    assert regions.remove(SHARED, SYSTEM, "a")
    assert not regions.remove(SHARED, SYSTEM, "a")
    assert regions.find(SHARED, "a") is None
    assert (regions.count, regions.byte_size) == (0, 0)


def test_objects_that_workers_may_map_take_a_share_of_the_descriptors(native_counters):
    """Clients of the server's own user cannot take those that connections need: further regions are copied."""
    before, usual = descriptors(), resource.getrlimit(resource.RLIMIT_NOFILE)
    most, size = before * 4 + 400, 1 << 16
    regions = Regions(max_count=most, max_byte_size=most * size)
    fd = os.memfd_create("region")
    os.truncate(fd, size)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, usual[1]) if usual[1] > 0 else most, usual[1]))
    try:
        for number in range(most // 2):
            regions.add_system(SHARED, str(number), "", fd, 0, size, trusted=True, writable=True, reopened=True)
        assert most // 8 < descriptors() - before <= most // 4 + 1
        assert regions.count == most // 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
        regions.close()
        os.close(fd)
    assert descriptors() == before


def test_scopes_do_not_see_each_other(regions, shared_object):
    for scope in (ALICE, BOB, SHARED):
        add(regions, shared_object, scope=scope)
    assert regions.remove(ALICE, SYSTEM, "a")
    assert regions.find(ALICE, "a") is None
    assert regions.find(BOB, "a") is not None
    assert regions.remove_all(BOB, SYSTEM) == 1
    assert [len(regions.entries(scope, SYSTEM)) for scope in (ALICE, BOB, SHARED)] == [0, 0, 1]


def test_a_name_is_registered_once(regions, shared_object):
    add(regions, shared_object)
    before = descriptors()
    with pytest.raises(RegionError, match=r"^shared memory region 'a' already in manager$") as error:
        add(regions, shared_object)
    assert error.value.status == 6
    assert descriptors() == before, "a refused registration leaves no descriptor"


def test_refused_mappings_and_full_registries_leave_nothing(shared_object):
    regions = Regions(max_count=1, max_byte_size=SIZE)
    before = descriptors()
    with pytest.raises(RegionError, match="expected at most 1 of 12288 bytes") as error:
        add(regions, shared_object, byte_size=SIZE + 1)
    assert error.value.status == 8
    with pytest.raises(RegionError, match="unable to process address space") as error:
        add(regions, shared_object, byte_size=0)
    assert error.value.status == 13
    assert descriptors() == before
    add(regions, shared_object)
    with pytest.raises(RegionError, match="1 regions of 12288 bytes are registered or in use"):
        add(regions, shared_object, "b", byte_size=1)
    regions.close()
    assert descriptors() == before
    assert regions.count == 0


def test_one_user_cannot_take_what_all_share(shared_object):
    """Nor learn what the others have."""
    regions = Regions(max_count=3, max_byte_size=3 * SIZE, scope_count=2, scope_byte_size=2 * SIZE)
    for user in (1, 2):
        add(regions, shared_object, "a", scope=user)
    add(regions, shared_object, "b", scope=1, byte_size=1)
    with pytest.raises(RegionError, match=f"2 regions of {SIZE + 1} bytes are registered .* at most 2 of {2 * SIZE} b"):
        add(regions, shared_object, "c", scope=1, byte_size=1)
    with pytest.raises(RegionError, match=r"of 1 bytes: all users together have as much as the server allows$"):
        add(regions, shared_object, "b", scope=2, byte_size=1)
    assert regions.remove(1, SYSTEM, "b")
    add(regions, shared_object, "b", scope=2, byte_size=1)
    regions.remove_all(2, SYSTEM)
    add(regions, shared_object, "c", scope=1, byte_size=1)
    regions.close()
    assert regions.count == 0


@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 5000])
def test_bytes_of_a_region_at_any_offset(regions, shared_object, offset):
    add(regions, shared_object, offset=offset, byte_size=4097)
    use = Use(regions, SHARED, "a")
    assert use.read(0, 4097) == PATTERN[offset : offset + 4097]
    assert use.read(4090, 7) == PATTERN[offset + 4090 : offset + 4097]
    assert use.write(3, b"written")
    assert os.pread(shared_object, 13, offset) == PATTERN[offset : offset + 3] + b"written" + bytes(
        PATTERN[offset + 10 : offset + 13]
    )


@pytest.mark.parametrize(
    ("offset", "size", "refusal"),
    [
        (0, 100, ""),
        (99, 1, ""),
        (0, 0, ""),
        (100, 0, "Invalid offset for shared memory region: 'a'"),
        (-1, 1, "Invalid offset for shared memory region: 'a'"),
        (2**63 - 1, 1, "Invalid offset for shared memory region: 'a'"),
        (0, 101, "Invalid offset + byte size for shared memory region: 'a'"),
        (1, 100, "Invalid offset + byte size for shared memory region: 'a'"),
        (0, -1, "Invalid offset + byte size for shared memory region: 'a'"),
        (1, 2**63 - 1, "Invalid offset + byte size for shared memory region: 'a'"),
        (1, -1, "Integer overflow detected: byte_size (18446744073709551615) + offset (1) exceeds maximum value"),
        (99, -99, "Integer overflow detected: byte_size (18446744073709551517) + offset (99) exceeds maximum value"),
    ],
)
def test_parts_that_are_not_in_the_region(regions, shared_object, offset, size, refusal):
    add(regions, shared_object, byte_size=100)
    use = Use(regions, SHARED, "a")
    assert use.refusal(offset, size).startswith(refusal)
    assert bool(use.refusal(offset, size)) is bool(refusal)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1))
def test_what_is_not_refused_lies_in_the_region(offset, size):
    regions = Regions(max_count=1, max_byte_size=100)
    fd = os.memfd_create("a")
    regions.add_system(SHARED, "a", "a", fd, 0, 100, trusted=False, writable=True)
    os.close(fd)
    allowed = not Use(regions, SHARED, "a").refusal(offset, size)
    assert allowed == (0 <= offset < 100 and 0 <= size <= 100 - offset)


def test_the_memory_of_a_region_goes_with_its_last_user(regions, shared_object):
    before = descriptors()
    add(regions, shared_object)
    first, second = Use(regions, SHARED, "a"), Use(regions, SHARED, "a")
    assert regions.remove(SHARED, SYSTEM, "a")
    assert regions.find(SHARED, "a") is None, "the name is gone at once"
    with pytest.raises(KeyError):
        Use(regions, SHARED, "a")
    assert (regions.count, regions.byte_size) == (1, SIZE), "what is in use counts"
    first.leave()
    assert second.read(0, SIZE) == PATTERN
    assert second.write(0, b"x")
    other = os.memfd_create("other")
    os.write(other, b"other bytes")
    add(regions, other, byte_size=11)  # the name is free again
    os.close(other)
    assert second.read(0, 2) == b"x\1"
    assert Use(regions, SHARED, "a").read(0, 11) == b"other bytes"
    second.leave()
    assert (regions.count, regions.byte_size) == (1, 11)
    regions.close()
    assert descriptors() == before


def test_regions_outlive_their_registry(shared_object):
    regions = Regions(max_count=1, max_byte_size=SIZE)
    add(regions, shared_object)
    use = Use(regions, SHARED, "a")
    del regions
    assert use.read(0, SIZE) == PATTERN


def test_regions_go_with_their_owner(regions, shared_object):
    for name, owner in (("a", 1), ("b", 2), ("c", 1), ("d", 0)):
        add(regions, shared_object, name, owner=owner)
    regions.remove(SHARED, SYSTEM, "c")
    add(regions, shared_object, "c", owner=2)
    assert regions.remove_owned(1) == 1, "the name has another owner's region now"
    assert [status.name for status in regions.entries(SHARED, SYSTEM)] == ["b", "c", "d"]
    assert regions.remove_owned(0) == 0
    assert regions.remove_owned(2) == 2
    assert [status.name for status in regions.entries(SHARED, SYSTEM)] == ["d"]


def test_an_object_that_shrinks_harms_nobody(regions, shared_object):
    add(regions, shared_object)
    whole = os.memfd_create("whole")
    os.write(whole, PATTERN)
    add(regions, whole, "whole")
    os.close(whole)
    use, other = Use(regions, SHARED, "a"), Use(regions, SHARED, "whole")
    os.ftruncate(shared_object, 4096)
    assert use.read(0, 4096) == PATTERN[:4096], "nobody has noticed yet"
    assert use.read(0, SIZE) is None
    assert use.read(8192, 1) is None
    assert other.read(0, SIZE) == PATTERN
    assert use.read(0, 1) is None, "a mapping that was broken stays so"
    assert not use.write(0, b"lost")
    os.ftruncate(shared_object, SIZE)
    assert use.read(0, 1) is None
    regions.close()
    del use
    add(regions, shared_object)
    assert Use(regions, SHARED, "a").read(0, 4096) == PATTERN[:4096], "a new registration has a new mapping"


def test_writing_to_an_object_that_shrank_reports_it(regions, shared_object):
    add(regions, shared_object)
    os.ftruncate(shared_object, 0)
    assert not Use(regions, SHARED, "a").write(5000, b"lost")
    assert os.fstat(shared_object).st_size == 0


def test_names_with_any_characters(regions, shared_object):
    names = ["ä", "a\0b", "a" * 255, "../x", " "]
    for name in names:
        add(regions, shared_object, name)
    assert [status.name for status in regions.entries(SHARED, SYSTEM)] == sorted(names)
    for name in names:
        assert Use(regions, SHARED, name).read(0, 1) == b"\0"


FAULT = """
import ctypes, mmap, os, signal
from inferd._native.memory.shm import Regions, SHARED, Use
regions = Regions(max_count=1, max_byte_size=4096)
fd = os.memfd_create("a"); os.ftruncate(fd, 4096)
regions.add_system(SHARED, "a", "a", fd, 0, 4096, trusted=True, writable=True)
{setup}
fd = os.memfd_create("b"); os.ftruncate(fd, 4096)
memory = mmap.mmap(fd, 4096)
os.ftruncate(fd, 0)
{act}
"""


def run(script):
    """Run it in a process of its own, without the handler that a sanitizer would install."""
    environment = {**os.environ, "ASAN_OPTIONS": f"{os.environ.get('ASAN_OPTIONS', 'detect_leaks=0')}:handle_sigbus=0"}
    return subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True, env=environment, timeout=60
    )


@pytest.mark.parametrize("act", ["memory[0]", "os.kill(os.getpid(), signal.SIGBUS)"])
def test_other_bus_errors_still_end_the_process(act):
    script = FAULT.format(setup="", act=act)
    assert run(script).returncode == -signal.SIGBUS


@pytest.mark.parametrize("when", ["before", "after"])
def test_other_bus_errors_reach_the_other_handler(when):
    """Whichever was there first, this library's looks after its mappings and the other hears of the rest."""
    enable = "import faulthandler; faulthandler.enable()\n"
    setup = f"{enable if when == 'after' else ''}Use(regions, SHARED, 'a')"
    script = (enable if when == "before" else "") + FAULT.format(setup=setup, act="memory[0]")
    done = run(script)
    assert done.returncode == -signal.SIGBUS
    assert "Fatal Python error: Bus error" in done.stderr


@pytest.mark.skipif(platform.machine() != "x86_64" or shutil.which("cc") is None, reason="it needs cc and x86-64")
def test_regions_that_come_and_go_do_not_mislead_the_handler(tmp_path):
    """Another thread may give the place of one mapping to another one while the handler looks at it."""
    sources = [(ROOT / "_native" / "memory" / f"mapping.{suffix}").read_text() for suffix in ("pxd", "pyx")]
    parts = [re.search(r'cdef extern from \*:\n    """\n(.*?)\n    """', text, re.DOTALL)[1] for text in sources]
    (tmp_path / "mapping.h").write_text("\n".join(parts))
    program = tmp_path / "steps"
    source = Path(__file__).with_name("mapping_steps.c")
    # flags are pushed to the stack, where without this option the function might keep something
    flags = ["-std=gnu11", "-O2", "-mno-red-zone", f"-I{tmp_path}"]
    subprocess.run(["cc", *flags, "-o", program, source], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert int(done.stdout.split()[0]) > 20  # instructions of the handler


def test_the_guard_returns_when_another_handler_has_taken_its_place():
    setup = "import faulthandler; faulthandler.enable()\nuse = Use(regions, SHARED, 'a')\nshrunk = os.memfd_create('s')"
    act = """
os.ftruncate(shrunk, 4096)
regions.close()
use.leave()
regions.add_system(SHARED, "a", "a", shrunk, 0, 4096, trusted=False, writable=True)
faulthandler.disable()
faulthandler.enable()
use = Use(regions, SHARED, "a")
os.ftruncate(shrunk, 0)
assert use.read(0, 1) is None
"""
    done = run(FAULT.format(setup=setup, act=act))
    assert done.returncode == 0, done.stderr


def test_the_alternate_stack_of_a_thread_is_not_written_to():
    """A library may have unmapped it: what lies there then is somebody else's, a client's region for example."""
    script = """
import ctypes
class Stack(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
memory = ctypes.create_string_buffer(1 << 16)
stack = Stack(ctypes.addressof(memory), 0, 1 << 16)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0
use = Use(regions, SHARED, "a")
os.ftruncate(fd, 0)
assert use.read(0, 1) is None
assert not any(memory.raw), "the handler ran on the alternate stack"
"""
    done = run(FAULT[: FAULT.index("{setup}")] + script)
    assert done.returncode == 0, done.stderr


class Model(RuleBasedStateMachine):
    """Regions as a dictionary says that they are; uses keep what they found."""

    used = Bundle("used")
    names = st.sampled_from(["a", "b", "c", "d"])
    scopes = st.sampled_from([SHARED, ALICE, BOB])

    def __init__(self):
        super().__init__()
        self.regions = Regions(max_count=6, max_byte_size=6 * SIZE)
        self.named = {}
        self.in_use = Counter()
        self.made = 0

    @rule(scope=scopes, name=names)
    def add(self, scope, name):
        self.made += 1
        content = self.made.to_bytes(8, "little")
        fd = os.memfd_create("model")
        os.write(fd, content)
        taken, full = (scope, name) in self.named, self.open() >= 6
        try:
            self.regions.add_system(scope, name, "key", fd, 0, 8, trusted=False, writable=True)
        except RegionError as error:
            assert error.status == (6 if taken else 8)
            assert taken or full
        else:
            assert not taken
            assert not full
            self.named[scope, name] = content
        finally:
            os.close(fd)

    @rule(scope=scopes, name=names)
    def remove(self, scope, name):
        assert self.regions.remove(scope, SYSTEM, name) is (self.named.pop((scope, name), None) is not None)

    @rule(scope=scopes)
    def remove_all(self, scope):
        gone = [key for key in self.named if key[0] == scope]
        assert self.regions.remove_all(scope, SYSTEM) == len(gone)
        for key in gone:
            del self.named[key]

    @rule(target=used, scope=scopes, name=names)
    def use(self, scope, name):
        content = self.named.get((scope, name))
        if content is None:
            assert self.regions.find(scope, name) is None
            return multiple()
        self.in_use[content] += 1
        return Use(self.regions, scope, name), content

    @rule(pair=consumes(used))
    def leave(self, pair):
        use, content = pair
        assert use.read(0, 8) == content
        self.in_use[content] -= 1
        use.leave()

    def open(self):
        return len(set(self.named.values()) | {content for content, count in self.in_use.items() if count})

    @invariant()
    def lists_what_is_named(self):
        for scope in (SHARED, ALICE, BOB):
            names = [status.name for status in self.regions.entries(scope, SYSTEM)]
            assert names == sorted(name for owner, name in self.named if owner == scope)


TestModel = Model.TestCase


def test_threads_register_use_and_unregister():
    regions = Regions(max_count=64, max_byte_size=1 << 30)
    wrong = []

    def work(seed):
        chance = random.Random(seed)
        for _ in range(1500):
            name = chance.choice("abcdef")
            what = chance.randrange(3)
            if what == 0:
                fd = os.memfd_create(name)
                os.write(fd, name.encode() * 64)
                try:
                    regions.add_system(SHARED, name, name, fd, 0, 64, trusted=False, writable=True)
                except RegionError as error:
                    if error.status not in (6, 8):
                        wrong.append(str(error))
                finally:
                    os.close(fd)
            elif what == 1:
                regions.remove(SHARED, SYSTEM, name)
            else:
                try:
                    use = Use(regions, SHARED, name)
                except KeyError:
                    continue
                if use.read(0, 64) != name.encode() * 64:
                    wrong.append(f"other bytes in {name}")

    in_threads(work, range(4))
    assert wrong == []
    regions.close()
    assert (regions.count, regions.byte_size) == (0, 0)
