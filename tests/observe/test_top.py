"""`inferd top`: what it makes of two looks at a server's metrics, and how it shows that."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from inferd.server.cli import main
from inferd.server.tools.looking import as_metrics, target_of
from inferd.server.tools.rates import Choice, between, parse_metrics
from inferd_client.pb import grpc_service_pb2 as pb
from tests.conformance import doors
from tests.observe.test_metrics import IDENTITY, tensor, write

HISTOGRAM = "nv_inference_request_duration_histogram_us"

OURS = """
# TYPE nv_inference_count counter
nv_inference_count{{model="m",version="1"}} {rows}
nv_inference_exec_count{{model="m",version="1"}} {batches}
nv_inference_request_success{{model="m",version="1"}} {requests}
nv_inference_request_failure{{model="m",version="1",reason="BACKEND"}} 0
nv_inference_request_failure{{model="m",version="1",reason="OTHER"}} {failures}
nv_inference_pending_request_count{{model="m",version="1"}} 7
nv_inference_request_duration_us{{model="m",version="1"}} {us}
nv_inference_request_duration_histogram_us_bucket{{model="m",version="1",le="1000"}} {fast}
nv_inference_request_duration_histogram_us_bucket{{model="m",version="1",le="2000"}} {requests}
nv_inference_request_duration_histogram_us_bucket{{model="m",version="1",le="+Inf"}} {requests}
inferd_instances{{model="m",version="1"}} 2
inferd_instance_busy_seconds_total{{model="m",version="1",instance="m_0"}} {busy}
inferd_instance_busy_seconds_total{{model="m",version="1",instance="m_1"}} {busy}
inferd_connections 3
process_cpu_seconds_total {busy}
"""

BEFORE = OURS.format(rows=100, batches=50, requests=100, failures=0, us=0, fast=50, busy=0)
AFTER = OURS.format(rows=500, batches=100, requests=200, failures=4, us=150_000, fast=140, busy=1)


def test_rates_are_what_was_done_between_two_looks():
    rates = between(parse_metrics(BEFORE, 10.0), parse_metrics(AFTER, 12.0))
    [model] = rates.models
    assert (model.model, model.version, model.pending) == ("m", "1", 7)
    assert (model.requests, model.failures, model.batch) == (50, 2, 8)
    assert model.busy == 0.5
    assert model.mean_us == 1500
    assert model.p50_us == pytest.approx(1000 * 50 / 90)
    assert model.p99_us == pytest.approx(1900)
    assert model.queue_us == 0  # no histogram of it: the mean
    assert rates.server == {"connections": 3, "cpu": 0.5}


def test_models_are_sorted_filtered_and_hidden():
    """Guards the choice of models: by a column, the highest first; by pattern; without those that did nothing."""
    ends = {"a": 110, "b": 150, "idle": 100}

    def look(at, counts):
        names = ("nv_inference_count", "nv_inference_request_success")
        return parse_metrics(
            "\n".join(f'{name}{{model="{model}",version="1"}} {counts[model]}' for name in names for model in counts),
            at,
        )

    before, after = look(0.0, dict.fromkeys(ends, 100)), look(1.0, ends)

    def shown(**choice):
        return [each.model for each in between(before, after, Choice(**choice)).models]

    assert shown() == ["a", "b", "idle"]
    assert shown(sort="requests", idle=False) == ["b", "a"]
    assert shown(sort="p99", pattern="?") == ["a", "b"]


def test_a_counter_that_began_anew_counts_from_there():
    rates = between(parse_metrics(AFTER, 10.0), parse_metrics(BEFORE, 11.0))
    assert rates.models[0].requests == 100


def test_what_tritonserver_tells_is_enough():
    lines = [line for line in AFTER.splitlines() if "histogram" not in line and "inferd" not in line]
    [model] = between(parse_metrics("", 0.0), parse_metrics("\n".join(lines), 1.0)).models
    assert (model.requests, model.p99_us, model.busy) == (200, None, None)
    assert model.mean_us == 750


def test_models_are_read_once_each():
    """The work does not grow with the square of the number of models."""
    reads = 0

    class Counted(dict):
        def __iter__(self):
            nonlocal reads
            reads += len(self)
            return super().__iter__()

        def items(self):
            nonlocal reads
            reads += len(self)
            return super().items()

    names = [f"m{number}" for number in range(50)]
    before, after = (
        parse_metrics("\n".join(page.replace('"m"', f'"{name}"') for name in names), at)
        for page, at in ((BEFORE, 0.0), (AFTER, 1.0))
    )
    for look in (before, after):
        for name in look.samples:
            look.samples[name] = Counted(look.samples[name])
    models = between(before, after).models
    assert [each.model for each in models] == sorted(names)
    assert models[-1].p99_us == pytest.approx(1900)
    assert reads < 10 * sum(map(len, after.samples.values()))


def test_labels_have_any_characters_but_ends_of_lines():
    """Guards labels that a model's author chose: U+2028 and U+0085 end no line of the format."""
    text = 'nv_inference_count{model="m",version="1",tag="a\u2028b\x85c"} 4'
    assert parse_metrics(text, 0.0).total("nv_inference_count", model="m") == 4


