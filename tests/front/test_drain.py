"""The end of the real server, in order at the first signal, at once at the second; the command's TLS and sockets."""

from __future__ import annotations

import queue
import signal
import stat
import subprocess
import sys
import threading
import time
from collections import Counter

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from inferd.server.front.door import STOPPING
from inferd_client.pb import grpc_service_pb2 as pb
from tests import forkserver
from tests.conformance import doors
from tests.conformance.client import Stub, floats, request
from tests.conformance.held import NAME as HELD
from tests.conformance.held import add_held_model
from tests.conformance.raw import Client, framed
from tests.front.certificates import Authority

both_doors = pytest.mark.parametrize("door", doors.NAMES)

INFER = "/inference.GRPCInferenceService/ModelInfer"
LIVE = "/inference.GRPCInferenceService/ServerLive"


@pytest.mark.parametrize("sent", [True, False])
def test_none_of_128_calls_is_lost(repository, sent):
    """The signal comes when all of them have been sent, or while they are."""
    with doors.running_server("native", repository) as process:
        channels = [
            grpc.insecure_channel(process.address, options=[("grpc.use_local_subchannel_pool", 1)]) for _ in range(8)
        ]
        for channel in channels:
            grpc.channel_ready_future(channel).result(60)
        calls = [
            Stub(channels[i % 8]).ModelInfer.future(request("slow", floats(i), id=str(i)), timeout=120)
            for i in range(128)
        ]
        if sent:
            for channel in channels:
                Stub(channel).ServerLive(pb.ServerLiveRequest())  # behind the calls on its connection
        process.terminate()
        outcome = Counter(call.code() for call in calls)
        accepted = [i for i, call in enumerate(calls) if call.code() is grpc.StatusCode.OK]
        for i in accepted:
            assert calls[i].result().id == str(i)
        assert process.wait() == 0
        for channel in channels:
            channel.close()
    if sent:
        assert outcome == {grpc.StatusCode.OK: 128}
    # a call that the server never took may be told that nobody is there any more
    assert set(outcome) <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}


@both_doors
def test_readiness_goes_first_and_service_later(door, repository):
    with (
        doors.running_server(door, repository, "--drain-delay", "1") as process,
        grpc.insecure_channel(process.address) as channel,
    ):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        begin = time.monotonic()
        process.terminate()
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.RpcError) as ended:
            next(watch)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert process.wait() == 0
        assert time.monotonic() - begin > 0.9


def test_an_idle_stream_is_ended_when_its_requests_are_answered(repository):
    with (
        doors.running_server("native", repository) as process,
        grpc.insecure_channel(process.address) as channel,
    ):
        stub = Stub(channel)
        sent, done = threading.Event(), threading.Event()

        def requests():
            for i in range(2):
                yield request("slow", floats(i), id=str(i))
            sent.set()
            done.wait(60)  # the client does not half-close

        responses = stub.ModelStreamInfer(requests())
        assert next(responses).infer_response.id == "0"
        assert sent.wait(60)
        stub.ServerLive(pb.ServerLiveRequest())  # behind the requests on their connection
        process.terminate()
        assert next(responses).infer_response.id == "1"
        with pytest.raises(grpc.RpcError) as ended:
            next(responses)
        done.set()
        assert (ended.value.code(), ended.value.details()) == (grpc.StatusCode.UNAVAILABLE, STOPPING)
        assert process.wait() == 0


def test_a_client_that_always_sends_more_does_not_keep_the_server(repository):
    """The stream always has a request open; the server answers those that had come, and ends the stream."""
    with (
        doors.running_server("native", repository) as process,
        grpc.insecure_channel(process.address) as channel,
    ):
        more: queue.SimpleQueue[bool] = queue.SimpleQueue()
        for _ in range(3):
            more.put(True)
        requests = (request("slow", floats(i), id=str(i)) for i, _ in enumerate(iter(more.get, None)))
        responses, count = Stub(channel).ModelStreamInfer(requests, timeout=20), 0
        with pytest.raises(grpc.RpcError) as ended:
            for response in responses:
                assert response.infer_response.id == str(count)
                count += 1
                more.put(True)
                if count == 1:
                    process.terminate()
        more.put(None)
        assert (ended.value.code(), ended.value.details()) == (grpc.StatusCode.UNAVAILABLE, STOPPING)
        assert process.wait() == 0


def test_signals_that_repeat_or_have_nothing_to_do_end_no_call(repository):
    """SIGHUP is for a log file, of which there is none. Two SIGTERMs at once, as GNU timeout sends them, are one."""
    with (
        doors.running_server("native", repository) as process,
        grpc.insecure_channel(process.address) as channel,
    ):
        stub = Stub(channel)
        process.interrupt(signal.SIGHUP)
        call = stub.ModelInfer.future(request("slow", floats(1)))
        stub.ServerLive(pb.ServerLiveRequest())  # behind it on the connection
        process.interrupt(signal.SIGTERM)
        process.interrupt(signal.SIGTERM)
        assert call.result(timeout=60).id == ""
        assert process.wait() == 0


