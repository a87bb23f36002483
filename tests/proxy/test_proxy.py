"""Envoy, nginx and haproxy with the configurations of deploy/ in front of two servers."""

from __future__ import annotations

import os
import threading
import time

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.clients.toolchains import run
from tests.conformance import models
from tests.conformance.client import Stub, floats, output, pb, request
from tests.proxy.conftest import wait_until_served
from tests.proxy.proxies import Server, running
from tests.waiting import look_until


def test_the_configuration_is_valid(installed):
    proxy, program = installed
    run(program, *proxy.check, proxy.configuration)


def test_unary_calls_reach_both_servers(channel, servers):
    before = [_executed(server) for server in servers]
    calls = [Stub(channel).ModelInfer.future(request("simple", floats(number))) for number in range(100)]
    assert [output(call.result(60)).item() for call in calls] == list(range(100))
    after = [_executed(server) for server in servers]
    assert sum(after) - sum(before) == 100
    assert all(now > then for now, then in zip(after, before, strict=True))


def test_a_large_tensor(channel):
    tensor = np.random.default_rng(7).random((1, 2_000_000), np.float32)
    np.testing.assert_array_equal(output(Stub(channel).ModelInfer(request("simple", tensor))), tensor)


def test_an_error_keeps_its_status_and_text(channel):
    with pytest.raises(grpc.RpcError) as error:
        Stub(channel).ModelInfer(request("nothing", floats(1)))
    assert error.value.code() is grpc.StatusCode.NOT_FOUND
    assert error.value.details() == "Request for unknown model: 'nothing' is not found"


def test_a_deadline_ends_the_call_through_a_proxy(channel):
    with pytest.raises(grpc.RpcError) as error:
        Stub(channel).ModelInfer(request("hang", floats(1)), timeout=0.3)
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_stream_is_answered_while_it_is_open(channel):
    numbers = iter(range(300))
    answered = threading.Semaphore(10)

    def requests():
        for number in numbers:
            answered.acquire()
            yield request("simple", floats(number), id=str(number))

    seen = []
    for answer in Stub(channel).ModelStreamInfer(requests()):
        seen.append(output(answer.infer_response).item())
        answered.release()
    assert seen == list(range(300))


def test_health_is_passed_through(channel):
    answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="simple"))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_a_server_that_is_not_serving_gets_no_calls(installed, servers, tmp_path):
    proxy, program = installed
    if not proxy.asks_health:
        pytest.skip(f"{proxy.name} asks for no health")
    models.write_repository(tmp_path / "broken", broken=True)
    broken = Server(tmp_path / "broken", drain=False)  # up, but one of its models did not load
    try:
        with running(proxy, program, tmp_path, [servers[0].port, broken.port]) as address:
            wait_until_served(address)
            with grpc.insecure_channel(address) as channel:

                def got_some():
                    before = _executed(broken)
                    for number in range(50):
                        Stub(channel).ModelInfer(request("simple", floats(number)))
                    return _executed(broken) - before

                look_until(got_some, lambda number: number == 0)  # the proxy may have to notice first
                assert got_some() == 0
    finally:
        broken.stop()


def test_a_rolling_restart_under_load_fails_no_call(address, servers):
    load = Load(address)
    try:
        for server in servers:
            _restart(server)
    finally:
        load.stop()
    assert load.failures == []
    assert load.calls > 0


def test_updates_under_load_fail_no_call(installed, tmp_path):
    """Two servers under load: each is restarted twice, and models are loaded anew on both all the time.

    INFERD_UPDATE_SECONDS says how long, if that takes no longer anyway.
    """
    proxy, program = installed
    if not proxy.asks_health:
        pytest.skip(f"{proxy.name} asks for no health")
    repository = tmp_path / "models"
    models.write_repository(repository)
    explicit = ("--model-control-mode=explicit", "--load-model=*")
    servers = [Server(repository, *explicit) for _ in range(2)]
    end = time.monotonic() + float(os.environ.get("INFERD_UPDATE_SECONDS", "15"))
    loads = restarts = 0
    try:
        with running(proxy, program, tmp_path, [server.port for server in servers]) as address:
            wait_until_served(address)
            load = Load(address)
            try:
                for server in servers * 2:
                    loads = _load_anew(servers, repository, loads)
                    _restart(server)
                    restarts += 1
                while time.monotonic() < end:
                    loads = _load_anew(servers, repository, loads)
            finally:
                load.stop()
    finally:
        for server in servers:
            server.stop()
    print(f"{proxy.name}: {load.calls} calls, {restarts} restarts, {loads} loads, {len(load.failures)} failures")
    assert load.failures == []
    assert restarts == 4
    assert load.calls > 0


def _load_anew(servers, repository, number):
    """Have the model that is asked loaded anew on each server, its files being others; how many loads."""
    for folder in (repository / "simple").glob("[0-9]*"):
        (folder / "weights").write_text(f"{number}")
    for server in servers:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            Stub(channel).RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="simple"), timeout=60)
    return number + len(servers)


def _restart(server):
    """While the proxy sends calls, until it has sent it some again."""
    look_until(lambda: _executed(server))
    server.stop()
    server.start()
    look_until(lambda: _executed(server))


def _executed(server):
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        answer = Stub(channel).ModelStatistics(pb.ModelStatisticsRequest(name="simple"))
    return answer.model_stats[0].inference_stats.success.count


class Load:
    """Calls through the proxy from several connections until stopped, four at a time on each, at most 400 a second."""

    def __init__(self, address, connections=4):
        self.calls = 0
        self.failures = []
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._channels = [
            grpc.insecure_channel(address, options=(("grpc.use_local_subchannel_pool", 1),)) for _ in range(connections)
        ]
        self._threads = [
            threading.Thread(target=self._call, args=(channel,)) for channel in self._channels for _ in range(4)
        ]
        for thread in self._threads:
            thread.start()

    def _call(self, channel):
        infer = Stub(channel).ModelInfer
        number = 0
        while not self._stopping.wait(0.04):
            number += 1
            failure = None
            try:
                if output(infer(request("simple", floats(number)), timeout=60)).item() != number:
                    failure = "another call's answer"
            except grpc.RpcError as error:
                failure = f"{error.code()}: {error.details()}"
            with self._lock:
                self.calls += 1
                if failure:
                    self.failures.append(failure)

    def stop(self):
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        for channel in self._channels:
            channel.close()
