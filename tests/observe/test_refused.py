"""The counter of refusals against what real clients saw: each refused call once, under the reason of its ErrorInfo."""

from __future__ import annotations

import threading
from collections import Counter

import grpc
import pytest

from inferd_client.pb import grpc_service_pb2 as pb
from tests import richerrors
from tests.conformance import doors, models
from tests.conformance.client import Stub, floats, request
from tests.observe.scraping import scrape, scraped_server

ENSEMBLE = """
platform: "ensemble" max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: [1] } output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [1] }
ensemble_scheduling { step {
  model_name: "slow" model_version: -1
  input_map { key: "INPUT0" value: "INPUT0" } output_map { key: "OUTPUT0" value: "OUTPUT0" }
} }
"""
COUNTER = "inferd_refused_requests_total"


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


def test_streams_that_a_stopping_server_ends_are_told_so(repository):
    """Guards the reason of calls that a stopping server cannot finish."""
    with (
        scraped_server(repository) as (process, _),
        grpc.insecure_channel(process.address) as channel,
    ):
        over = threading.Event()

        def requests():
            yield request("simple", floats(1))
            over.wait(60)

        call = Stub(channel).ModelStreamInfer(requests())
        next(call)
        process.terminate()
        with pytest.raises(grpc.RpcError) as error:
            next(call)
        over.set()
        assert richerrors.of(error.value).reason == "STOPPING"
