"""The counter of refusals against what real clients saw: each refused call once, under the reason of its ErrorInfo."""

from __future__ import annotations

import threading
from collections import Counter

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from inferd.server.rpc.service import SERVICE
from inferd_client.pb import grpc_service_pb2 as pb
from tests import richerrors
from tests.conformance import doors, models
from tests.conformance.client import Stub, floats, request
from tests.conformance.raw import Client
from tests.framing import framed
from tests.observe.scraping import scrape, scraped_server
from tests.waiting import wait_until

ENSEMBLE = """
platform: "ensemble" max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: [1] } output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [1] }
ensemble_scheduling { step {
  model_name: "slow" model_version: -1
  input_map { key: "INPUT0" value: "INPUT0" } output_map { key: "OUTPUT0" value: "OUTPUT0" }
} }
"""
COUNTER = "inferd_refused_requests_total"
INFER, STREAM, LIVE = (f"/{SERVICE}/{name}" for name in ("ModelInfer", "ModelStreamInfer", "ServerLive"))
WATCH = "/grpc.health.v1.Health/Watch"
EMPTY = framed(b"")


@pytest.fixture
def repository(tmp_path):
    models.write_repository(tmp_path)
    return tmp_path


def counted(metrics):
    """The samples of the counter: how many by reason."""
    return {dict(labels)["reason"]: n for (name, labels), n in scrape(metrics).samples.items() if name == COUNTER}


def seen(calls):
    """The reasons that clients got, and how many of each."""
    return Counter(richerrors.of(call).reason for call in calls if call.code() is not grpc.StatusCode.OK)


def several(stub, model="slow", count=12):
    return [stub.ModelInfer.future(request(model, floats(n), id=str(n))) for n in range(count)]


@pytest.fixture(scope="module", params=doors.NAMES)
def queueing(request, tmp_path_factory):
    """A server whose queues are short, with models whose requests may not wait long, and a chain to a queue."""
    root = tmp_path_factory.mktemp("models")
    models.write_repository(root)
    slow = (root / "slow" / "config.pbtxt").read_text().replace('"slow"', '"late"')
    policy = "dynamic_batching { default_queue_policy { default_timeout_microseconds: 1000 } }"
    for name, config in (("chain", ENSEMBLE), ("late", slow.replace("dynamic_batching { }", policy))):
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
    with scraped_server(root, "--max-queued-requests-per-model=2", door=request.param) as (process, metrics):
        yield process.address, metrics


@pytest.fixture
def asked(queueing):
    """A stub of the server, and a function: how many refusals has the server counted since the test began?"""
    address, metrics = queueing
    before = Counter(counted(metrics))
    with grpc.insecure_channel(address) as channel:
        yield Stub(channel), lambda: Counter(counted(metrics)) - before


@pytest.mark.parametrize(
    ("door", "limit", "reason"),
    [
        ("native", "--grpc-max-calls-per-client=1", "CLIENT_LIMIT"),
        *((door, "--max-inflight-requests=2", "SERVER_FULL") for door in doors.NAMES),
    ],
)
def test_each_refused_call_is_counted_once(repository, door, limit, reason):
    """Guards that a limit counts exactly the calls that clients saw refused, wherever the limit is enforced."""
    with (
        scraped_server(repository, limit, door=door) as (process, metrics),
        grpc.insecure_channel(process.address) as channel,
    ):
        found = seen(several(Stub(channel)))
        assert set(found) == {reason}
        assert counted(metrics) == found


@pytest.mark.parametrize(
    ("model", "reason"), [("slow", "QUEUE_FULL"), ("chain", "QUEUE_FULL"), ("late", "QUEUE_TIMEOUT")]
)
def test_what_a_queue_refuses_is_counted_once(asked, model, reason):
    """Guards requests that leave a queue late beside those that never enter it, and that steps count for their
    ensemble only.
    """
    stub, counted_since = asked
    found = Counter()
    for _ in range(30):  # requests that the server reads at once may all be taken or refused, and none waits
        found += seen(several(stub, model))
        if reason in found:
            break
    assert reason in found and set(found) <= {reason, "QUEUE_FULL"}
    assert counted_since() == found


