"""Redis servers for tests: the real one, and one that does what a test says."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[Path]:
    """A real server on a unix socket; without one here that knows the options, the test is skipped."""
    command = shutil.which("redis-server")
    if command is None:
        pytest.skip("redis-server is not installed")
    path = folder / "redis.sock"
    log = folder / "redis.log"
    quiet = ("--save", "", "--appendonly", "no", "--dir", str(folder))
    with log.open("w") as output:
        process = subprocess.Popen(
            [command, "--port", "0", "--unixsocket", str(path), *quiet, *options], stdout=output, stderr=output
        )
    try:
        _wait_for(path, process, log)
        yield path
    finally:
        process.terminate()
        process.wait(30)


def _wait_for(path: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(str(path))
                return
            except OSError:
                time.sleep(0.01)
    if "Bad directive" in log.read_text():
        pytest.skip("redis-server was built without TLS")
    raise AssertionError(f"redis-server did not start: {log.read_text()}")


class Puppet:
    """A Redis server that answers what is said at the beginning of a connection, and holds or answers GET and SET.

    Args:
        answer: to every GET, as bytes of the protocol; None: none until `release`.
    """

    def __init__(self, answer: bytes | None = None) -> None:
        self.answer = answer
        self.asked = asyncio.Semaphore(0)
        self.commands: list[list[bytes]] = []
        self._held: list[asyncio.StreamWriter] = []

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                command = await _read_command(reader)
                self.commands.append(command)
                if command[0].upper() == b"GET":
                    self.asked.release()
                    if self.answer is None:
                        self._held.append(writer)
                    else:
                        writer.write(self.answer)
                elif command[0].upper() == b"HELLO":
                    writer.write(b"%2\r\n+server\r\n+redis\r\n+proto\r\n:3\r\n")
                else:
                    writer.write(b"+PONG\r\n" if command[0].upper() == b"PING" else b"+OK\r\n")
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            writer.close()

    def release(self, answer: bytes = b"_\r\n") -> None:
        """Answer those who wait, and all who come; by default that there is nothing."""
        self.answer = answer
        for writer in self._held:
            writer.write(answer)
        self._held.clear()

    @asynccontextmanager
    async def serving(self, path: Path) -> AsyncIterator[Puppet]:
        server = await asyncio.start_unix_server(self._serve, path)
        try:
            yield self
        finally:
            server.close()
            await server.wait_closed()


async def _read_command(reader: asyncio.StreamReader) -> list[bytes]:
    count = int((await reader.readuntil(b"\r\n"))[1:])
    parts = []
    for _ in range(count):
        size = int((await reader.readuntil(b"\r\n"))[1:])
        parts.append((await reader.readexactly(size + 2))[:-2])
    return parts
