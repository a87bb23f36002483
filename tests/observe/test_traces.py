"""Traces: which requests are chosen, what is told of them, and where it goes."""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import secrets
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc
import numpy as np
import pytest

from inferd.server.observe.tracing.pump import Pump
from inferd.server.observe.tracing.triton import TraceFiles
from inferd.server.settings.tracing import SettingsError, parse_trace_config
from inferd_client.pb import grpc_service_pb2 as pb
from tests.conformance import doors
from tests.conformance.client import Stub
from tests.engine.serving import ensemble_of
from tests.observe.scraping import ask, parse_page, scraped_server
from tests.observe.test_metrics import DECOUPLED, IDENTITY, tensor, triton, write
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.observe.collector import Collector

SLOW = IDENTITY + 'parameters { key: "delay_us" value { string_value: "20000" } }\n'

ENSEMBLE = ensemble_of("plain")

ASKING = """
backend: "python"
max_batch_size: 0
input { name: "x" data_type: TYPE_INT64 dims: [ 1, 2 ] }
output { name: "y" data_type: TYPE_STRING dims: [ 1 ] }
instance_group { kind: KIND_CPU count: 1 }
"""

ASKING_MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            asked = pb_utils.InferenceRequest(
                model_name="plain", requested_output_names=["y"], trace=request.trace(),
                inputs=[pb_utils.Tensor("x", np.ones((1, 2), np.int64))])
            assert not asked.exec().has_error()
            context = request.trace().get_context() or ""
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([context.encode()], object))]))
        return answers