def test_wrong_calls_of_every_kind_are_counted_once(asked):
    """Guards the reasons that stand for a status, of requests and of handlers in Python."""
    stub, counted_since = asked
    calls = [
        *(stub.ModelInfer.future(request("nope", floats(1))) for _ in range(3)),
        stub.ModelInfer.future(request("simple", floats(1), version="x")),
        *(stub.ModelMetadata.future(pb.ModelMetadataRequest(name="nope")) for _ in range(2)),
    ]
    found = seen(calls)
    assert found == {"NOT_FOUND": 5, "INVALID_REQUEST": 1}
    assert counted_since() == found


def test_refused_messages_of_a_stream_are_counted_once(asked):
    """Guards errors that do not end their call: they are in messages, without an ErrorInfo."""
    stub, counted_since = asked
    requests = [request("slow", floats(n), id=str(n)) for n in range(12)]
    errors = [answer for answer in stub.ModelStreamInfer(iter(requests)) if answer.error_message]
    assert errors
    assert counted_since() == {"QUEUE_FULL": len(errors)}


@pytest.mark.parametrize("door", doors.NAMES)
def test_callers_without_rights_are_counted_once(repository, tmp_path, door):
    """Guards refusals of the check before a call, of requests and of handlers in Python."""
    file = tmp_path / "tokens"
    file.write_text("mine groups=inference models=simple\n")
    file.chmod(0o600)
    with (
        scraped_server(repository, f"--grpc-token-file={file}", door=door) as (process, metrics),
        grpc.insecure_channel(process.address) as channel,
    ):
        stub = Stub(channel)
        mine = (("authorization", "Bearer mine"),)
        calls = [
            *(stub.ModelInfer.future(request("simple", floats(1))) for _ in range(2)),
            stub.ModelMetadata.future(pb.ModelMetadataRequest(name="simple")),
            *(stub.ModelInfer.future(request("slow", floats(1)), metadata=mine) for _ in range(3)),
            stub.ModelMetadata.future(pb.ModelMetadataRequest(name="slow"), metadata=mine),
        ]
        found = seen(calls)
        assert found == {"UNKNOWN_CALLER": 3, "NOT_ALLOWED": 4}
        assert counted(metrics) == found


def test_what_exceeds_a_size_is_counted_once(repository):
    """Guards the limits of bytes of one message: the server's for a message, a client's and the server's for all."""
    for arguments, reason, packing in (
        ("--grpc-max-message-size=1000", "LIMIT_EXCEEDED", None),
        ("--grpc-max-decompressed-size=1000", "LIMIT_EXCEEDED", grpc.Compression.Gzip),
        ("--grpc-max-bytes-per-client=100000", "CLIENT_LIMIT", None),
        ("--max-held-bytes=1048576", "LIMIT_EXCEEDED", None),
    ):
        with (
            scraped_server(repository, arguments) as (process, metrics),
            grpc.insecure_channel(process.address) as channel,
        ):
            large = request("simple", floats(*range(400_000)))
            calls = [Stub(channel).ModelInfer.future(large, compression=packing) for _ in range(3)]
            found = seen(calls)
            assert found == {reason: 3}
            assert counted(metrics) == found


def asked_raw(client, path, body=EMPTY, **headers):
    """The answer to a call with these bytes; of None: to one that the client ends with its headers."""
    stream = client.headers(path, end=body is None, **headers)
    if body is not None:
        client.data(stream, body, end=True)
    return client.answer(stream)


VIOLATIONS = (
    ("PROTOCOL_VIOLATION", {"pseudo_method": "PUT"}),
    ("PROTOCOL_VIOLATION", {"content_type": "text/plain"}),
    ("PROTOCOL_VIOLATION", {"without": ("te",)}),
    ("PROTOCOL_VIOLATION", {"grpc_timeout": "soon"}),
    ("PROTOCOL_VIOLATION", {"body": framed(b"", compressed=2)}),
    ("PROTOCOL_VIOLATION", {"body": framed(b"x", compressed=1)}),
    ("PROTOCOL_VIOLATION", {"body": framed(b"nothing", compressed=1), "grpc_encoding": "gzip"}),
    ("PROTOCOL_VIOLATION", {"body": framed(b"whole")[:-1]}),
    ("PROTOCOL_VIOLATION", {"body": EMPTY * 2}),
    ("PROTOCOL_VIOLATION", {"body": None}),
    ("NOT_SERVED", {"grpc_encoding": "snappy"}),
)