def test_what_is_no_page_of_metrics_is_refused():
    with pytest.raises(ValueError, match="no line of metrics"):
        parse_metrics("<html>", 0.0)


@contextmanager
def served(*pages):
    """The address of a server that serves these pages one after the other, and then the last one."""
    left = list(pages)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            page = (left.pop(0) if len(left) > 1 else left[0]).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/metrics"
        finally:
            server.shutdown()
            thread.join()


def test_a_table_is_printed_once(capsys):
    with served(BEFORE, AFTER) as url:
        assert main(["top", url, "--once", "--interval", "0.01"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "connections 3" in printed[0]
    assert printed[2].split() == [
        "model",
        "req/s",
        "p50",
        "p99",
        "queue",
        "compute",
        "batch",
        "pending",
        "busy",
        "fail/s",
    ]
    assert printed[3].split()[0] == "m"


def test_it_is_printed_as_json(capsys):
    with served(BEFORE, AFTER) as url:
        assert main(["top", url, "--format", "json", "--interval", "0.01"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["models"][0]["model"] == "m"
    assert found["server"]["connections"] == 3


def statistics(count, *, failures=0, queue_times=()):
    """What a server tells of a model that has executed so many requests in batches of two."""
    model = pb.ModelStatistics(name="m", version="2", inference_count=count, execution_count=count // 2)
    stats = model.inference_stats
    stats.success.count, stats.success.ns = count, count * 900_000
    stats.queue.count, stats.queue.ns = count, count * 200_000
    stats.compute_infer.count, stats.compute_infer.ns = count, count * 500_000
    stats.fail.count = failures
    for us, number in queue_times:
        model.queue_times.add(us=us, count=number)
    return as_metrics(pb.ModelStatisticsResponse(model_stats=[model]), float(count))


def test_the_statistics_of_a_v2_server_are_rates_too():
    """What the protocol does not tell is not made up."""
    [model] = between(statistics(0), statistics(100, failures=50)).models
    assert (model.model, model.version) == ("m", "2")
    assert (model.requests, model.failures, model.batch) == (1, 0.5, 2)
    assert (model.mean_us, model.queue_us, model.compute_us) == (900, 200, 500)
    assert (model.p50_us, model.p99_us, model.pending, model.busy) == (None, None, None, None)


def test_queue_times_of_this_server_s_statistics_give_a_quantile():
    after = statistics(100, queue_times=((0, 10), (100, 50), (200, 40)))
    [model] = between(statistics(0), after).models
    assert model.queue_us == 200
    [model] = between(statistics(0), statistics(100, queue_times=((100, 50), (200, 50)))).models
    assert model.queue_us == pytest.approx(198)


@pytest.mark.parametrize("scheme", ["grpc://", ""])
def test_a_server_is_asked_by_grpc(capsys, tmp_path, scheme):
    """`inferd top` sends its token; without one it says why the server does not answer."""
    root = write(tmp_path / "models", plain=IDENTITY)
    arguments = ("--grpc-restricted-protocol", "statistics:key=secret")
    with doors.running_server("native", root, *arguments) as process, doors.connected(process) as client:
        client.infer("plain", [tensor()])
        command = ["top", f"{scheme}{process.address}", "--format", "json", "--interval", "0.01"]
        assert main([*command, "--header", "triton-grpc-protocol-key=secret"]) == 0
        [model] = json.loads(capsys.readouterr().out)["models"]
        assert main(command) == 1
        assert "UNAUTHENTICATED: This protocol is restricted" in capsys.readouterr().err
    assert (model["model"], model["pending"]) == ("plain", None)


def test_an_address_that_means_nothing_is_refused(capsys):
    assert main(["top", "ftp://x", "--once"]) != 0
    assert "expected http://HOST:PORT/metrics, grpc://HOST:PORT or unix:PATH" in capsys.readouterr().err


def test_what_speaks_no_http_is_said_in_one_line(capsys):
    def answer(listening):
        connection, _ = listening.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer, args=(listening,))
        thread.start()
        assert main(["top", f"http://127.0.0.1:{listening.getsockname()[1]}/metrics", "--once"]) == 1
        thread.join()
    assert "the response is not HTTP" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://local host:8002/metrics", "http://localhost:port/metrics"])
def test_a_url_that_is_none_is_said_in_one_line(capsys, url):
    assert main(["top", url, "--once"]) == 1
    assert capsys.readouterr().err.startswith(f"inferd: top: {url}: ")


def test_nobody_there_is_said_in_one_line(capsys):
    assert main(["top", "http://127.0.0.1:9/metrics", "--once"]) == 1
    assert capsys.readouterr().err.startswith("inferd: top: http://127.0.0.1:9/metrics: ")


def test_the_screen_shows_models_and_ends_at_q():
    textual = pytest.importorskip("textual.widgets", reason="the extra tui is not installed")
    from inferd.server.tools.screen import Screen

    async def use(url):
        screen = Screen(target_of(url), 0.01, target_of(url).look(), Choice())
        async with screen.run_test() as pilot:
            table = screen.query_one(textual.DataTable)
            while not table.row_count:
                await pilot.pause(0.01)
            shown = table.get_row_at(0)
            await pilot.press("slash", "x", "enter")
            while table.row_count:
                await pilot.pause(0.01)
            await pilot.press("s", "i", "q")
        return shown

    with served(BEFORE, AFTER) as url:
        assert str(asyncio.run(use(url))[0]) == "m"


def test_the_screen_shows_brackets_as_they_are():
    """Guards texts that look like markup of the screen's library: names, errors, and an address of IPv6."""
    pytest.importorskip("textual")
    from inferd.server.tools.screen import Screen

    names = iter(["[bold]n"])
    proceed = threading.Event()

    class Page:
        url = "http://[::1]:8002/metrics"

        def look(self):
            assert proceed.wait(30)
            name = next(names, None)
            if name is None:
                raise OSError("[/x] refused")
            return parse_metrics(f'nv_inference_count{{model="{name}",version="1"}} 1', 0.0)

    async def use():
        page = Page()
        screen = Screen(page, 0.01, parse_metrics("", 0.0), Choice())
        async with screen.run_test() as pilot:
            assert page.url in str(screen.query_one("#server").render())
            proceed.set()
            table = screen.query_one("DataTable")
            while not table.row_count:
                await pilot.pause(0.01)
            shown = str(table.get_cell_at((0, 0)))
            while not (problem := str(screen.query_one("#problem").render())):
                await pilot.pause(0.01)
        return shown, problem

    assert asyncio.run(use()) == ("[bold]n", "[/x] refused")
