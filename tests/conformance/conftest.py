"""Fixtures: the server under test, on every door in the tree, or any server that `--target host:port` names."""

from __future__ import annotations

import grpc
import pytest

from tests.conformance import doors
from tests.conformance.client import Control, Stub

_UNLIMITED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


def pytest_addoption(parser):
    parser.addoption("--target", help="host:port of a running server: run what applies to any server against it")


def pytest_generate_tests(metafunc):
    if "door" in metafunc.fixturenames:
        target = metafunc.config.getoption("--target", default=None)
        metafunc.parametrize("door", ["target"] if target else doors.NAMES, indirect=True, scope="session")


@pytest.fixture(scope="session")
def door(request):
    """The name of the door under test; "target" for the server that `--target` names."""
    if request.param != "target" and not doors.exists(request.param):
        pytest.skip(f"the {request.param} door is not in the tree")
    return request.param


@pytest.fixture(scope="session")
def server(door, request):
    """`host:port` of a server with the models of `tests.conformance.models`."""
    if door == "target":
        yield request.config.getoption("--target")
        return
    with doors.serving_door(door) as address:
        yield address


@pytest.fixture(scope="session")
def hosted(door, server):
    """`host:port` of the same, for tests of what only our own process hosts."""
    if door == "target":
        pytest.skip("needs the generic servicer")
    return server


@pytest.fixture
def channel(server):
    with grpc.insecure_channel(server, options=_UNLIMITED) as channel:
        yield channel


@pytest.fixture
def stub(channel):
    return Stub(channel)


@pytest.fixture
def control(hosted, channel):
    return Control(channel)
