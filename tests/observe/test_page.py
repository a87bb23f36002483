"""The page of metrics without a server: models' own metrics, GPUs, ensembles, and hostile requests."""

from __future__ import annotations

import json
import shutil
import subprocess
import types
import urllib.parse
import urllib.request

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.processes import free_port
from inferd.server.front.scrape import BadRequestError, parse_request
from inferd.server.observe.metrics.catalogue import chosen
from inferd.server.observe.metrics.gpu import GpuMetrics
from inferd.server.observe.metrics.page import Page
from inferd.server.observe.metrics.service import Service
from inferd.server.observe.metrics.text import written
from tests.engine.serving import CONFIG, ensemble_of, infer, request, row, serving
from tests.observe import scraping
from tests.observe.test_metrics import IDENTITY, tensor, triton, write
from tests.waiting import wait_until

ENSEMBLE = ensemble_of("m")


async def rendered(engine, *, openmetrics=False, **sources):
    page = Page(Service(engine, {"version": "1"}), chosen({}), **sources)
    return b"".join(await page.render(openmetrics=openmetrics)).decode()


def change(engine, user="worker", **what):
    engine.measures.change(user, what)


async def test_metrics_of_models_own_are_shown(tmp_path):
    async with serving(tmp_path) as engine:
        for name, kind in (("tokens", "counter"), ("load", "gauge"), ("size", "histogram")):
            change(engine, op="family", family=name, description="what\nit is", kind=kind)
        change(engine, op="metric", family="tokens", kind="counter", labels={"of": 'a "b"\n'}, buckets=())
        change(engine, op="family", family="odd", description="\ud800", kind="gauge")
        change(engine, op="metric", family="odd", kind="gauge", labels={"of": "a\ud800"}, buckets=())
        change(engine, op="set", family="odd", kind="gauge", labels={"of": "a\ud800"}, value=2)
        change(engine, op="increment", family="tokens", kind="counter", labels={"of": 'a "b"\n'}, value=3)
        change(engine, op="metric", family="load", kind="gauge", labels={}, buckets=())
        change(engine, op="set", family="load", kind="gauge", labels={}, value=0.5)
        change(engine, op="metric", family="size", kind="histogram", labels={"k": "v"}, buckets=(1.0, 10.0))
        for value in (0.5, 5, 50):
            change(engine, op="observe", family="size", kind="histogram", labels={"k": "v"}, value=value)
        for openmetrics in (False, True):
            text = await rendered(engine, openmetrics=openmetrics)
            page = scraping.parse_page(text)
            assert page.value("tokens", of='a \\"b\\"\\n') == 3
            assert page.value("load") == 0.5
            assert page.value("odd", of="a?") == 2
            assert [page.value("size_bucket", k="v", le=bound) for bound in ("1.0", "10.0", "+Inf")] == [1, 2, 3]
            assert page.value("size_sum", k="v") == 55.5
            assert r"what\nit is" in text


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("not a name", {}),
        ("nv_inference_count", {}),
        ("inferd_ready", {}),
        ("inferd_instances", {}),
        ("inference_batch_size_sum", {}),
        ("fine", {"a-b": "x"}),
    ],
)
async def test_metrics_that_nobody_could_read_are_left_out_and_told_once(tmp_path, caplog, name, labels):
    async with serving(tmp_path) as engine:
        change(engine, op="family", family=name, description="x", kind="gauge")
        change(engine, op="metric", family=name, kind="gauge", labels=labels, buckets=())
        page = Page(Service(engine, {}), chosen({}))
        for _ in range(2):
            text = b"".join(await page.render()).decode()
            scraping.parse_page(text)
        assert f"{name}{{a-b" not in text
        assert sum(repr(name) in record.getMessage() for record in caplog.records) == 1


async def test_samples_of_one_family_of_a_model_are_not_taken_for_another_s(tmp_path, caplog):
    """Families of models, too, must not meet in the names of their samples: a scraper would refuse the whole page."""
    async with serving(tmp_path) as engine:
        for name, kind in (("size", "histogram"), ("size_sum", "gauge"), ("seen_total", "counter"), ("seen", "gauge")):
            change(engine, op="family", family=name, description="x", kind=kind)
            change(engine, op="metric", family=name, kind=kind, labels={}, buckets=(1.0,))
        for openmetrics in (False, True):
            page = scraping.parse_page(await rendered(engine, openmetrics=openmetrics))
            assert page.value("size_sum") == 0
            assert page.types["size"] == "histogram"
            assert "size_sum" not in page.types
            assert ("seen", frozenset()) in page.samples
            assert ("seen_total", frozenset()) not in page.samples


