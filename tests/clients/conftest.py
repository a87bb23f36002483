"""Fixtures: the real server on each door with the models of the conformance suite, and the client programs."""

from __future__ import annotations

import warnings

import pytest

from tests.clients import toolchains
from tests.conformance import doors
from tests.conformance.fixtures import repository

__all__ = ["repository"]


@pytest.fixture(scope="session", params=doors.NAMES)
def address(request, repository):
    """`host:port` of a server."""
    with doors.running_server(request.param, repository) as process:
        yield process.address


@pytest.fixture(scope="session")
def command_of():
    """A function that gives the command of a client by its name, built once; it skips aloud what cannot be built."""
    made = {}

    def command(name):
        if name not in made:
            made[name] = or_skip(name, toolchains.CLIENTS[name].build)
        if isinstance(made[name], toolchains.Missing):
            pytest.skip(str(made[name]))
        return made[name]

    return command


@pytest.fixture(scope="session")
def report_of(command_of):
    """A function (client name, address) → what that client printed, by case; each client runs once for an address."""
    reports = {}

    def report(name, address):
        command = command_of(name)
        if (name, address) not in reports:
            reports[name, address] = {}  # stays so if it fails: then every case fails at once
            reports[name, address] = toolchains.report(command, address)
        return reports[name, address]

    return report


@pytest.fixture(scope="session")
def node_modules():
    found = or_skip("buf", toolchains.node_modules)
    if isinstance(found, toolchains.Missing):
        pytest.skip(str(found))
    return found


def or_skip(name, build):
    """The result of `build`; if it raises Missing, skip, and warn once, so that nobody takes the client for tested."""
    try:
        return build()
    except toolchains.Missing as missing:
        warnings.warn(f"{name} is NOT tested: {missing}; tools/client_packages.sh installs it", stacklevel=2)
        return missing
