"""A circuit breaker: decides whether a service that may be down or slow is called at all.

It opens when the service refuses, or when several calls in a row time out. While it is open, requests do not call the
service; a probe regularly checks whether the service works again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

TIMEOUTS: Final = 3
"""The circuit opens at so many late calls in a row."""

PROBE_SECONDS: Final = 1.0
"""Seconds between two probes while the circuit is open."""

QUIET_SECONDS: Final = 60.0
"""Seconds in which the circuit logs at most once that it has opened."""


class Circuit:
    """A circuit, closed until `failed` opens it.

    Args:
        what: the name of the service, for the log.
        without: what happens to requests while the circuit is open, for the log.
        probe: returns if the service works, else raises; limits its own time.
        log: the logger.
    """

    def __init__(self, what: str, without: str, probe: Callable[[], Awaitable[object]], log: logging.Logger) -> None:
        self._what = what
        self._without = without
        self._probe = probe
        self._log = log
        self._late = 0
        self._probing: asyncio.Task[None] | None = None
        self._told = float("-inf")

    @property
    def open(self) -> bool:
        """Whether callers must not call the service."""
        return self._probing is not None

    def succeeded(self) -> None:
        """The service has answered a call."""
        self._late = 0

    def failed(self, error: BaseException, *, late: bool) -> None:
        """A call has failed with this error, which is a timeout if `late`."""
        self._late += 1
        if self.open or (late and self._late < TIMEOUTS):
            return
        loop = asyncio.get_running_loop()
        if loop.time() - self._told >= QUIET_SECONDS:
            self._told = loop.time()
            self._log.warning(
                "%s does not answer (%s): %s, and it is tried every %g s",
                self._what,
                str(error) or type(error).__name__,
                self._without,
                PROBE_SECONDS,
            )
        self._probing = loop.create_task(self._close_again())

    async def _close_again(self) -> None:
        while True:
            await asyncio.sleep(PROBE_SECONDS)
            try:
                await self._probe()
            except Exception as error:
                self._log.debug("%s: %s", self._what, error)
                continue
            self._late = 0
            self._probing = None
            self._log.info("%s answers again", self._what)
            return

    async def close(self) -> None:
        """End the probe."""
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)