async def test_an_ensemble_is_counted_under_its_own_version(tmp_path):
    (tmp_path / "whole" / "3").mkdir(parents=True)
    async with serving(tmp_path, m=CONFIG, whole=ENSEMBLE) as engine:
        assert (await infer(engine, request("whole", x=row(1, 2)))).status == 0
        page = scraping.parse_page(await rendered(engine))
    assert page.value("nv_inference_request_success", model="whole", version="3") == 1
    assert "whole" not in {each["model"] for each in page.labels("nv_inference_pending_request_count")}
    assert page.value("nv_inference_request_success", model="m") == 1


def nvml():
    """A stand-in for cuda.bindings.nvml with two GPUs, of which one does not tell its power."""

    def power(gpu):
        if gpu:
            raise RuntimeError("NVML_ERROR_NOT_SUPPORTED")
        return 75_500

    return types.SimpleNamespace(
        init_v2=lambda: None,
        device_get_count_v2=lambda: 2,
        device_get_handle_by_index_v2=lambda index: index,
        device_get_uuid=lambda gpu: f"GPU-{gpu}",
        device_get_utilization_rates=lambda gpu: types.SimpleNamespace(gpu=40 + gpu),
        device_get_memory_info_v2=lambda gpu: types.SimpleNamespace(total=1000, used=100 + gpu),
        device_get_power_usage=power,
        device_get_enforced_power_limit=power,
        device_get_total_energy_consumption=lambda gpu: 5000,
    )


async def test_gpus_are_shown_by_tritons_names(tmp_path):
    async with serving(tmp_path) as engine:
        page = scraping.parse_page(await rendered(engine, gpus=GpuMetrics(0, nvml)))
    assert page.value("nv_gpu_utilization", gpu_uuid="GPU-1") == 0.41
    assert page.value("nv_gpu_memory_used_bytes", gpu_uuid="GPU-0") == 100
    assert page.value("nv_gpu_power_usage") == 75.5
    assert page.value("nv_energy_consumption", gpu_uuid="GPU-1") == 5


def test_without_a_library_there_are_no_gpus():
    def missing():
        raise ImportError("no module")

    assert GpuMetrics(0, missing).samples() == []


@given(st.binary(max_size=300))
def test_any_bytes_are_a_request_or_refused(data):
    try:
        request = parse_request(data)
    except BadRequestError:
        return
    assert request.path.startswith("/")
    assert request.openmetrics in (True, False)
    assert request.accepts_gzip in (True, False)


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        ("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2,*/*;q=0.1", True),
        ("text/plain;version=0.0.4;q=0.5,application/openmetrics-text;q=0.2", False),
        ("application/openmetrics-text;q=x", False),
        ("*/*", False),
        ("", False),
    ],
)
def test_the_scraper_chooses_the_format(accept, openmetrics):
    assert parse_request(f"GET /metrics HTTP/1.1\r\nAccept: {accept}\r\n\r\n".encode()).openmetrics is openmetrics


def test_a_prometheus_server_scrapes_it_and_answers_questions(tmp_path):
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed (Debian package prometheus)")
    root = write(tmp_path / "models", plain=IDENTITY)
    with scraping.scraped_server(root) as (process, metrics), triton.InferenceServerClient(process.address) as client:
        for _ in range(3):
            client.infer("plain", [tensor()])
        config = tmp_path / "prometheus.yml"
        config.write_text(
            "scrape_configs:\n  - job_name: inferd\n    scrape_interval: 100ms\n    scrape_timeout: 100ms\n"
            f"    static_configs: [{{targets: ['{metrics}']}}]\n"
        )
        port = free_port()
        asking = subprocess.Popen(
            [
                program,
                f"--config.file={config}",
                f"--storage.tsdb.path={tmp_path / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_until(lambda: answer(port, "nv_inference_request_success") == ["3"])
            assert answer(port, 'inference_batch_size_bucket{le="1"} or inference_batch_size_bucket{le="1.0"}') == ["3"]
            assert answer(port, "inferd_batches_total") == ["3"]
        finally:
            asking.terminate()
            asking.wait(30)


def answer(port, query):
    url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": query})
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            found = json.loads(response.read())["data"]["result"]
    except OSError:
        return []
    return [each["value"][1] for each in found]


def test_labels_are_written_by_name() -> None:
    """Triton writes them so, and programs compare lines."""
    assert written({"version": "1", "model": "m", "_team": "a"}) == '_team="a",model="m",version="1"'
