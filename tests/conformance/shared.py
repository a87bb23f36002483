"""Real servers that serve shared memory, and objects to register with them."""

from __future__ import annotations

import contextlib
import itertools
import os
from dataclasses import dataclass
from pathlib import Path

import grpc

from inferd_client.pb import grpc_service_pb2 as pb
from tests.conformance import doors
from tests.conformance.client import Stub

DIRECTORY = Path("/dev/shm")

_numbers = itertools.count()


@dataclass
class Server:
    """A running server: where it listens, and its process."""

    tcp: str
    unix: str
    process: doors.Process


@contextlib.contextmanager
def serving(door: str, repository: Path, folder: Path, *arguments: str):
    """A server on TCP and on a unix socket in `folder`."""
    unix = f"unix:{folder / 'inferd.sock'}"
    addresses = ("--grpc-address", "127.0.0.1", "--grpc-address", unix)
    with doors.running_server(door, repository, *addresses, *arguments) as process:
        yield Server(process.address, unix, process)


@contextlib.contextmanager
def connected(address: str):
    """A stub on a connection of its own."""
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield Stub(channel)


class Object:
    """A shared memory object of this process."""

    def __init__(self, content: bytes) -> None:
        self.name = f"inferd-test-{os.getpid()}-{next(_numbers)}"
        self.key = f"/{self.name}"
        self.path = DIRECTORY / self.name
        self.path.write_bytes(content)

    def read(self, offset: int = 0, size: int = -1) -> bytes:
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def write(self, content: bytes, offset: int = 0) -> None:
        with self.path.open("r+b") as file:
            file.seek(offset)
            file.write(content)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.path.unlink(missing_ok=True)


def register(stub, name: str, made: Object | str, byte_size: int, offset: int = 0, metadata=()):
    """Register a part of an object, or of whatever has the key."""
    key = made if isinstance(made, str) else made.key
    request = pb.SystemSharedMemoryRegisterRequest(name=name, key=key, offset=offset, byte_size=byte_size)
    return stub.SystemSharedMemoryRegister(request, metadata=metadata)


def unregister(stub, name: str = ""):
    return stub.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest(name=name))


def registered(stub, name: str = "") -> dict:
    """The regions that the server lists as registered: name → (key, offset, byte_size)."""
    regions = stub.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest(name=name)).regions
    assert all(name == region.name for name, region in regions.items())
    return {name: (region.key, region.offset, region.byte_size) for name, region in regions.items()}
