"""The signals that stop the server."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable

log = logging.getLogger("inferd")


REPEAT = 1.0
"""Seconds in which another signal counts as the same one: GNU timeout signals the process, and then its group."""


class StopSignal:
    """SIGINT and SIGTERM: the first signal asks for an orderly stop, another one ends the process at once."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._cleaning: list[Callable[[], None]] = []
        self.number = 0  # of the first signal
        self._asked_at = 0.0
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)

    async def wait(self) -> None:
        """Return after the first signal."""
        await self._asked.wait()

    def at_once(self, callback: Callable[[], None]) -> None:
        """Register `callback`, called before the process ends with unfinished work: by a second signal, or too late."""
        self._cleaning.append(callback)

    def _on_signal(self, number: int) -> None:
        if not self._asked.is_set():
            self.number = number
            self._asked_at = time.monotonic()
            self._asked.set()
            return
        if time.monotonic() < self._asked_at + REPEAT:
            return
        log.error("a second signal: exiting immediately")
        for callback in self._cleaning:
            callback()
        _exit(128 + number)

    def end_within(self, seconds: float) -> None:
        """End the process after `seconds` at the latest, even if threads block.

        A model's thread, or one that reads a file system without an answer, can keep the interpreter from ending.
        """
        guard = threading.Timer(min(seconds, threading.TIMEOUT_MAX), self._end_stuck)
        guard.daemon = True
        guard.start()

    def _end_stuck(self) -> None:
        names = [each.name for each in threading.enumerate() if not each.daemon]
        log.error("the process does not end by itself: it waits for one of its threads %s", ", ".join(names))
        self.out_of_time()

    def out_of_time(self) -> None:
        """End the process although work is unfinished, with the exit status of a process that the signal has killed."""
        log.error("Exit timeout expired. Exiting immediately.")
        for callback in self._cleaning:
            callback()
        _exit(128 + self.number)


def _exit(status: int) -> None:
    """End the process now: threads that load or execute models cannot be stopped."""
    logging.shutdown()
    os._exit(status)
