"""A process with one door that serves one method, `/test.Peer/Who`: it tells the client what is known of it.

python -m tests.front.host DOOR ADDRESS... [--certificate PEM --key PEM [--root PEM]] [--reuse-port] [--mode OCTAL]
    [--handshake-timeout SECONDS]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
from pathlib import Path

import grpc
import uvloop

from inferd.server.front.keepalive import ConnectionPolicy
from inferd.server.front.listeners import ListenPolicy
from inferd.server.front.services import ContextCall
from inferd.server.front.tls import Credentials
from tests.conformance import doors

WHO = "/test.Peer/Who"


async def who(message, context):
    """What handlers know of the client, as JSON; the message is the seconds to wait first."""
    await asyncio.sleep(float(message or 0))
    call = ContextCall(context)
    credentials = call.peer_credentials
    told = {
        "peer": call.peer,
        "credentials": credentials and [credentials.pid, credentials.uid, credentials.gid],
        "names": call.peer_names,
        "identity_key": context.peer_identity_key(),
        "identities": [each.decode() for each in context.peer_identities() or ()],
        "auth": sorted(context.auth_context()),
    }
    return json.dumps(told).encode()


def started(door: str, *arguments: object):
    """Run the process; a context manager over `tests.conformance.doors.Process`."""
    return doors.running(sys.executable, "-m", "tests.front.host", door, *map(str, arguments))


def ask(channel: grpc.Channel, wait: float = 0.0, timeout: float = 60.0) -> dict:
    """Call the method."""
    return json.loads(channel.unary_unary(WHO)(str(wait).encode(), timeout=timeout))


def policy_of(arguments) -> ListenPolicy:
    credentials = None
    if arguments.certificate:
        credentials = Credentials(arguments.certificate, arguments.key, arguments.root)
    return ListenPolicy(
        reuse_port=arguments.reuse_port,
        unix_mode=int(arguments.mode, 8),
        unix_owner=arguments.owner,
        credentials=credentials,
    )


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("door")
    parser.add_argument("addresses", nargs="+")
    for option in ("--certificate", "--key", "--root"):
        parser.add_argument(option, type=Path)
    parser.add_argument("--mode", default="660")
    parser.add_argument("--owner", default="")
    parser.add_argument("--reuse-port", action="store_true")
    parser.add_argument("--handshake-timeout", type=float, default=10.0)
    arguments = parser.parse_args()
    connections = ConnectionPolicy(handshake_timeout=arguments.handshake_timeout)
    door = doors.make(arguments.door, policy=policy_of(arguments), connections=connections)
    handler = grpc.unary_unary_rpc_method_handler(who)
    door.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Peer", {"Who": handler}),))
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    print(f"port {await door.start(*arguments.addresses)}", *door.addresses, sep="\n", flush=True)
    await stopping.wait()
    await door.stop(grace=2.0)


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    uvloop.run(main())
