"""The GPUs of this machine, which the driver lists once, and the memory that their instances share."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from inferd._native.cuda import driver
from inferd._native.cuda.device import Device, device
from inferd._native.cuda.driver import CudaError
from inferd._native.cuda.memory import DevicePool, PageLocked
from inferd.server.settings import DEFAULTS, DEVICE_POOL_SIZE

log = logging.getLogger("inferd.cuda")


@dataclass(frozen=True, slots=True)
class GpuPolicy:
    """The server's limits for GPUs.

    Attributes:
        library: of the driver.
        pinned_size: bytes of page-locked memory at most, for each node of the host's memory.
        pool_sizes: bytes of memory at most that are kept for tensors, by device.
        load_limits: fractions of the memory, by device: no model is loaded on a device with more memory in use.
    """

    library: str = DEFAULTS.cuda_driver
    pinned_size: int = DEFAULTS.pinned_memory_pool_byte_size
    pool_sizes: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    load_limits: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))


def _described(gpu: Device) -> str:
    capability = ".".join(map(str, gpu.compute_capability))
    return f"{gpu.name}, {gpu.uuid}, compute capability {capability}, {gpu.total_memory >> 20} MiB"


class Gpus:
    """Devices and their memory. The driver is called, and memory taken, at the first need.

    Safe to use from several threads.
    """

    def __init__(self, policy: GpuPolicy | None = None) -> None:
        self._policy = policy or GpuPolicy()
        self._lock = threading.Lock()
        self._count: int | None = None
        self._pinned: dict[int, PageLocked] = {}
        self._pools: dict[int, DevicePool] = {}

    @property
    def count(self) -> int:
        """How many GPUs there are; 0 without a driver, which is logged once."""
        with self._lock:
            if self._count is None:
                self._count = self._ask()
            return self._count

    def _ask(self) -> int:
        try:
            driver.load(self._policy.library)
        except driver.CudaUnavailable as error:
            log.log(logging.INFO if self._policy.library == DEFAULTS.cuda_driver else logging.WARNING, "%s", error)
            return 0
        count = driver.device_count()
        for ordinal in range(count):
            try:
                log.info("GPU %d: %s", ordinal, _described(device(ordinal)))
            except CudaError as error:  # models elsewhere are served; one on this GPU fails to load with this error
                log.warning("GPU %d cannot be used now: %s", ordinal, error)
        return count

    def device(self, ordinal: int) -> Device:
        """The device with this ordinal."""
        if not 0 <= ordinal < self.count:
            raise ValueError(f"there is no GPU {ordinal}: there are {self.count}")
        return device(ordinal)

    def is_too_full(self, ordinal: int) -> bool:
        """Whether more of a device's memory is in use, by any process, than the limit for loads."""
        limit = self._policy.load_limits.get(ordinal)
        if limit is None:
            return False
        free, total = self.device(ordinal).memory_info()
        return total - free > limit * total

    def pinned(self, ordinal: int) -> PageLocked:
        """Page-locked memory for the copies of a device: one pool for each node of the host's memory."""
        gpu = self.device(ordinal)
        with self._lock:
            node = gpu.numa_node
            if node not in self._pinned:
                self._pinned[node] = PageLocked(gpu, self._policy.pinned_size)
            return self._pinned[node]

    def pool(self, ordinal: int) -> DevicePool:
        """Memory of a device for tensors."""
        gpu = self.device(ordinal)
        with self._lock:
            if ordinal not in self._pools:
                self._pools[ordinal] = DevicePool(gpu, self._policy.pool_sizes.get(ordinal, DEVICE_POOL_SIZE))
            return self._pools[ordinal]

    def pools(self) -> dict[str, DevicePool | PageLocked]:
        """The pools in use, by name: "gpu 0" and "page-locked 0" by device and by node.

        They have locks of their own, so no caller waits here for a driver that frees slowly.
        """
        with self._lock:
            return {
                **{f"gpu {ordinal}": pool for ordinal, pool in self._pools.items()},
                **{f"page-locked {node}": pool for node, pool in self._pinned.items()},
            }

    def trim(self) -> int:
        """Give unused memory back to the driver; returns the number of its bytes."""
        return sum(pool.trim() for pool in self.pools().values())

    def usage(self) -> dict[str, dict[str, int]]:
        """The pools in use, as `Memory.usage` says."""
        return {name: pool.usage() for name, pool in self.pools().items()}