"""

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def repository(tmp_path):
    return write(tmp_path / "models", plain=IDENTITY, slow=SLOW, both=ENSEMBLE, stream=DECOUPLED)


def traces_of(path):
    """The requests of a file, by their ids."""
    found = {}
    for each in json.loads(path.read_text()):
        entry = found.setdefault(each["id"], {"tensors": []})
        if "tensor" in each:
            entry["tensors"].append((each["activity"], each["tensor"]))
        elif "timestamps" in each:
            entry["times"] = {time["name"]: time["ns"] for time in each["timestamps"]}
        else:
            entry |= each
    return found


def test_one_request_in_so_many_is_written_to_a_file_as_triton_writes_it(repository, tmp_path):
    file = tmp_path / "trace.json"
    arguments = [f"--trace-config={each}" for each in ("level=TIMESTAMPS", "rate=3", f"triton,file={file}")]
    with doors.running_server("native", repository, *arguments) as process, doors.connected(process) as client:
        for number in range(7):
            client.infer("plain", [tensor()], request_id=f"r{number}")
    found = traces_of(file)
    assert [each["request_id"] for each in found.values()] == ["r2", "r5"]
    for each in found.values():
        assert (each["model_name"], each["model_version"]) == ("plain", 1)
        order = ("REQUEST_START", "QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START")
        order += ("COMPUTE_END", "REQUEST_END")
        times = [each["times"][name] for name in order]
        assert times == sorted(times)
    assert file.stat().st_mode & 0o777 == 0o600, "traces can contain the tensors of requests"


def test_tensors_steps_and_files_of_so_many_traces(repository, tmp_path):
    file = tmp_path / "trace.json"
    configured = ("level=TIMESTAMPS", "level=TENSORS", "rate=1", f"triton,file={file}", "triton,log-frequency=2")
    with (
        doors.running_server("native", repository, *(f"--trace-config={each}" for each in configured)) as process,
        doors.connected(process) as client,
    ):
        client.infer("both", [tensor()])
    first = traces_of(tmp_path / "trace.json.0")
    assert sorted(each["model_name"] for each in first.values()) == ["both", "plain"]
    whole, step = sorted(first.values(), key=lambda each: each["model_name"])
    assert step["parent_id"] == whole["id"]
    assert ("TENSOR_QUEUE_INPUT", {"name": "x", "data": "1,1", "shape": "1,2", "dtype": "INT64"}) in step["tensors"]
    assert ("TENSOR_BACKEND_OUTPUT", {"name": "y", "data": "1,1", "shape": "1,2", "dtype": "INT64"}) in whole["tensors"]


def without_data(client_id):
    message = pb.ModelInferRequest(model_name="plain", id=client_id)
    message.inputs.add(name="x", datatype="INT64", shape=[1, 2])
    return message


def test_no_trace_tells_of_an_input_that_a_refused_request_has_not_sent(repository, tmp_path):
    """The memory of a request serves later ones: what it held would be told of them, or be gone."""
    file = tmp_path / "trace.json"
    configured = (f"--trace-config={each}" for each in ("level=TENSORS", "rate=1", f"triton,file={file}"))
    with (
        doors.running_server("native", repository, *configured) as process,
        doors.connected(process) as client,
        grpc.insecure_channel(process.address) as channel,
    ):
        for number in range(8):
            client.infer("plain", [tensor(1, 2000)], request_id=f"good {number}")
            with pytest.raises(grpc.RpcError, match="unable to find data for input tensor 'x'"):
                Stub(channel).ModelInfer(without_data(f"bad {number}"))
    found = traces_of(file).values()
    assert len(found) == 16
    for each in found:
        assert bool(each["tensors"]) == each["request_id"].startswith("good")


IN_PLACE = """
platform: "pytorch_libtorch"
max_batch_size: 8
input { name: "x" data_type: TYPE_INT64 dims: [ -1 ] }
output { name: "y" data_type: TYPE_INT64 dims: [ -1 ] }
instance_group { kind: KIND_CPU count: 1 }
"""


def test_traced_inputs_are_those_that_came_whatever_the_model_writes(tmp_path):
    torch = pytest.importorskip("torch")

    class Double(torch.nn.Module):
        def forward(self, x):
            x *= 2
            return x

    root, file = write(tmp_path / "models", double=IN_PLACE), tmp_path / "trace.json"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(Double()).save(str(root / "double" / "1" / "model.pt"))
    configured = [f"--trace-config={each}" for each in ("level=TENSORS", "rate=1", f"triton,file={file}")]
    with doors.running_server("native", root, *configured) as process, doors.connected(process) as client:
        assert client.infer("double", [tensor()]).as_numpy("y").tolist() == [[2, 2]]
    [found] = traces_of(file).values()
    assert {activity: each["data"] for activity, each in found["tensors"]} == {
        "TENSOR_QUEUE_INPUT": "1,1",
        "TENSOR_BACKEND_OUTPUT": "2,2",
    }


def written(number):
    """A record with which only its number matters."""
    names = ("arrived", "queued", "taken", "input_end", "output_start", "computed", "ended", "parent", "version")
    return {**dict.fromkeys(names, 0), "kept": True, "model": "m", "request_id": "", "number": number, "tensors": None}


def test_a_full_disk_costs_traces_and_leaves_the_file_readable(tmp_path, caplog):
    file = tmp_path / "trace.json"
    files = TraceFiles(file, lambda: 0)
    files.take([written(1)])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 10, hard))
    try:
        files.take([written(2), written(3)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    files.take([written(4)])
    files.close()
    assert sorted(traces_of(file)) == [1, 4]
    assert [message.split(":")[0] for message in caplog.messages] == [
        "traces are lost",
        "traces are written again, 2 were lost",
    ]


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_traces_cannot_be_written_to_is_refused_at_the_start(repository, tmp_path, kind):
    """A pipe would hold up the thread that writes them, and with it the access log."""
    path = tmp_path / "place"
    if kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    with (
        pytest.raises(RuntimeError, match=f"trace-config: triton,file={path}: "),
        doors.running_server(
            "native", repository, "--trace-config=level=TIMESTAMPS", f"--trace-config=triton,file={path}"
        ),
    ):
        pass


def test_settings_are_seen_and_changed_for_the_server_and_for_a_model(repository, tmp_path):
    file = tmp_path / "trace.json"
    with (
        doors.running_server("native", repository, f"--trace-config=triton,file={file}") as process,
        doors.connected(process) as client,
    ):

        def settings(*arguments, **changes):
            return client.update_trace_settings(*arguments, settings=changes, as_json=True)["settings"]

        start = client.get_trace_settings(as_json=True)["settings"]
        assert {name: values["value"] for name, values in start.items()} == {
            "trace_level": ["OFF"],
            "trace_rate": ["1000"],
            "trace_count": ["-1"],
            "trace_mode": ["triton"],
            "log_frequency": ["0"],
            "trace_file": [str(file)],
        }
        own = settings("plain", trace_level=["TIMESTAMPS"], trace_rate="1", trace_count="2")
        assert own["trace_count"]["value"] == ["2"]
        for _ in range(3):
            client.infer("plain", [tensor()])
            client.infer("slow", [tensor()])
        left = client.get_trace_settings("plain", as_json=True)["settings"]
        assert left["trace_count"]["value"] == ["0"]
        assert client.get_trace_settings(as_json=True)["settings"]["trace_level"]["value"] == ["OFF"]
        assert settings("plain", trace_rate="2")["trace_count"]["value"] == ["0"]  # only a count begins one anew
        assert settings(trace_rate="500")["trace_count"]["value"] == ["-1"]
        assert client.get_trace_settings("plain", as_json=True)["settings"]["trace_count"]["value"] == ["0"]
        assert settings("plain", trace_count="5")["trace_count"]["value"] == ["5"]
        settings(trace_rate=None)
        cleared = settings("plain", trace_level=None, trace_rate=None, trace_count=None)
        assert cleared["trace_level"]["value"] == ["OFF"]
        assert cleared["trace_rate"]["value"] == ["1000"]
    assert [each["model_name"] for each in traces_of(file).values()] == ["plain", "plain"]


@pytest.mark.parametrize(
    ("model", "name", "values", "code", "text"),
    [
        ("", "trace_file", ["x"], "UNIMPLEMENTED", "trace file location can not be updated through network protocol"),
        (
            "",
            "trace_level",
            ["OFF", "TIMESTAMPS"],
            "INVALID_ARGUMENT",
            "Expect only one trace level 'OFF' is specified",
        ),
        ("", "trace_level", ["LOUD"], "INVALID_ARGUMENT", "unknown trace level 'LOUD'"),
        ("", "trace_level", ["TIMESTAMPS"], "INVALID_ARGUMENT", "the server has no place for traces: start it with"),
        ("plain", "trace_level", ["TENSORS"], "INVALID_ARGUMENT", "the server has no place for traces: start it with"),
        ("", "trace_rate", ["1", "2"], "INVALID_ARGUMENT", "expect only 1 value for 'trace_rate'"),
        ("", "trace_rate", ["often"], "INVALID_ARGUMENT", "Unable to parse 'trace_rate', got: often"),
        ("", "trace_count", ["-2"], "INVALID_ARGUMENT", "Unable to parse 'trace_count', value is out of range"),
        ("nobody", "trace_rate", ["1"], "INVALID_ARGUMENT", "Request for unknown model : nobody"),
        ("", "nothing", ["1"], "INVALID_ARGUMENT", "unknown trace setting 'nothing'"),
    ],
)
def test_wrong_settings_are_refused_and_change_nothing(shared_server, model, name, values, code, text):
    with grpc.insecure_channel(shared_server) as channel:
        stub = Stub(channel)
        request = pb.TraceSettingRequest(model_name=model)
        request.settings["log_frequency"].value.append("7")
        request.settings[name].value.extend(values)
        with pytest.raises(grpc.RpcError) as refused:
            stub.TraceSetting(request)
        assert refused.value.code().name == code
        assert text in refused.value.details()
        for name in ("", "plain"):
            held = stub.TraceSetting(pb.TraceSettingRequest(model_name=name)).settings
            assert (held["log_frequency"].value, held["trace_level"].value) == (["0"], ["OFF"])


def test_traces_that_cannot_be_written_are_not_switched_on(repository, tmp_path):
    """The answer says why; the start does not look at a file that nothing is written to."""
    file = tmp_path / "missing" / "trace.json"
    with (
        doors.running_server("native", repository, f"--trace-config=triton,file={file}") as process,
        doors.connected(process) as client,
        pytest.raises(triton.InferenceServerException, match=f"triton,file={file}: No such file or directory"),
    ):
        client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"]})


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory):
    root = write(tmp_path_factory.mktemp("models"), plain=IDENTITY)
    with doors.running_server("native", root) as process:
        yield process.address


@pytest.mark.parametrize(
    "entry", ["level=LOUD", "rate=x", "rate=-1", "mode=jaeger", "nothing", "opentelemetry,url2=x", "count=-2", "level"]
)
def test_what_is_configured_wrongly_is_refused(entry):
    with pytest.raises(SettingsError, match="trace-config"):
        parse_trace_config((entry,))


# ---- opentelemetry


def attributes(span):
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}


def named(spans, name):
    return [span for span in spans if span.name == name]


def traced_to(collector):
    """Arguments of a server."""
    configured = ("level=TIMESTAMPS", "mode=opentelemetry", f"opentelemetry,url={collector.url}")
    configured += ("opentelemetry,bsp_schedule_delay=10", "opentelemetry,resource=team=a")
    return tuple(f"--trace-config={each}" for each in configured)


def server_of(repository, collector, *entries, door="native"):
    configured = (f"--trace-config={each}" for each in entries)
    return doors.running_server(door, repository, *traced_to(collector), *configured)


@pytest.fixture(params=["http", "grpc"])
def collector(request):
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    from tests.observe.collector import grpc_collector, http_collector

    with (http_collector if request.param == "http" else grpc_collector)() as made:
        made.protocol = request.param
        yield made


@pytest.fixture
def http_collector():
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    from tests.observe.collector import http_collector

    with http_collector() as made:
        yield made


@dataclass
class Traced:
    """A server that traces what clients want traced, and a test's own trace."""

    address: str
    client: triton.InferenceServerClient
    collector: Collector
    trace: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def headers(self):
        return {"traceparent": f"00-{self.trace}-{SPAN}-01"}

    def ask_at_once(self, model, *named):
        """Requests by their names, together."""
        how = {"callback": lambda *_: None, "headers": self.headers}
        calls = [self.client.async_infer(model, [x], request_id=name, **how) for name, x in named]
        for call in calls:
            call._CallContext__grpc_future.result()

    def wait(self, holds):
        """The spans of the trace, when this holds of them."""

        def own(spans):
            return [span for span in spans if span.trace_id.hex() == self.trace]

        return own(self.collector.wait(lambda spans: holds(own(spans))))


