"""Reports the server's state to the system's service manager: sd_notify(3) of systemd, for units of `Type=notify`."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping


class ServiceManager:
    """The service manager that has started this process; without one, reports are dropped.

    Args:
        environment: has NOTIFY_SOCKET, and WATCHDOG_USEC and WATCHDOG_PID where the unit has a watchdog.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        path = environment.get("NOTIFY_SOCKET", "")
        self._address = f"\0{path[1:]}" if path.startswith("@") else path
        self._period = _period(environment) if path else 0.0

    def tell(self, *lines: str) -> None:
        """Send variables, such as READY=1. They are lost if the manager does not read."""
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as sender:
            try:
                sender.sendto("\n".join(lines).encode(), self._address)
            except OSError:
                return

    async def keep_telling(self) -> None:
        """Tell the watchdog, twice in its time, that the event loop runs; return at once without a watchdog."""
        while self._period:
            self.tell("WATCHDOG=1")
            await asyncio.sleep(self._period / 2)


def _period(environment: Mapping[str, str]) -> float:
    """Seconds after which the watchdog ends a silent process; 0: there is none, or it is another process's."""
    told = environment.get("WATCHDOG_USEC", "")
    if not told.isdecimal() or environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0
    return int(told) / 1e6