def test_what_outlasts_the_exit_timeout_is_unavailable(repository):
    with (
        doors.running_server(
            "native", repository, "--exit-timeout-secs", "1", ends_with=128 + signal.SIGTERM
        ) as process,
        grpc.insecure_channel(process.address) as channel,
    ):
        stub = Stub(channel)
        stub.ServerLive(pb.ServerLiveRequest())
        unary = [stub.ModelInfer.future(request("hang", floats(i))) for i in range(17)]  # more than two batches
        stream = stub.ModelStreamInfer(iter([request("hang", floats(1))]))
        stub.ServerLive(pb.ServerLiveRequest())  # behind the others on their connection
        process.terminate()
        for call in unary:
            assert (call.code(), call.details()) == (grpc.StatusCode.UNAVAILABLE, STOPPING)
        with pytest.raises(grpc.RpcError) as ended:
            next(stream)
        assert (ended.value.code(), ended.value.details()) == (grpc.StatusCode.UNAVAILABLE, STOPPING)
        assert process.wait() == 128 + signal.SIGTERM  # not an orderly stop


PATIENT = """
import sys
from inferd.server import app, cli
app.LAST_SECOND = 60
sys.exit(cli.main())
"""
"""A server that lets models finish for longer than a second when the exit timeout has passed."""


def test_a_request_that_outlasts_its_call_is_in_the_access_log(tmp_path):
    """The client hears that the server stops; the server executes the request all the same, then writes its record."""
    go = add_held_model(tmp_path)
    command = [sys.executable, "-c", PATIENT, "serve", "--model-repository", str(tmp_path), "--grpc-port", "0"]
    with (
        doors.running(*command, "--exit-timeout-secs", "0", "--access-log", "1") as process,
        grpc.insecure_channel(process.address) as channel,
    ):
        stub = Stub(channel)
        stub.ServerLive(pb.ServerLiveRequest())
        call = stub.ModelInfer.future(request(HELD, np.zeros(1, np.float32), id="the last"))
        stub.ServerLive(pb.ServerLiveRequest())  # behind the other call on its connection
        process.terminate()
        assert (call.code(), call.details()) == (grpc.StatusCode.UNAVAILABLE, STOPPING)
        go.touch()
        assert process.wait() == 0
        assert [line for line in process.lines if "the last" in line]


def test_a_request_on_its_way_is_received_and_answered(repository):
    """The call was accepted with its headers; its message is still coming when the server is told to stop."""
    message = framed(request("simple", floats(*range(16))).SerializeToString())
    with doors.running_server("native", repository) as process, Client(process.address) as client:
        stream = client.headers(INFER)
        client.data(stream, message[:20])
        assert client.call(LIVE).status == 0  # behind the other call on its connection
        process.terminate()
        client.receive_until(lambda: client.goaway is not None)
        client.data(stream, message[20:], end=True)
        assert client.answer(stream).status == 0
        assert process.wait() == 0


@pytest.mark.parametrize(
    ("door", "number"), [("native", signal.SIGTERM), ("native", signal.SIGINT), ("grpcio", signal.SIGTERM)]
)
def test_a_stopping_server_serves_until_a_second_signal_ends_it_at_once(door, repository, number, tmp_path):
    process = doors.Process(
        *(sys.executable, "-m", "inferd", "serve", "--model-repository", str(repository), "--transport", door),
        *("--grpc-port", "0", "--grpc-address", "127.0.0.1", "--grpc-address", f"unix:{tmp_path}/s"),
        *("--drain-delay", "3600"),
    )
    try:
        with grpc.insecure_channel(process.wait_until_it_listens()) as channel:
            process.interrupt(number)
            process.says("stopping: not ready any more")
            stub = Stub(channel)
            assert not stub.ServerReady(pb.ServerReadyRequest()).ready
            for _ in range(5):
                assert stub.ModelInfer(request("simple", floats(1))).outputs
            process.interrupt(number)  # within a second, it may be the same one once more
            assert stub.ModelInfer(request("simple", floats(1))).outputs
            process.interrupt_until_it_ends(number)
            assert process.wait() == 128 + number
    finally:
        process.kill()
    assert not (tmp_path / "s").exists()


HUNG_UP = """
import os, signal, sys
from inferd.server import app, cli
app.run = lambda settings: os.kill(os.getpid(), signal.SIGHUP) or 0
sys.exit(cli.main())
"""
"""A server that gets the signal before it has begun to load models."""


