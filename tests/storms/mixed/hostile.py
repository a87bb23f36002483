"""Clients that request much and read little, on threads of their own."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import numpy as np

from tests.conformance import h2cases
from tests.storms.mixed.clients import SERVICE, World, request

LARGE_WINDOW = h2cases.settings((4, 2**31 - 1)) + h2cases.window(0, 2**30)


def framed(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4, "big") + message


def dial(host: str, port: int) -> socket.socket:
    """A connection that takes few bytes ahead."""
    peer = socket.create_connection((host, port))
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    return peer


def trickle(world: World, hello: bytes) -> None:
    """Send `hello`, then read a byte every half second; connect again when the server closes the connection."""
    host, port = world.address.rsplit(":", 1)
    while not world.over:
        with contextlib.suppress(OSError), world.encryption.wrap(dial(host, int(port)), host) as peer:
            peer.sendall(hello)
            while not world.over and peer.recv(1):
                time.sleep(0.5)
        time.sleep(0.5)


def asks(path: str, message: bytes, calls: int) -> bytes:
    """The bytes of a connection with `calls` calls at once, whose windows let the server send all answers."""
    data = h2cases.PREFACE + LARGE_WINDOW
    for stream in range(1, 2 * calls, 2):
        data += h2cases.headers(stream, payload=h2cases.block(pseudo_path=path))
        data += h2cases.frame(h2cases.DATA, h2cases.END_STREAM, stream, framed(message))
    return data


def start(world: World) -> list[threading.Thread]:
    """Readers of one byte at a time: of large answers, and of a stream of many responses.

    They have a model of their own, since a Python model that sends waits for its reader until the server ends the call.
    """
    ones = request("flood", x=np.array([[1, 1, 16 << 20]], np.int32)).SerializeToString()
    many = request("flood", x=np.array([[2000, 1, 100_000]], np.int32)).SerializeToString()
    hellos = [asks(SERVICE + "ModelInfer", ones, 2)] * 4 + [asks(SERVICE + "ModelStreamInfer", many, 1)] * 2
    threads = [threading.Thread(target=trickle, args=(world, hello), daemon=True) for hello in hellos]
    for thread in threads:
        thread.start()
    return threads
