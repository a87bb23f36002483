"""The table of the service: complete, and refused where nothing serves a method."""

from __future__ import annotations

import asyncio
import threading
import types

import pytest

from inferd.server.engine.models.registry import IndexEntry
from inferd.server.errors import Unimplemented
from inferd.server.rpc.call import LONGEST, flag, timeout_ns
from inferd.server.rpc.metadata import Identity
from inferd.server.rpc.repository import HIDDEN, Repository
from inferd.server.rpc.service import ENCODED, RAW, SERVICE, table
from inferd.server.rpc.shared_memory import LIFETIME, SharedMemoryRegistration
from inferd_client.pb import grpc_service_pb2 as pb
from tests.conformance.fake_engine import FakeEngine


class FakeCall:
    """A call with fixed properties."""

    peer = "ipv4:127.0.0.1:1"

    def __init__(self, metadata=(), remaining=None):
        self.metadata = metadata
        self._remaining = remaining

    def time_remaining(self):
        return self._remaining


@pytest.fixture
def methods():
    return {method.name: method for method in table(FakeEngine(), Identity())}


def test_every_method_of_the_protocol_is_in_the_table(methods):
    described = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert described.full_name == SERVICE
    assert list(methods) == [method.name for method in described.methods]
    assert len(methods) == 20


def test_only_inference_is_raw(methods):
    assert {name for name, method in methods.items() if method.request is None} == RAW
    assert {name for name, method in methods.items() if method.response is None} == ENCODED
    assert RAW < ENCODED


async def test_a_method_without_a_handler_is_refused_by_name(methods):
    with pytest.raises(Unimplemented, match="TraceSetting"):
        await methods["TraceSetting"].handler(pb.TraceSettingRequest(), FakeCall())


@pytest.mark.parametrize(
    ("remaining", "nanoseconds"), [(None, -1), (0.0, 0), (1.5, 1_500_000_000), (3.6e11, int(LONGEST * 1e9))]
)
def test_the_remaining_time_is_nanoseconds_within_bounds(remaining, nanoseconds):
    assert timeout_ns(FakeCall(remaining=remaining)) == nanoseconds
    assert nanoseconds < 2**62


@pytest.mark.parametrize(
    ("metadata", "on"),
    [((), False), ((("f", "true"),), True), ((("f", "True"),), True), ((("f", "1"),), True), ((("f", "yes"),), False),
     ((("f", "true"), ("f", "false")), False), ((("g", "true"),), False)],
)  # fmt: skip
def test_a_header_is_a_flag_only_when_it_is_true_and_comes_once(metadata, on):
    assert flag(FakeCall(metadata), "f") is on


async def test_reasons_that_name_a_hidden_model_are_hidden():
    """Guards the index for a caller that may not use every model; names may have quotes themselves."""
    reasons = {
        "a": "it needs 'secret', which is not there",
        "b": "it needs 'it's', which is not there",
        "c": "secret is no name here, and 'a' is known",
        "d": "the file 'secret.onnx' is broken",
        "secret": "",
        "it's": "",
    }

    async def repository_index():
        return [IndexEntry(name, "1", "UNAVAILABLE", reason, ()) for name, reason in reasons.items()]

    call = FakeCall()
    call.may_use = lambda name: len(name) == 1
    repository = Repository(types.SimpleNamespace(repository_index=repository_index))
    index = pb.RepositoryIndexResponse.FromString(await repository.index(pb.RepositoryIndexRequest(), call))
    told = {each.name: each.reason for each in index.models}
    assert told == {"a": HIDDEN, "b": HIDDEN, "c": reasons["c"], "d": reasons["d"]}


class SlowRegions:
    """Regions of a driver that opens memory only when the client has gone."""

    def __init__(self):
        self.opening, self.gone = threading.Event(), threading.Event()
        self.owners = []

    def register_cuda(self, user, name, handle, device, byte_size, owner):
        self.opening.set()
        assert self.gone.wait(30)
        self.owners.append(owner)

    def withdraw(self, owner):
        self.owners = [each for each in self.owners if each != owner]
        self.gone.set()


async def test_a_region_is_not_left_of_a_connection_that_ends_while_it_is_registered():
    """The end of the connection comes before the region is there."""
    regions, departed = SlowRegions(), []
    handler = SharedMemoryRegistration(types.SimpleNamespace(shared_memory=regions))
    call = FakeCall(((LIFETIME, "connection"),))
    call.peer_credentials, call.connection, call.on_disconnect = None, 7, departed.append
    registering = asyncio.create_task(handler.cuda_register(pb.CudaSharedMemoryRegisterRequest(name="r"), call))
    await asyncio.to_thread(regions.opening.wait, 30)
    for each in departed:
        each()
    await registering
    assert regions.owners == []