PAIRS = "dynamic_batching { max_queue_delay_microseconds: 60000000 preferred_batch_size: [ 2 ] }\n"
COALESCING = 'parameters { key: "coalesce_requests" value { string_value: "true" } }\n'
FAILING = "class TritonPythonModel:\n    def execute(self, requests):\n        raise ValueError('no')\n"


@pytest.fixture(scope="module")
def tracing(tmp_path_factory):
    """A server with all models that the tests of spans ask, and its collector."""
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    from tests.observe.collector import http_collector

    root = write(
        tmp_path_factory.mktemp("models"),
        stream=DECOUPLED,
        pair=IDENTITY + PAIRS,
        twins=IDENTITY + PAIRS + COALESCING,
        kept=IDENTITY + "response_cache { enable: true }\n",
        slots=IDENTITY.replace("max_batch_size: 8", "max_batch_size: 1") + "sequence_batching { direct { } }\n",
        failing=IDENTITY.replace('"identity"', '"python"'),
        broken=ensemble_of("failing"),
    )
    (root / "failing" / "1" / "model.py").write_text(FAILING)
    options = ("--cache-config=local,size=1000000", "--trace-config=rate=0")
    with http_collector() as made, doors.running_server("native", root, *traced_to(made), *options) as process:
        yield process, made