@pytest.mark.parametrize("options", [(), ("--log-file", "/dev/null")])
def test_sighup_while_the_server_starts_has_no_effect(repository, options):
    command = [sys.executable, "-c", HUNG_UP, "serve", "--model-repository", str(repository), *options]
    assert subprocess.run(command, cwd=doors.ROOT, check=False).returncode == 0


STAYING = """
import threading
class TritonPythonModel:
    def initialize(self, args):
        threading.Thread(target=threading.Event().wait, name="that stays", daemon=False).start()
    def execute(self, requests):
        return []
"""


def test_a_thread_of_a_model_keeps_the_process_no_longer_than_the_exit_timeout(tmp_path):
    """The interpreter would wait for it for ever."""
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(STAYING)
    (tmp_path / "m" / "config.pbtxt").write_text(
        'backend: "python"\nparameters { key: "EXECUTION_MODE" value { string_value: "in-process" } }\n'
    )
    with doors.running_server(
        "native", tmp_path, "--exit-timeout-secs", "1", ends_with=128 + signal.SIGTERM
    ) as process:
        pass
    assert "threads MainThread, that stays" in "\n".join(process.lines)


def test_a_signal_while_models_are_loading(tmp_path):
    slow = tmp_path / "backends" / "slow_to_load.py"
    slow.parent.mkdir()
    slow.write_text("import time\nprint('loading', flush=True)\ntime.sleep(600)\n")
    folder = tmp_path / "models" / "slow"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text('backend: "slow_to_load"\nmax_batch_size: 1\n')
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "inferd", "serve", "--model-repository", str(folder.parent), "--grpc-port", "0"),
            *("--backend-directory", str(slow.parent), "--exit-timeout-secs", "1"),
        ],
        cwd=doors.ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "loading\n"
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM


# ---- the command's options ------------------------------------------------------------------------------------------


@both_doors
def test_the_command_serves_tls_and_a_unix_socket(door, repository, tmp_path):
    grpcclient = pytest.importorskip("tritonclient.grpc")
    authority = Authority(tmp_path / "authority")
    server, client = authority.issue("server", "DNS:localhost", "IP:127.0.0.1"), authority.issue("client")
    options = (
        *("--grpc-address", "127.0.0.1", "--grpc-address", f"unix://{tmp_path}/s", "--grpc-unix-mode", "600"),
        *("--grpc-use-ssl-mutual", "--grpc-server-cert", str(server.certificate), "--grpc-server-key", str(server.key)),
        *("--grpc-root-cert", str(authority.root)),
    )
    encrypted = {
        "ssl": True,
        "root_certificates": str(authority.root),
        "private_key": str(client.key),
        "certificate_chain": str(client.certificate),
    }
    with doors.running_server(door, repository, *options) as process:
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
        for address, security in ((process.address, encrypted), (f"unix:{tmp_path}/s", {})):
            with grpcclient.InferenceServerClient(address, **security) as connection:
                tensor = grpcclient.InferInput("INPUT0", [1, 4], "FP32")
                tensor.set_data_from_numpy(np.ones((1, 4), np.float32))
                assert connection.infer("simple", [tensor]).as_numpy("OUTPUT0").tolist() == [[1, 1, 1, 1]]
                large = np.arange(1 << 20, dtype=np.float32)[np.newaxis]
                tensor = grpcclient.InferInput("INPUT0", list(large.shape), "FP32").set_data_from_numpy(large)
                for answer in answers_to(connection, tensor, 40):
                    assert (answer.as_numpy("OUTPUT0") == large).all()


def answers_to(connection, tensor, count):
    """The answers to equal requests that are made at once."""
    results = queue.Queue()
    for _ in range(count):
        connection.async_infer("simple", [tensor], lambda result, error: results.put((result, error)))
    for _ in range(count):
        result, error = results.get(timeout=60)
        assert error is None
        yield result


@both_doors
@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--grpc-address", "unix:/nonexistent/s"), "cannot listen on unix:/nonexistent/s: No such file or directory"),
        (
            ("--grpc-use-ssl", "--grpc-server-cert=/nonexistent/c", "--grpc-server-key=/nonexistent/k"),
            "--grpc-server-cert: cannot read /nonexistent/c: No such file or directory",
        ),
    ],
)
def test_the_command_says_in_one_sentence_why_it_does_not_start(door, repository, options, line):
    run = forkserver.run(
        *("inferd", "serve", "--model-repository", repository, "--grpc-port", "0"),
        *("--transport", door, "--log-info=false", *options),
    )
    assert run.returncode == 1
    (said,) = (run.stdout + run.stderr).strip().splitlines()
    assert said.endswith(f'"{line}"')
