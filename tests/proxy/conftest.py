"""Fixtures: each proxy with two servers behind it."""

from __future__ import annotations

import contextlib

import grpc
import pytest

from tests.clients.conftest import or_skip
from tests.clients.toolchains import Missing
from tests.conformance.client import Stub, pb
from tests.conformance.fixtures import repository
from tests.proxy.proxies import PROXIES, Server, running
from tests.waiting import look_until

__all__ = ["repository"]


@pytest.fixture(scope="session", params=PROXIES)
def installed(request):
    """A proxy and its program."""
    proxy = PROXIES[request.param]
    program = or_skip(proxy.name, proxy.program)
    if isinstance(program, Missing):
        pytest.skip(str(program))
    return proxy, program


@pytest.fixture(scope="package")
def servers(repository):
    """Two servers."""
    with contextlib.ExitStack() as stack:
        started = [Server(repository) for _ in range(2)]
        for server in started:
            stack.callback(server.wait)
        for server in started:
            stack.callback(server.terminate)  # both, before the first wait
        yield started


@pytest.fixture
def address(installed, servers, tmp_path):
    """`host:port` of the proxy in front of the servers."""
    with running(*installed, tmp_path, [server.port for server in servers]) as address:
        wait_until_served(address)
        yield address


@pytest.fixture
def channel(address):
    unlimited = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
    with grpc.insecure_channel(address, options=unlimited) as channel:
        yield channel


def wait_until_served(address):
    """Until the proxy has found a server that is well."""
    with grpc.insecure_channel(address) as channel:

        def is_served():
            with contextlib.suppress(grpc.RpcError):
                return Stub(channel).ServerReady(pb.ServerReadyRequest(), timeout=10).ready
            return False

        look_until(is_served)