@pytest.fixture
def traced(tracing):
    process, made = tracing
    with doors.connected(process) as client:
        yield Traced(process.address, client, made)


@pytest.mark.parametrize("door", ["native", "grpcio"])
def test_a_trace_of_a_client_goes_on_in_the_server(repository, collector, door):
    """The context is W3C's; rate 0 traces nobody else. The spans of ensembles' steps hang below the ensemble's."""
    with (
        server_of(
            repository, collector, "rate=0", f"opentelemetry,protocol={collector.protocol}", door=door
        ) as process,
        doors.connected(process) as client,
    ):
        client.infer("both", [tensor()])
        client.infer("both", [tensor()], headers={"traceparent": f"00-{TRACE}-{SPAN}-00"})
        client.infer("both", [tensor()], request_id="r", headers={"traceparent": f"00-{TRACE}-{SPAN}-01"})
        spans = collector.wait(lambda spans: named(spans, "both") and named(spans, "InferRequest"))
    spans = collector.spans
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    [call], [both], [plain] = (named(spans, name) for name in ("InferRequest", "both", "plain"))
    [batch], [compute] = (named(spans, name) for name in ("batch", "compute"))
    assert call.parent_span_id.hex() == SPAN
    assert both.parent_span_id == call.span_id
    assert plain.parent_span_id == both.span_id
    assert (batch.parent_span_id, compute.parent_span_id) == (plain.span_id, batch.span_id)
    assert attributes(call)["rpc.method"] == "inference.GRPCInferenceService/ModelInfer"
    assert attributes(call)["rpc.response.status_code"] == "OK"
    assert attributes(call)["client.address"] == "127.0.0.1"
    assert int(attributes(call)["client.port"]) > 0
    assert attributes(both)["triton.request_id"] == "r"
    assert attributes(batch)["inferd.batch.rows"] == 1
    assert attributes(batch)["inferd.batch.reason"] == "no batching"
    for inner, outer in ((both, call), (plain, both), (batch, plain), (compute, batch)):
        assert outer.start_time_unix_nano <= inner.start_time_unix_nano
        assert inner.end_time_unix_nano <= outer.end_time_unix_nano
    assert collector.resource["team"] == "a"
    assert collector.resource["service.name"] == "triton"


