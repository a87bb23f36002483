"""The driver of native connections: with a real event loop, a large message is read to where it stays."""

from __future__ import annotations

import asyncio
import random

import grpc
import pytest
import uvloop

from inferd._native.transport.endpoint import Endpoint
from inferd.server.front import native

LARGE = random.Random(7).randbytes(3 << 20)
ECHO = "/test.Large/Echo"


@pytest.fixture
def endpoints(monkeypatch):
    """The endpoints of doors that are made."""
    made = []

    def endpoint(*arguments, **options):
        made.append(Endpoint(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(native, "Endpoint", endpoint)
    yield made
    made.clear()


async def echo(message, context):
    return message


def ask(address: str) -> list[bytes]:
    options = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(address, options=options) as channel:
        return [channel.unary_unary(ECHO)(LARGE, timeout=30) for _ in range(3)]


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_most_of_a_large_message_is_not_copied(endpoints, tmp_path, kind):
    async def main() -> list[bytes]:
        door = native.NativeDoor()
        handler = grpc.unary_unary_rpc_method_handler(echo)
        door.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Large", {"Echo": handler}),))
        await door.start("127.0.0.1:0" if kind == "tcp" else f"unix:{tmp_path}/socket")
        answers = await asyncio.to_thread(ask, door.addresses[0])
        await door.stop(grace=5.0)
        return answers

    assert uvloop.run(main()) == [LARGE] * 3
    assert endpoints[0].direct > len(LARGE), "of three messages"
