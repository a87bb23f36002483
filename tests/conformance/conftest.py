"""Fixtures: the server under test, on every door in the tree, or any server that `--target host:port` names."""

from __future__ import annotations

import contextlib
import functools

import grpc
import pytest

from tests.conformance import doors, generic
from tests.conformance.client import Control, Stub
from tests.conformance.fixtures import repository

__all__ = ["repository"]

SERVICER_PATHS = (f"/{generic.GENERIC}/", f"/{generic.REGISTERED}/")
_UNLIMITED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


def pytest_addoption(parser):
    parser.addoption("--target", help="host:port of a running server: run what applies to any server against it")


def pytest_generate_tests(metafunc):
    target = metafunc.config.getoption("--target", default=None)
    if "door" in metafunc.fixturenames:
        metafunc.parametrize("door", ["target"] if target else doors.NAMES, indirect=True, scope="session")
    if "engine" in metafunc.fixturenames:
        engines = ["target"] if target else ["fake", "real"]
        metafunc.parametrize("engine", engines, indirect=True, scope="session")


def pytest_collection_modifyitems(config, items):
    elsewhere = {item for item in items if _is_elsewhere(item)}
    config.hook.pytest_deselected(items=list(elsewhere))
    items[:] = [item for item in items if item not in elsewhere]


def _is_elsewhere(item):
    """Only the fake engine's process hosts the generic servicer, and that process is there for nothing else."""
    parameters = getattr(item, "callspec", None)
    if parameters is None or "engine" not in parameters.params:
        return False
    values = [value[0] if isinstance(value, tuple) else value for value in parameters.params.values()]
    of_servicer = any(isinstance(value, str) and value.startswith(SERVICER_PATHS) for value in values)
    return (of_servicer or "hosted" in item.fixturenames) != (parameters.params["engine"] == "fake")


@pytest.fixture(scope="session")
def door(request):
    """The name of the door under test; "target" for the server that `--target` names."""
    return request.param


@pytest.fixture(scope="session")
def engine(request):
    """The engine behind the door: the "fake" one, or that of the "real" server."""
    return request.param


@pytest.fixture(scope="session")
def servers(repository):
    """A function (door, engine) → `host:port`; each server is started once and stays to the end."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def address(door, engine):
            running = doors.running_door(door) if engine == "fake" else doors.running_server(door, repository)
            return stack.enter_context(running).address

        yield address


@pytest.fixture(scope="session")
def server(door, engine, servers, request):
    """`host:port` of a server with the models of `tests.conformance.models`."""
    return request.config.getoption("--target") if door == "target" else servers(door, engine)


@pytest.fixture(scope="session")
def hosted(server):
    """`host:port` of the fake engine's process, for tests of what only that process hosts."""
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