@pytest.mark.parametrize("door", ["native", "grpcio"])
def test_models_know_their_trace_and_baggage_and_what_they_ask_belongs_to_it(repository, http_collector, door):
    """The server passes a caller's baggage on if it has the form that W3C defines, and drops any other."""
    write(repository, asking=ASKING)
    (repository / "asking" / "1" / "model.py").write_text(ASKING_MODEL)
    with (
        server_of(repository, http_collector, "rate=0", door=door) as process,
        doors.connected(process) as client,
    ):

        def context(**headers):
            headers["traceparent"] = f"00-{TRACE}-{SPAN}-01"
            [found] = client.infer("asking", [tensor()], headers=headers).as_numpy("y")
            return json.loads(found)

        told = context()
        untraced = client.infer("asking", [tensor()])
        spans = http_collector.wait(lambda spans: named(spans, "plain") and named(spans, "asking"))
        assert context(baggage="user=7,plan=a%20b;ttl=1")["baggage"] == "user=7,plan=a%20b;ttl=1"
        assert context(baggage="x" * 8192)["baggage"] == "x" * 8192
        for wrong in ('a="b"', "a=\\", "", "x" * 8193):
            assert context(baggage=wrong).keys() == {"traceparent"}
    [asking], [plain] = named(spans, "asking"), named(spans, "plain")
    assert plain.parent_span_id == asking.span_id
    assert told == {"traceparent": f"00-{TRACE}-{asking.span_id.hex()}-01"}
    assert untraced.as_numpy("y")[0] == b""


def test_the_time_of_a_failed_ensemble_is_that_of_its_steps(traced):
    """An ensemble waits in no queue of its own, so no span says that it did."""
    with pytest.raises(triton.InferenceServerException, match="no"):
        traced.client.infer("broken", [tensor()], headers=traced.headers)
    spans = traced.wait(lambda spans: named(spans, "broken") and named(spans, "batch"))
    [broken], [failing] = named(spans, "broken"), named(spans, "failing")
    assert below(spans, broken).keys() == {"failing"}
    assert {"queue", "batch"} <= below(spans, failing).keys()