@pytest.mark.parametrize("path", [INFER, LIVE])
def test_calls_that_violate_the_protocol_are_counted_once(repository, path):
    """Guards what the transport finds itself, of methods with and without handlers in Python."""
    with scraped_server(repository) as (process, metrics), Client(process.address) as client:
        for reason, call in VIOLATIONS:
            answer = asked_raw(client, path, **call)
            assert richerrors.of_answer(answer).reason == reason, (call, answer.details)
        assert richerrors.of_answer(asked_raw(client, f"{path}s")).reason == "NOT_SERVED"
        assert counted(metrics) == Counter((*(reason for reason, _ in VIOLATIONS), "NOT_SERVED"))


@pytest.mark.parametrize("path", [INFER, STREAM, LIVE, WATCH])
def test_deadlines_are_told_and_not_counted(repository, path):
    """Guards deadlines that pass before there is a request, with and without handlers in Python."""
    with scraped_server(repository) as (process, metrics), Client(process.address) as client:
        stream = client.headers(path, grpc_timeout="20m")
        if path == WATCH:
            client.data(stream, EMPTY)
        answer = client.answer(stream)
        assert (answer.status, richerrors.of_answer(answer).reason) == (4, "DEADLINE_EXCEEDED")
        assert counted(metrics) == {}


def test_streams_beyond_the_quota_of_a_client_are_counted_once(repository):
    """Guards that streams of both kinds share the limit and its text, and that a stream counts until it has ended."""
    with (
        scraped_server(repository, "--grpc-max-streams-per-client=1") as (process, metrics),
        grpc.insecure_channel(process.address) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)

        def begun(begin):
            over = threading.Event()
            call = begin(over)
            next(call)
            return call, over

        def infer(over):
            return Stub(channel).ModelStreamInfer(ended_by(over))

        def watch(_):
            return health.Watch(health_pb2.HealthCheckRequest())

        texts = set()
        for number, open_one in enumerate((infer, watch, infer), 1):
            call, over = begun(open_one)
            for refused in (infer, watch):
                with pytest.raises(grpc.RpcError) as error:
                    begun(refused)
                assert richerrors.of(error.value).reason == "CLIENT_LIMIT"
                texts.add(error.value.details())
            over.set()
            if open_one is infer:
                assert not list(call)
            else:
                call.cancel()
                wait_until(lambda: open_calls(metrics) == 0)
            assert counted(metrics) == {"CLIENT_LIMIT": 2 * number}
        assert texts == {"client 127.0.0.1 has 1 streams in flight, its limit is 1"}


def ended_by(over):
    """The requests of a stream: one, and its end when `over` is set."""
    yield request("simple", floats(1))
    over.wait(60)


def open_calls(metrics):
    return scrape(metrics).value("inferd_open_calls")


def test_errors_of_other_services_are_counted_once(repository):
    """Guards handlers that end their calls by themselves."""
    with scraped_server(repository) as (process, metrics), grpc.insecure_channel(process.address) as channel:
        with pytest.raises(grpc.RpcError) as error:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="nope"))
        assert richerrors.of(error.value).reason == "NOT_FOUND"
        assert counted(metrics) == {"NOT_FOUND": 1}


@pytest.mark.parametrize("door", doors.NAMES)
def test_a_long_text_is_counted_once(repository, door):
    """Guards texts that are cut because clients would not take them."""
    with (
        scraped_server(repository, door=door) as (process, metrics),
        grpc.insecure_channel(process.address) as channel,
    ):
        with pytest.raises(grpc.RpcError) as error:
            Stub(channel).ModelMetadata(pb.ModelMetadataRequest(name="\u00e4" * 900))
        assert richerrors.of(error.value).reason == "NOT_FOUND"
        assert counted(metrics) == {"NOT_FOUND": 1}


def conversation(channel, over):
    return Stub(channel).ModelStreamInfer(ended_by(over))


def reflection(channel, over):
    def requests():
        yield reflection_pb2.ServerReflectionRequest(list_services="")
        over.wait(60)

    return reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(requests())


@pytest.mark.parametrize("begin", [conversation, reflection])
def test_streams_that_a_stopping_server_ends_are_told_so(repository, begin):
    """Guards the reason of calls that a stopping server cannot finish, with and without handlers in Python."""
    with (
        scraped_server(repository) as (process, _),
        grpc.insecure_channel(process.address) as channel,
    ):
        over = threading.Event()
        call = begin(channel, over)
        next(call)
        process.terminate()
        with pytest.raises(grpc.RpcError) as error:
            next(call)
        over.set()
        assert richerrors.of(error.value).reason == "STOPPING"
