"""The memory and cores that the server may use: the lowest limit of its control groups, of both versions, and of the
machine."""

from __future__ import annotations

import os

import pytest

from inferd.server.machine import Memory, cores, memory

MIB = 1 << 20


@pytest.fixture
def root(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 8192 kB\nMemFree: 1 kB\nMemAvailable: 3072 kB\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    return tmp_path


def group(folder, limit, used, idle, *, first=False):
    """Write the files of a control group."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if first else ("memory.max", "memory.current")
    for name, value in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{'total_' if first else ''}inactive_file {idle}\n")


def test_without_groups_it_is_the_machines(root):
    assert memory(root) == Memory(8 * MIB, 5 * MIB)


def test_a_container_sees_its_own_group_at_the_top(root):
    (root / "proc/self/cgroup").write_text("0::/\n")
    group(root / "sys/fs/cgroup", 4 * MIB, 3 * MIB, MIB)
    assert memory(root) == Memory(4 * MIB, 2 * MIB)


def test_a_unit_of_systemd_has_its_limit_below_or_above(root):
    """A group above with a lower limit counts; `max` is no limit."""
    (root / "proc/self/cgroup").write_text("0::/system.slice/inferd.service\n")
    group(root / "sys/fs/cgroup/system.slice/inferd.service", 2 * MIB, MIB, 0)
    group(root / "sys/fs/cgroup/system.slice", "max", 7 * MIB, 0)
    assert memory(root) == Memory(2 * MIB, MIB)
    group(root / "sys/fs/cgroup/system.slice", MIB, MIB // 2, 0)
    assert memory(root) == Memory(MIB, MIB // 2)


def test_the_first_version_of_groups(root):
    """In a container its own path is the host's, which is not seen from there."""
    (root / "proc/self/cgroup").write_text("5:cpu:/docker/a\n4:memory:/docker/a\n0::/\n")
    group(root / "sys/fs/cgroup/memory", 3 * MIB, 2 * MIB, MIB, first=True)
    assert memory(root) == Memory(3 * MIB, MIB)
    group(root / "sys/fs/cgroup/memory/docker/a", 2**63 - 4096, MIB, 0, first=True)
    assert memory(root) == Memory(3 * MIB, MIB)


@pytest.mark.parametrize(
    ("told", "expected"), [("max 100000", 8), ("200000 100000", 2), ("250000 100000", 3), ("1000 100000", 1)]
)
def test_a_quota_of_cores(root, monkeypatch, told, expected):
    """The part of a core that is left over counts as a core."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert cores(root) == 8
    (root / "proc/self/cgroup").write_text("0::/\n")
    (root / "sys/fs/cgroup/cpu.max").write_text(f"{told}\n")
    assert cores(root) == expected


def test_a_quota_of_cores_in_the_first_version_of_groups(root, monkeypatch):
    """A quota of -1 is none, and a group above may have a lower one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    (root / "proc/self/cgroup").write_text("5:cpu,cpuacct:/a\n")
    for folder, quota in (("a", -1), ("", 400_000)):
        path = root / "sys/fs/cgroup/cpu" / folder
        path.mkdir(parents=True, exist_ok=True)
        (path / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (path / "cpu.cfs_period_us").write_text("100000\n")
    assert cores(root) == 4