@pytest.mark.parametrize(
    ("environment", "configured", "service"),
    [
        ({}, (), "triton"),
        ({"OTEL_SERVICE_NAME": "digits"}, (), "digits"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=digits,team=b"}, (), "digits"),
        ({"OTEL_SERVICE_NAME": "digits"}, ("opentelemetry,resource=service.name=own",), "own"),
    ],
)
def test_the_name_of_the_service(monkeypatch, environment, configured, service):
    """The server's own option wins over OpenTelemetry's variables, and these over --id."""
    otel = pytest.importorskip("inferd.server.observe.tracing.otel", reason="the extra otel is not installed")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    configuration = parse_trace_config((*configured, "opentelemetry,resource=team=a"))
    found = otel.resource_of(configuration.resource, "triton").attributes
    assert (found["service.name"], found["team"]) == (service, "a")


def test_failed_and_slow_requests_are_traced_whatever_the_rate(repository, http_collector):
    config = repository / "slow" / "config.pbtxt"
    config.write_text(config.read_text().replace("20000", "1500000"))
    with (
        server_of(repository, http_collector, "rate=0", "slow-ms=1000") as process,
        doors.connected(process) as client,
    ):
        client.infer("plain", [tensor()])
        client.infer("slow", [tensor()])
        with pytest.raises(triton.InferenceServerException):
            client.infer("plain", [tensor(9)])
        spans = http_collector.wait(lambda spans: len(named(spans, "InferRequest")) == 2)
    by_status = sorted(named(spans, "InferRequest"), key=lambda span: span.status.code)
    assert [attributes(span)["rpc.response.status_code"] for span in by_status] == ["OK", "INVALID_ARGUMENT"]
    assert named(spans, "slow")
    assert "max" in by_status[1].status.message or by_status[1].status.message


def test_a_lack_of_memory_ends_no_pump():
    """Guards the records of later requests, and the end."""

    class Recorder:
        lost = 0

        def __init__(self):
            self.left = [MemoryError(), [{"number": 1}], []]

        def take(self):
            taken = self.left.pop(0) if len(self.left) > 1 else self.left[0]
            if isinstance(taken, MemoryError):
                raise taken
            return taken

    class Records(list):
        closed = False

        def take(self, records):
            self += records

        def close(self):
            self.closed = True

    sink = Records()
    pump = Pump(Recorder(), [sink])
    wait_until(lambda: sink)
    pump.close()
    assert (sink, sink.closed) == ([{"number": 1}], True)


def test_links_do_not_grow_with_the_square_of_a_batch():
    """A span keeps the links that OpenTelemetry would keep, and no others are made."""
    otel = pytest.importorskip("inferd.server.observe.tracing.otel", reason="the extra otel is not installed")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept = InMemorySpanExporter()
    spans = otel.Spans(parse_trace_config(("mode=opentelemetry",)), "triton", kept)
    zero = dict.fromkeys(("arrived", "looked", "placed", "queued", "first", "status", "link", "computed"), 0)
    zero |= dict.fromkeys(("input_end", "output_start", "batch_rows", "batch_requests", "number", "parent"), 0)
    zero |= dict.fromkeys(("cached", "shared", "stepped", "request_id", "why", "instance", "version"), "")
    spans.take(
        [
            {**zero, "kept": True, "inner": True, "batch": 7, "model": "m", "taken": 1, "ended": 2}
            | {"trace_id": f"{number:032x}", "span_id": f"{number:016x}", "parent_id": f"{0:016x}"}
            for number in range(1, 301)
        ]
    )
    spans.close()
    batches = [span for span in kept.get_finished_spans() if span.name == "batch"]
    assert len(batches) == 300
    assert {(len(span.links), span.dropped_links) for span in batches} == {(128, 0)}


def test_mates_of_a_batch_are_linked(traced):
    traced.ask_at_once("pair", ("one", tensor()), ("other", tensor()))
    spans = traced.wait(lambda spans: len(named(spans, "batch")) == 2)
    one, other = named(spans, "pair")
    for batch, mate in itertools.permutations((one, other)):
        [mine] = [span for span in named(spans, "batch") if span.parent_span_id == batch.span_id]
        assert [link.span_id for link in mine.links] == [mate.span_id]
        assert attributes(mine)["inferd.batch.requests"] == 2
    assert np.all([attributes(span)["inferd.batch.reason"] == "preferred size" for span in named(spans, "batch")])


def below(spans, parent):
    return {span.name: span for span in spans if span.parent_span_id == parent.span_id}


def test_look_ups_in_the_response_cache_are_spans(traced):
    """A hit has a span, and so has a miss, whose execution hangs below it."""
    for number in range(2):
        traced.client.infer("kept", [tensor()], request_id=f"r{number}", headers=traced.headers)
    spans = traced.wait(lambda spans: len(named(spans, "InferRequest")) == 2)
    outer = [span for span in named(spans, "kept") if is_outer(spans, span)]
    models = {attributes(span)["triton.request_id"]: span for span in outer}
    missed, hit = models["r0"], models["r1"]
    assert attributes(missed)["inferd.cached"] is False
    assert attributes(below(spans, missed)["cache"])["inferd.cache.hit"] is False
    executed = below(spans, missed)["kept"]
    assert below(spans, executed).keys() == {"queue", "batch"}
    assert executed.status.code != executed.status.STATUS_CODE_ERROR  # it ends in the cache, and is not cancelled
    assert attributes(hit)["inferd.cached"] is True
    assert below(spans, hit).keys() == {"cache"}
    looked = below(spans, hit)["cache"]
    assert hit.start_time_unix_nano <= looked.start_time_unix_nano <= looked.end_time_unix_nano
    assert looked.end_time_unix_nano <= hit.end_time_unix_nano


def test_a_request_that_joined_an_identical_one_is_linked_to_its_execution(traced):
    traced.ask_at_once("twins", ("first", tensor()), ("second", tensor()), ("other", tensor(value=7)))
    spans = traced.wait(lambda spans: len(named(spans, "InferRequest")) == 3)
    outer = [span for span in named(spans, "twins") if is_outer(spans, span)]
    models = {attributes(span)["triton.request_id"]: span for span in outer}
    execution = below(spans, models["first"])["twins"]
    assert [link.span_id for link in models["second"].links] == [execution.span_id]
    assert attributes(models["second"])["inferd.shared"] is True
    assert below(spans, models["second"]) == {}
    assert "batch" in below(spans, execution)


def is_outer(spans, span):
    return any(call.span_id == span.parent_span_id for call in named(spans, "InferRequest"))


def test_waiting_for_a_slot_of_sequences_is_a_span(traced):
    def ask(name, sequence, ask=traced.client.infer, **how):
        return ask("slots", [tensor()], request_id=name, sequence_id=sequence, headers=traced.headers, **how)

    ask("begun", 1, sequence_start=True)
    waiting = ask("late", 2, traced.client.async_infer, callback=lambda *_: None, sequence_start=True)
    traced.client.is_server_live()  # what was sent before it has come
    ask("over", 1, sequence_end=True)
    waiting._CallContext__grpc_future.result()
    spans = traced.wait(lambda spans: len(named(spans, "InferRequest")) == 3)
    models = {attributes(span)["triton.request_id"]: span for span in named(spans, "slots")}
    parts = below(spans, models["late"])
    assert parts.keys() == {"sequence wait", "queue", "batch"}
    assert parts["sequence wait"].end_time_unix_nano == parts["queue"].start_time_unix_nano
    assert below(spans, models["begun"]).keys() == {"queue", "batch"}


def test_a_request_that_is_answered_before_its_batch_ends_names_the_batch(traced):
    """As all of decoupled models may be."""
    message = pb.ModelInferRequest(model_name="stream", raw_input_contents=[bytes(16)])
    message.inputs.add(name="x", datatype="INT64", shape=[1, 2])
    with grpc.insecure_channel(traced.address) as channel:
        [answer] = Stub(channel).ModelStreamInfer(iter([message]), metadata=tuple(traced.headers.items()))
    assert not answer.error_message
    spans = traced.wait(lambda spans: named(spans, "batch"))
    [batch], [stream] = named(spans, "batch"), named(spans, "stream")
    [event] = stream.events
    assert event.name == "first response"
    assert batch.start_time_unix_nano <= event.time_unix_nano <= stream.end_time_unix_nano
    told = attributes(batch)
    assert (told["inferd.batch.rows"], told["inferd.batch.requests"]) == (1, 1)
    assert told["inferd.instance"].startswith("stream")


def test_buckets_name_a_trace_that_is_in_them(repository, http_collector):
    """In OpenMetrics; the older format has no place for it."""
    arguments = (*traced_to(http_collector), "--trace-config=rate=0")
    with scraped_server(repository, *arguments) as (process, metrics), doors.connected(process) as client:
        client.infer("plain", [tensor()], headers={"traceparent": f"00-{TRACE}-{SPAN}-01"})
        client.infer("plain", [tensor()])
        kind = "Accept: application/openmetrics-text"

        def told():
            page = ask(metrics, kind)[2].decode()
            return [line for line in page.splitlines() if " # " in line]

        wait_until(told)
        [line] = told()
        scraped = parse_page(ask(metrics, kind)[2].decode())
        assert "trace_id" not in ask(metrics)[2].decode()
    found = re.fullmatch(r'(\w+)_bucket\{.*le="(.*)"\} (\d+) # \{trace_id="(\w+)",span_id="\w+"\} (\S+) (\S+)', line)
    assert found, line
    assert found[1] == "nv_inference_request_duration_histogram_us"
    assert found[4] == TRACE
    assert float(found[2]) / 2 < float(found[5]) <= float(found[2])
    assert scraped.value(f"{found[1]}_count", model="plain") == 2
