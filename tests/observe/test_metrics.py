"""Metrics: what a scraper sees of a real server, over HTTP."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.observe.scraping import ask, connected, scrape, scraped_server
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]

IDENTITY = """
backend: "identity"
max_batch_size: 8
input { name: "x" data_type: TYPE_INT64 dims: [ -1 ] }
output { name: "y" data_type: TYPE_INT64 dims: [ -1 ] }
"""

DECOUPLED = IDENTITY + "model_transaction_policy { decoupled: true }\n"

TAGGED = (
    IDENTITY
    + """
metric_tags { key: "team" value: "a \\"b\\"\\\\c" }
model_metrics {
  metric_control {
    metric_identifier { family: "nv_inference_first_response_histogram_ms" }
    histogram_options { buckets: [ 0.5, 1, 250 ] }
  }
}
"""
)


def write(root, **configs):
    for name, config in configs.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
    return root


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = write(tmp_path_factory.mktemp("models"), plain=IDENTITY, tagged=TAGGED, stream=DECOUPLED)
    write(root, broken='backend: "nobody"')
    with scraped_server(root) as (process, metrics):
        yield process.address, metrics


def tensor(rows=1, columns=2, value=1):
    found = triton.InferInput("x", [rows, columns], "INT64")
    found.set_data_from_numpy(np.full((rows, columns), value, np.int64))
    return found


def test_labels_stand_in_tritons_order(server):
    """By name, tags of the configuration among them; that of a bucket is the last."""
    page = ask(server[1])[2].decode()
    found = {}
    for line in page.splitlines():
        if line.startswith("nv_") and "{" in line:
            labels = re.findall(r'[{,](\w+)="', line)
            found.setdefault(line[: line.index("{")], []).append([name for name in labels if name != "le"])
            assert labels == [*found[line[: line.index("{")]][-1], *(["le"] if "le" in labels else [])]
    assert [labels for each in found.values() for labels in each if labels != sorted(labels)] == []
    assert ["model", "reason", "version"] in found["nv_inference_request_failure"]
    assert ["_team", "model", "version"] in found["nv_inference_request_success"]


def test_what_a_model_did_is_counted_by_tritons_names(server):
    address, metrics = server
    before = scrape(metrics)
    with triton.InferenceServerClient(address) as client:
        for rows in (1, 1, 3):
            client.infer("plain", [tensor(rows)])
        with pytest.raises(triton.InferenceServerException):
            client.infer("plain", [tensor(9)])
    after = scrape(metrics)

    def grown(name, **labels):
        return after.value(name, model="plain", version="1", **labels) - before.value(
            name, model="plain", version="1", **labels
        )

    assert grown("nv_inference_request_success") == 3
    assert grown("nv_inference_count") == 5
    assert grown("nv_inference_exec_count") == 3
    assert {each["reason"] for each in after.labels("nv_inference_request_failure") if each["model"] == "plain"} == {
        "REJECTED",
        "CANCELED",
        "BACKEND",
        "OTHER",
    }
    assert grown("nv_inference_request_duration_us") >= grown("nv_inference_queue_duration_us")
    assert after.value("nv_inference_pending_request_count", model="plain") == 0
    assert after.value("nv_model_load_duration_secs", model="plain") > 0
    for part in ("request", "queue", "compute_input", "compute_infer", "compute_output"):
        assert grown(f"nv_inference_{part}_duration_histogram_us_count") == 3
        assert grown(f"nv_inference_{part}_duration_histogram_us_bucket", le="+Inf") == 3
    assert grown("inference_batch_size_bucket", le="2") == 2
    assert grown("inference_batch_size_bucket", le="4") == 3
    assert grown("inference_batch_size_sum") == 5
    left = {each["reason"] for each in after.labels("inferd_batches_total") if each["model"] == "plain"}
    assert left == {"no batching"}
    assert after.value("inferd_batches_total", model="plain") == after.value("nv_inference_exec_count", model="plain")
    assert after.value("inferd_instance_running_requests", model="plain", instance="plain_0") == 0
    assert grown("inferd_instance_busy_seconds_total", instance="plain_0") > 0


def test_buckets_are_cumulative_and_end_with_all(server):
    page = scrape(server[1])
    for name in {name for name, _ in page.samples if name.endswith("_bucket")}:
        for labels in {
            frozenset((key, value) for key, value in having if key != "le")
            for each, having in page.samples
            if each == name
        }:
            counts = [
                value
                for _, value in sorted(
                    (float(dict(having)["le"]), value)
                    for (each, having), value in page.samples.items()
                    if each == name and labels <= having
                )
            ]
            assert counts == sorted(counts)
            assert counts[-1] == page.samples[name.replace("_bucket", "_count"), labels]


def test_tags_and_buckets_of_a_configuration_are_used(server):
    page = scrape(server[1])
    assert page.value("nv_inference_count", model="tagged", _team='a \\"b\\"\\\\c') == 0
    first = "nv_inference_first_response_histogram_ms_bucket"
    assert [each["le"] for each in page.labels(first) if each["model"] == "tagged"] == ["0.5", "1", "250", "+Inf"]
    assert [each["le"] for each in page.labels(first) if each["model"] == "plain"] == [
        "100",
        "500",
        "2000",
        "5000",
        "+Inf",
    ]


def test_responses_of_a_decoupled_model_are_counted_one_by_one(server):
    address, metrics = server
    answers = []
    done = threading.Semaphore(0)

    def take(result, error):
        answers.append((result, error))
        done.release()

    with triton.InferenceServerClient(address) as client:
        client.start_stream(take)
        client.async_stream_infer("stream", [tensor(3)], enable_empty_final_response=True)
        for _ in range(4):
            assert done.acquire(timeout=30)
        client.stop_stream()
        [statistics] = client.get_inference_statistics("stream", as_json=True)["model_stats"]
    page = scrape(metrics)
    assert page.value("nv_inference_first_response_histogram_ms_count", model="stream") == 1
    assert page.value("inference_inter_response_histogram_us_count", model="stream") == 2
    responses = statistics["response_stats"]
    assert sorted(responses) == ["0", "1", "2", "3"]
    assert [responses[index]["success"].get("count") for index in "012"] == ["1", "1", "1"]
    assert responses["3"]["empty_response"]["count"] == "1"
    assert "count" not in responses["3"]["success"]


def test_calls_connections_and_refusals_are_counted(server):
    address, metrics = server
    # a client's connection ends in the background, also that of the test before
    wait_until(lambda: scrape(metrics).value("inferd_connections") == 0)
    before = scrape(metrics)
    with triton.InferenceServerClient(address) as client:
        assert client.is_server_live()
        client.infer("plain", [tensor()])
        with pytest.raises(triton.InferenceServerException):
            client.infer("nobody", [tensor()])
        during = scrape(metrics)

    def grown(name, **labels):
        def value(page):
            return sum(v for (n, having), v in page.samples.items() if n == name and labels.items() <= set(having))

        return value(during) - value(before)

    assert during.value("inferd_connections") == before.value("inferd_connections") + 1
    assert grown("inferd_accepted_connections_total") == 1
    infer = {"grpc_method": "ModelInfer", "grpc_service": "inference.GRPCInferenceService", "grpc_type": "unary"}
    assert grown("grpc_server_started_total", **infer) == 2
    assert grown("grpc_server_handled_total", **infer) == 2
    assert grown("grpc_server_handled_total", grpc_method="ModelInfer", grpc_code="OK") == 1
    assert grown("grpc_server_handled_total", grpc_method="ServerLive", grpc_code="OK") == 1
    assert grown("inferd_refused_requests_total") == 1
    assert grown("inferd_received_bytes_total") > grown("inferd_model_received_bytes_total", model="plain") > 16
    assert grown("inferd_sent_bytes_total") == grown("inferd_model_sent_bytes_total", model="plain") > 16
    assert grown("inferd_model_received_bytes_total", model="stream") == 0


def test_calls_of_health_and_reflection_are_counted(server):
    """A call that fails, and one that its client gives up, are counted, too."""
    address, metrics = server
    before = scrape(metrics)
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        health.Check(health_pb2.HealthCheckRequest())
        with pytest.raises(grpc.RpcError):
            health.Check(health_pb2.HealthCheckRequest(service="nobody"))
        watched = health.Watch(health_pb2.HealthCheckRequest())
        next(watched)
        watched.cancel()
        listed = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="*")])
        )
        assert len(list(listed)) == 1

    def grown(name, method, **labels):
        def total(page):
            wanted = {"grpc_method": method, **labels}.items()
            return sum(v for (n, having), v in page.samples.items() if n == name and wanted <= set(having))

        return total(scrape(metrics)) - total(before)

    handled = "grpc_server_handled_total"
    # a call is counted when its handler has ended, which may be after its answer
    wait_until(lambda: grown(handled, "Check") == 2)
    assert grown("grpc_server_started_total", "Check", grpc_service="grpc.health.v1.Health", grpc_type="unary") == 2
    assert grown(handled, "Check", grpc_code="OK") == 1
    assert grown(handled, "Check", grpc_code="NotFound") == 1
    assert grown("grpc_server_started_total", "Watch", grpc_type="server_stream") == 1
    wait_until(lambda: grown(handled, "Watch", grpc_code="Canceled") == 1)
    wait_until(lambda: grown(handled, "ServerReflectionInfo", grpc_type="bidi_stream", grpc_code="OK") == 1)


def test_workers_of_python_models_are_described(tmp_path):
    """What a worker is and has, and that its end and the next one are seen."""
    root = write(tmp_path / "models", worked=IDENTITY.replace('"identity"', '"python"'), plain=IDENTITY)
    (root / "worked" / "1" / "model.py").write_text(
        "class TritonPythonModel:\n    def execute(self, requests):\n        import os\n        os._exit(3)\n"
    )
    with scraped_server(root) as (process, metrics), triton.InferenceServerClient(process.address) as client:
        page = scrape(metrics)
        worked = {"model": "worked", "version": "1", "instance": "worked_0"}
        assert page.labels("inferd_worker_restarts_total") == [worked]
        assert page.value("inferd_worker_restarts_total", **worked) == 0
        states = {
            each["state"]: page.value("inferd_worker_state", **each) for each in page.labels("inferd_worker_state")
        }
        assert states == {"starting": 0, "up": 1, "waiting": 0}
        assert page.value("inferd_worker_resident_memory_bytes", **worked) > 1 << 20
        with pytest.raises(triton.InferenceServerException, match="exit"):
            client.infer("worked", [tensor()])
        wait_until(lambda: scrape(metrics).value("inferd_worker_restarts_total") == 1)
        wait_until(lambda: scrape(metrics).value("inferd_worker_state", state="up") == 1)


def test_the_server_and_the_process_are_described(server):
    page = scrape(server[1])
    assert page.value("inferd_build_info", transport="native") == 1
    assert page.value("inferd_model_loads_total") == 3
    assert page.value("inferd_model_load_failures_total") == 1
    for name in (
        "process_resident_memory_bytes",
        "process_open_fds",
        "nv_cpu_memory_total_bytes",
        "inferd_memory_limit_bytes",
    ):
        assert page.value(name) > 0
    assert page.value("inferd_native_objects", kind="lanes") == 3


def test_openmetrics_and_compression_are_served_on_request(server):
    plain = scrape(server[1])
    status, headers, body = ask(server[1], "Accept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5")
    assert status.endswith("200 OK")
    assert headers["content-type"].startswith("application/openmetrics-text")
    text = body.decode()
    assert text.endswith("\n# EOF\n")
    assert "# TYPE nv_inference_count unknown\n" in text
    assert "# TYPE inferd_batches counter\n" in text
    assert scrape(server[1], "Accept-Encoding: gzip").types.keys() == plain.types.keys()
    assert plain.types["nv_inference_count"] == "counter"


def test_only_get_of_the_page_is_answered(server):
    assert ask(server[1], request="POST /metrics HTTP/1.1")[0].startswith("HTTP/1.1 405")
    assert ask(server[1], request="GET /v2/models HTTP/1.1")[0].startswith("HTTP/1.1 404")
    assert ask(server[1], request="GET /metrics?x=1 HTTP/1.1")[0].startswith("HTTP/1.1 200")
    status, headers, body = ask(server[1], request="HEAD /metrics HTTP/1.1")
    assert (status, body) == ("HTTP/1.1 200 OK", b"")
    assert int(headers["content-length"]) > 1000


@pytest.mark.parametrize(
    "head",
    [
        "GET",
        "GET /metrics",
        "GET http://x/metrics HTTP/1.1",
        "GET /metrics HTTP/2.0",
        "\x16\x03\x01",
        "GET /metrics HTTP/1.1\r\nno colon",
    ],
)
def test_what_is_no_request_is_refused(server, head):
    assert ask(server[1], request=head)[0].startswith("HTTP/1.1 400")


def test_a_long_request_is_refused(server):
    assert ask(server[1], "X: " + "a" * 20_000)[0].startswith("HTTP/1.1 431")


def test_scrapers_that_say_nothing_do_not_keep_others_out(server):
    """A few stay silent, the rest of many are turned away; the page is served when they have gone."""
    silent = [socket.create_connection(server[1].split(":")) for _ in range(40)]
    try:
        turned_away = 0
        for connection in silent[32:]:
            connection.settimeout(30)
            try:
                turned_away += connection.recv(1) == b""
            except ConnectionResetError:
                turned_away += 1
        assert turned_away == 8
    finally:
        for connection in silent:
            connection.close()
    assert scrape(server[1]).value("inferd_ready") in (0, 1)


def test_metrics_can_be_served_on_a_unix_socket_or_not_at_all(tmp_path):
    root = write(tmp_path / "models", plain=IDENTITY)
    path = tmp_path / "metrics.sock"
    with scraped_server(root, "--metrics-address", f"unix://{path}", "--metrics-config=histogram_latencies=false") as (
        _,
        address,
    ):
        page = scrape(address)
    assert page.value("nv_inference_count", model="plain") == 0
    assert not any("duration_histogram" in name for name in page.types)
    assert "nv_inference_queue_duration_us" in page.types
    assert not path.exists()


def test_a_silent_scraper_is_no_error_when_the_server_ends(tmp_path):
    root = write(tmp_path / "models", plain=IDENTITY)
    with ExitStack() as silent:
        with scraped_server(root) as (process, address):
            silent.enter_context(connected(address))
            assert scrape(address).value("inferd_ready") == 1  # connections are accepted in turn
        assert any("stopping" in line for line in process.lines)
        assert not [line for line in process.lines if line.startswith("E")]


def refused(root, address: str) -> str:
    """What a server prints that cannot serve metrics at an address."""
    command = [sys.executable, "-m", "inferd", "serve", str(root), "--grpc-port", "0", "--metrics-address", address]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert run.returncode == 1
    return run.stdout + run.stderr


def test_the_unix_socket_of_a_live_server_is_not_taken(tmp_path):
    """A second server at the same path does not start, and leaves the file; that of a killed server is replaced."""
    root = write(tmp_path / "models", plain=IDENTITY)
    path = tmp_path / "metrics.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with scraped_server(root, "--metrics-address", f"unix:{path}") as (_, address):
        assert f"metrics cannot be served at unix:{path}: Address already in use" in refused(root, f"unix:{path}")
        assert scrape(address).value("inferd_ready") == 1
    assert not path.exists()


def test_a_host_of_metrics_that_is_unknown(tmp_path):
    told = refused(write(tmp_path / "models", plain=IDENTITY), "no.such.host.invalid")
    assert "metrics cannot be served at no.such.host.invalid:0: " in told
    assert "Unknown error" not in told


def test_prometheus_reads_the_page(server):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    page = ask(server[1])[2]
    checked = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, check=False)
    complaints = [line for line in checked.stderr.decode().splitlines() if "error while linting" in line]
    assert not complaints and checked.returncode in (0, 3), checked.stderr.decode()
