"""Host policies: the cores and NUMA nodes on which the threads of instances run.

tritonserver's `--host-policy NAME,SETTING=VALUE`. An instance has the policy that its group names, else `cpu`,
`gpu_<id>` or `model`, by its kind.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from inferd._native.execution.affinity import bind_memory

NODES = Path("/sys/devices/system/node")

_NODE = re.compile("[0-9]{1,5}")
_CORES = re.compile("[0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*")


class HostPolicyError(ValueError):
    """A host policy that cannot be parsed or applied; the text has the reason."""


@dataclass(frozen=True, slots=True)
class HostPolicy:
    """The cores and memory of threads; an absent setting binds nothing."""

    name: str
    numa_node: int | None = None
    cores: frozenset[int] | None = None

    def bind(self) -> None:
        """Bind the calling thread, and with it the threads that it starts.

        Raises:
            HostPolicyError: the machine has no such node or cores, or the kernel refuses.
        """
        cores = self.cores
        if self.numa_node is not None:
            cores = cores or _cores_of(self.name, self.numa_node)
        if cores:  # a node may have memory alone
            self._bind_cores(cores)
        if self.numa_node is not None:
            self._bind_memory(self.numa_node)

    def _bind_cores(self, cores: frozenset[int]) -> None:
        try:
            os.sched_setaffinity(0, cores)
        except OSError as error:
            raise HostPolicyError(
                f"host policy '{self.name}': cannot run on cores {_written(cores)}: {error.strerror}; this process may "
                f"use {_written(os.sched_getaffinity(0))}"
            ) from error

    def _bind_memory(self, node: int) -> None:
        try:
            bind_memory(node)
        except (OSError, ValueError) as error:
            raise HostPolicyError(
                f"host policy '{self.name}': cannot bind memory to NUMA node {node}: {error} (containers need the "
                "capability SYS_NICE)"
            ) from error


def parse_host_policies(entries: Iterable[str]) -> dict[str, HostPolicy]:
    """`("gpu_0,numa-node=1", "gpu_0,cpu-cores=0-3,8-11")` by name.

    Raises:
        HostPolicyError: an entry has another form, or a setting is given twice.
    """
    found: dict[str, HostPolicy] = {}
    for entry in entries:
        name, _, setting = entry.partition(",")
        key, _, value = setting.partition("=")
        policy = found.get(name, HostPolicy(name))
        if name and key == "numa-node" and _NODE.fullmatch(value) and policy.numa_node is None:
            found[name] = replace(policy, numa_node=int(value))
        elif name and key == "cpu-cores" and _CORES.fullmatch(value) and policy.cores is None:
            found[name] = replace(policy, cores=_read(value, entry))
        else:
            raise _wrong(entry)
    return found


def _wrong(entry: str) -> HostPolicyError:
    return HostPolicyError(f"expected NAME,numa-node=N or NAME,cpu-cores=0-3,8-11, each once for a name, got {entry!r}")


def _cores_of(name: str, node: int) -> frozenset[int]:
    try:
        cores = (NODES / f"node{node}" / "cpulist").read_text().strip()
    except OSError:
        nodes = ", ".join(sorted(path.name.removeprefix("node") for path in NODES.glob("node[0-9]*"))) or "none"
        raise HostPolicyError(f"host policy '{name}': there is no NUMA node {node}: this machine has {nodes}") from None
    return _read(cores, cores)


def _read(text: str, entry: str) -> frozenset[int]:
    """The cores of a list such as "0-3,8".

    Raises:
        HostPolicyError: a range ends before it begins; the text shows the whole `entry`.
    """
    cores: set[int] = set()
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        if last and int(last) < int(first):
            raise _wrong(entry)
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def _written(cores: Iterable[int]) -> str:
    return ",".join(map(str, sorted(cores)))
