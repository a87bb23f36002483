"""The commands that ask a server: `models`, `infer`, `perf`; and `config show`, `check --format`, `completion`."""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from PIL import Image

import inferd_client.grpc as grpcclient
from bench.repository import Identity, write
from inferd.server import cli
from inferd.server.tools.perf.measuring import process_of
from inferd.server.tools.tables import table
from inferd.server.tools.tune import pair
from inferd.server.tools.tune.configurations import BATCHES, DELAYS_US, all_axes, applied, axes_of, setting_of
from inferd.server.tools.tune.pair import Pair
from inferd.server.tools.tune.search import Search, Setting, Settings, Tried, Wanted
from inferd.server.tools.tune.trial import Trial
from inferd_client.pb import model_config_pb2 as pb
from tests.backends.models import identity_onnx, save_script
from tests.conformance import doors
from tests.front.certificates import Authority
from tests.observe.test_metrics import IDENTITY

ROOT = Path(__file__).resolve().parents[2]
FLOAT = 1  # of ONNX


@pytest.fixture
def inferd(server, capsys):
    """Run a command about the server; what it prints."""

    def run(*arguments, status=0, url=True):
        command = [*map(str, arguments), *(("--url", server.tcp) if url else ())]
        assert cli.main(command) == status, capsys.readouterr()
        printed = capsys.readouterr()
        return printed.out if status == 0 else printed.out + printed.err

    return run


# ---- models ---------------------------------------------------------------------------------------------------------


def test_models_are_listed_loaded_and_unloaded(inferd):
    """Guards `models ls`, `load`, `unload`."""
    inferd("models", "unload", "uint8")
    states = {each["name"]: each["state"] for each in json.loads(inferd("models", "ls", "--format", "json"))}
    assert states["fp32"] == "READY"
    assert states.get("uint8") != "READY"
    assert inferd("models", "load", "uint8") == "uint8 is loaded\n"
    assert re.search(r"^uint8 +1 +READY$", inferd("models", "ls"), re.MULTILINE)
    assert "nobody" in inferd("models", "load", "nobody", status=1)


def test_a_model_is_loaded_with_another_configuration(inferd, tmp_path):
    """Guards `models load --model-config`, with a config.pbtxt, and `describe --pbtxt`, which prints one."""
    text = inferd("models", "describe", "int64", "--pbtxt")
    assert "max_batch_size: 64" in text
    (tmp_path / "config.pbtxt").write_text(re.sub(r"\b64\b", "7", text))
    inferd("models", "load", "int64", "--model-config", tmp_path / "config.pbtxt")
    assert "at most 7 in a batch" in inferd("models", "describe", "int64")
    inferd("models", "load", "int64")


def test_a_model_is_described(inferd):
    """Guards `models describe`."""
    told = inferd("models", "describe", "pair")
    assert re.search(r"^input +INPUT1 +BYTES +\[-1, -1\]$", told, re.MULTILINE)
    assert json.loads(inferd("models", "describe", "pair", "--format", "json"))["name"] == "pair"
    assert "decoupled" in inferd("models", "describe", "repeat")


def test_labels_of_versions(inferd, tmp_path):
    """Guards requests that name a label, and where labels are shown: `models describe`, ModelMetadata."""
    labels = 'parameters { key: "version_labels" value { string_value: "stable=1, other=1" } }'
    (tmp_path / "config.pbtxt").write_text(inferd("models", "describe", "int64", "--pbtxt") + labels)
    inferd("models", "load", "int64", "--model-config", tmp_path / "config.pbtxt")
    assert "versions 1 (stable, other)" in inferd("models", "describe", "int64")
    told = json.loads(inferd("models", "describe", "int64", "--version", "other", "--format", "json"))
    assert (told["versions"], told["properties"]) == (["1"], {"version_labels": "stable=1, other=1"})
    assert "int64 version 1: " in inferd("infer", "int64", "--version", "stable", "--data", "[[[1]]]")
    assert "version string 'gone'" in inferd("infer", "int64", "--version", "gone", "--data", "[[[1]]]", status=1)
    inferd("models", "load", "int64")


def test_versions_are_listed_by_number(tmp_path, inferd):
    """Guards the order in `models ls` and `models stats`: 10 comes after 2."""
    repository = write(tmp_path, [Identity("many", (("FP32", 1),)), Identity("beside", (("FP32", 1),))])
    for version in ("2", "10"):
        (repository / "many" / version).mkdir()
    with (repository / "many" / "config.pbtxt").open("a") as config:
        config.write("version_policy { all { } }\n")
    with doors.running_server("native", repository) as process:
        for command in ("ls", "stats"):
            told = inferd("models", command, "--url", process.address, url=False)
            rows = [line.split()[:2] for line in told.splitlines()]
            assert [row for row in rows if row[0] in ("many", "beside")] == [
                ["beside", "1"], ["many", "1"], ["many", "2"], ["many", "10"]
            ]  # fmt: skip


def test_statistics(inferd):
    """Guards `models stats`."""
    inferd("infer", "bool", "--data", "[true]")
    line = next(each for each in inferd("models", "stats").splitlines() if each.startswith("bool"))
    assert int(line.split()[2]) >= 1
    assert json.loads(inferd("models", "stats", "bool", "--format", "json"))["model_stats"][0]["name"] == "bool"


def test_health(inferd, capsys):
    """Guards `inferd health` of the server, a model, a version and what is not there; that it imports no grpcio."""
    for service in ("", "fp32", "fp32/1"):
        assert "is SERVING" in inferd("health", "--service", service)
    assert "'nobody'" in inferd("health", "--service", "nobody", status=1) or "NOT_FOUND" in capsys.readouterr().err
    code = (
        "import sys; from inferd.server.cli import main; main(['health', '--url', '127.0.0.1:1']); "
        "print(sorted({'grpc', 'google', 'numpy', 'inferd.server.settings'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_is_made_of_a_model_file_serves(tmp_path, capsys):
    """Guards `models init`: its configuration passes `check`, says what the file says, and nothing is overwritten."""
    file = tmp_path / "thing.onnx"
    file.write_bytes(identity_onnx(FLOAT, ["N", 4]))
    repository = tmp_path / "models"
    command = ["models", "init", str(file), "--repository", str(repository)]
    assert cli.main(command) == 0
    text = (repository / "thing" / "config.pbtxt").read_text()
    assert 'input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }' in text
    assert cli.main(["check", str(repository)]) == 0
    assert "thing: ok" in capsys.readouterr().out
    assert cli.main(command) == 1
    assert "--force" in capsys.readouterr().err
    assert cli.main([*command, "--force", "--max-batch-size", "3"]) == 0
    assert "max_batch_size: 3" in (repository / "thing" / "config.pbtxt").read_text()
    assert cli.main(["models", "init", str(tmp_path / "nothing.onnx")]) == 1
    (tmp_path / "x.tflite").write_text("")
    assert cli.main(["models", "init", str(tmp_path / "x.tflite")]) == 1
    assert ".onnx" in capsys.readouterr().err


# ---- infer ----------------------------------------------------------------------------------------------------------


def answered(inferd, *arguments):
    return json.loads(inferd("infer", *arguments, "--format", "json"))


def test_data_of_words_and_files(inferd, tmp_path):
    """Guards `infer --data`: numbers, text, .npy, .npz, .json, files of text, and what is put into a batch."""
    assert answered(inferd, "fp32", "--data", "1,2.5") == {"OUTPUT0": [[1.0, 2.5]]}
    assert answered(inferd, "text", "--data", "two words") == {"OUTPUT0": [["two words"]]}
    assert "OUTPUT0: BYTES [1, 1]\n" in inferd("infer", "text", "--data", "two words")
    long = "no file can have so long a name " * 20
    assert answered(inferd, "text", "--data", f"INPUT0={long}") == {"OUTPUT0": [[long]]}
    np.save(tmp_path / "x.npy", np.ones((2, 3), np.float32))
    assert answered(inferd, "fp32", "--data", tmp_path / "x.npy") == {"OUTPUT0": [[1, 1, 1], [1, 1, 1]]}
    np.savez(tmp_path / "x.npz", INPUT0=np.zeros((1, 1), np.float32))
    assert answered(inferd, "fp32", "--data", tmp_path / "x.npz") == {"OUTPUT0": [[0]]}
    request = {"inputs": [{"name": "INPUT0", "shape": [1, 2], "datatype": "FP32", "data": [3, 4]}]}
    (tmp_path / "x.json").write_text(json.dumps(request))
    assert answered(inferd, "fp32", "--data", tmp_path / "x.json") == {"OUTPUT0": [[3, 4]]}
    (tmp_path / "x.txt").write_text("a line\n")
    both = ["--data", "INPUT0=7", "--data", f"INPUT1=@{tmp_path / 'x.txt'}"]
    assert answered(inferd, "pair", *both) == {"OUTPUT0": [[7]], "OUTPUT1": [["a line"]]}
    assert answered(inferd, "pair", *both, "--output", "OUTPUT0") == {"OUTPUT0": [[7]]}


def test_data_are_made_up(inferd):
    """Guards --random, --shape and --batch-size."""
    made = answered(inferd, "fp32", "--random", "--shape", "INPUT0:5", "--batch-size", "3")
    assert np.array(made["OUTPUT0"]).shape == (3, 5)


def test_large_whole_numbers_are_sent_as_they_are(inferd):
    """Guards that they are not rounded where numpy makes floats of the list."""
    made = answered(inferd, "int64", "--data", "[[[9007199254740993, 1.0]]]")
    assert made["OUTPUT0"] == [[[9007199254740993, 1]]]


def test_answers_are_saved_and_classified(inferd, tmp_path):
    """Guards --save and --classes."""
    inferd("infer", "fp32", "--data", "1,9,5", "--save", tmp_path / "y.npz")
    assert np.load(tmp_path / "y.npz")["OUTPUT0"].tolist() == [[1, 9, 5]]
    told = inferd("infer", "fp32", "--data", "1,9,5", "--classes", "2")
    assert [line.split() for line in told.splitlines()[2:]] == [["1", "9.00000"], ["2", "5.00000"]]


def test_decoupled_models_are_asked_in_a_stream(inferd):
    """Guards that every answer is printed, and that an error is the command's."""
    assert inferd("infer", "repeat", "--data", "4,5").count("OUT: int32 [1]") == 2
    assert "no -1" in inferd("infer", "repeat", "--data", "[4,-1]", status=1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["fp32"], "--data INPUT0=VALUE"),
        (["fp32", "--random"], "--shape INPUT0:1"),
        (["fp32", "--data", "words"], "no numbers"),
        (["pair", "--data", "1"], "expected INPUT=VALUE"),
        (["fp32", "--data", "INPUT=1"], "the model has no input 'INPUT', but INPUT0"),
        (["fp32", "--data", "1", "--save", "x.bmp"], "expected .npz"),
        (["fp32", "--data", "1", "--header", "x"], "expected KEY=VALUE"),
        (["fp32", "--random", "--shape", "x"], "expected INPUT:SIZE"),
        (["fp32", "--random", "--shape", "INPUT0:-1,3"], "expected INPUT:SIZE"),
        (["fp32", "--random", "--shape", "INPUT0:3", "--batch-size", "-1"], "--batch-size: expected 1 or more"),
        (["uint8", "--data", "300"], "the data of 'INPUT0' are no UINT8: Python integer 300 out of bounds"),
        (["uint8", "--data", str(1 << 70)], "the data of 'INPUT0' are no UINT8"),
        (["int64", "--data", "1.5"], "the data of 'INPUT0' are no INT64: 1.5 would become 1"),
        (["fp32", "--data", "1", "--client-cert", "x"], "--client-cert: it needs TLS: add --root-cert, or --tls"),
        (["fp32", "--data", "1", "--client-key", "x", "--tls"], "--client-key: it needs --client-cert"),
    ],
)
def test_questions_that_make_no_sense(inferd, arguments, text):
    """Guards the status 2 and a sentence that says what to do."""
    assert text in inferd("infer", *arguments, status=2)


WRONG_DATA = {
    "cut.json": b'{"INPUT0": [1,',
    "letters.json": b"\xff\xfe{",
    "names.json": b'{"inputs": ["INPUT0"]}',
    "empty.json": b'{"inputs": [{"name": "INPUT0"}]}',
    "shape.json": b'{"inputs": [{"name": "INPUT0", "shape": [3], "data": [1, 2]}]}',
    "cut.npy": b"\x93NUMPYxx",
    "empty.npy": b"",
    "cut.npz": b"PKxx",
    "cut.png": b"\x89PNGxx",
    "odd.raw": b"abcde",
}


def test_data_that_cannot_be_read(inferd, tmp_path):
    """Guards that damaged files, and tensors of other kinds, are mistakes of the command line; nothing is unpickled."""
    for name, content in WRONG_DATA.items():
        (tmp_path / name).write_bytes(content)
        assert "--data" in inferd("infer", "fp32", "--data", tmp_path / name, status=2), name
    for name, array in (("o", np.array([b"a", None], object)), ("c", np.ones(1, complex)), ("u", np.array(["x"]))):
        np.save(tmp_path / f"{name}.npy", array, allow_pickle=True)
        assert "data" in inferd("infer", "fp32", "--data", tmp_path / f"{name}.npy", status=2), name
    np.save(tmp_path / "r.npy", np.array([1.5], np.float32))
    assert "1.5 would become 1" in inferd("infer", "int64", "--data", tmp_path / "r.npy", status=2)
    Image.new("L", (4, 4)).save(tmp_path / "whole.png")
    assert "no height and width" in inferd("infer", "fp32", "--data", tmp_path / "whole.png", status=2)
    np.save(tmp_path / "n.npy", np.ones(3))
    assert "takes BYTES" in inferd("infer", "text", "--data", tmp_path / "n.npy", status=2)
    for content in (
        '{"data": 5}',
        '{"data": [{"INPUT0": {"b64": "YQ", "shape": [1]}}]}',
        '{"data": [{"INPUT0": "x"}]}',
    ):
        (tmp_path / "perf.json").write_text(content)
        assert "data" in inferd("perf", "fp32", "--input-data", tmp_path / "perf.json", status=2), content


def test_strings_are_saved_and_read(inferd, tmp_path):
    """Guards that strings need no pickle."""
    (tmp_path / "x.json").write_text(json.dumps({"INPUT0": [["", "two words", "\u00e9"]]}))
    for name in ("y.npy", "y.npz", "y.json"):
        inferd("infer", "text", "--data", tmp_path / "x.json", "--save", tmp_path / name)
    assert np.load(tmp_path / "y.npz")["OUTPUT0"].tolist() == [[b"", b"two words", "\u00e9".encode()]]
    assert answered(inferd, "text", "--data", tmp_path / "y.npy") == {"OUTPUT0": [["", "two words", "\u00e9"]]}


def test_files_that_cannot_be_written(inferd, tmp_path):
    """Guards that it is told before a measurement, not after it."""
    absent = tmp_path / "absent" / "x.json"
    for command in (["perf", "nobody", "--out", absent], ["plot", "x.json", "--out", absent.with_suffix(".png")]):
        assert "there is no folder" in inferd(*command, url=command[0] == "perf", status=2)
    assert "ends in .json or .csv" in inferd("perf", "nobody", "--out", "x.txt", status=2)
    (tmp_path / "file").write_text("")
    (tmp_path / "model.py").write_text("class TritonPythonModel: pass")
    made = ["models", "init", tmp_path / "model.py", "--repository", tmp_path / "file"]
    assert f"inferd: {tmp_path / 'file'}" in inferd(*made, url=False, status=1)


def test_failures_are_told(inferd):
    """Guards the status 1, and who was asked."""
    assert "NOT_FOUND" in inferd("infer", "nobody", "--data", "1", status=1)
    told = inferd("models", "ls", "--url", "127.0.0.1:1", url=False, status=1)
    assert "127.0.0.1:1" in told
    assert "is a server running there?" in told
    assert "expected HOST:PORT" in inferd("models", "ls", "--url", "nonsense", url=False, status=2)


def test_a_port_that_speaks_something_else_is_told(inferd):
    """Guards the hint for who takes the port of metrics, or of another service, for gRPC's."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(60)

        def answer():
            with other.accept()[0] as accepted:
                accepted.recv(1)
                accepted.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        told = inferd("models", "ls", "--url", f"127.0.0.1:{other.getsockname()[1]}", url=False, status=1)
        thread.join()
    assert "is that the port of gRPC" in told


# ---- perf -----------------------------------------------------------------------------------------------------------

SHORT = ["--measurement-interval", "100", "--warmup", "0", "--max-trials", "3"]
SHORT += ["--measurement-mode", "count_windows", "--measurement-request-count", "5"]  # on a busy machine, too


def test_levels_of_a_closed_loop(inferd, tmp_path):
    """Guards `perf`: a level for each step, its figures in JSON and CSV, the server's split, what perf_analyzer has."""
    out = tmp_path / "run.json", tmp_path / "run.csv"
    arguments = ["-m", "fp32", "--shape", "INPUT0:16", "-b", "2", "--concurrency-range", "1:5:4", *SHORT]
    told = inferd("perf", *arguments, "--out", out[0], "--out", out[1])
    assert [line.split()[0] for line in told.splitlines()[1:3]] == ["1", "5"]
    run = json.loads(out[0].read_text())
    assert (run["model"], run["rows"], [each["level"] for each in run["levels"]]) == ("fp32", 2, [1, 5])
    for level in run["levels"]:
        assert level["inferences"] == pytest.approx(2 * level["rate"])
        assert 0 < level["p50"] <= level["p90"] <= level["p95"] <= level["p99"] <= level["p999"]
        assert sum(calls for _, calls in level["histogram"]) == level["requests"]
        assert set(level["server"]) == {"queue", "input", "compute", "output"}
        assert not level["errors"]
    with out[1].open() as file:
        rows = list(csv.DictReader(file))
    assert [row["Concurrency"] for row in rows] == ["1", "5"]
    assert [float(row["p99 latency"]) for row in rows] == [round(level["p99"]) for level in run["levels"]]


def test_a_level_that_connections_cannot_share_evenly(tmp_path, capsys):
    """Guards that as many requests are in flight as the level says: the model waits for batches of exactly five."""
    dynamic = "dynamic_batching { preferred_batch_size: [ 5 ] max_queue_delay_microseconds: 3600000000 }\n"
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(IDENTITY + dynamic)
    with doors.running_server("native", tmp_path) as process:
        command = ["perf", "m", "--shape", "x:1", "--concurrency", "5", "--connections", "4", "--request-count", "10"]
        assert cli.main([*command, "--url", process.address]) == 0, capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--concurrency", "nan"], "expected FIRST, FIRST:LAST or FIRST:LAST:STEP"),
        (["--concurrency", "1:inf"], "expected FIRST, FIRST:LAST or FIRST:LAST:STEP"),
        (["--rate", "1:2:1e-300"], "expected at most 1000000 levels"),
        (["--string-length", "-1"], "--string-length: expected 0 or more"),
        (["--max-in-flight", "0"], "--max-in-flight: 1 or more"),
        (["--stability-percentage", "nan"], "--stability-percentage, --latency-threshold: expected 0 or more"),
        (["--warmup", "nan"], "--warmup, --max-duration: expected seconds, 0 or more"),
    ],
)
def test_measurements_that_make_no_sense(inferd, arguments, text):
    """Guards the status 2 and a sentence, before the server is asked."""
    assert text in inferd("perf", "nobody", *arguments, status=2)


def test_an_open_loop(inferd, tmp_path):
    """Guards rates: no more requests than are due; a closed loop makes thousands."""
    out = tmp_path / "run.json"
    arguments = ["fp32", "--shape", "INPUT0:4", "--request-rate-range", "200", "--request-distribution", "constant"]
    inferd("perf", *arguments, "--measurement-interval", "1000", "--max-trials", "1", "--out", out)
    (level,) = json.loads(out.read_text())["levels"]
    assert level["kind"] == "rate"
    assert 20 < level["requests"] <= 201


def test_latency_counts_from_when_a_request_was_due(inferd, tmp_path):
    """Guards against coordinated omission: a model that takes 400 ms, asked ten times a second, one at a time."""
    out = tmp_path / "run.json"
    arguments = ["late", "--shape", "INPUT0:4", "--rate", "10", "--max-in-flight", "1", "--warmup", "0"]
    inferd("perf", *arguments, "--measurement-interval", "1000", "--max-trials", "1", "--out", out)
    (level,) = json.loads(out.read_text())["levels"]
    assert level["max"] > 700_000


def test_the_highest_level_within_a_limit(inferd, tmp_path):
    """Guards --latency-threshold: levels end where one is beyond it, and a search measures few."""
    out = tmp_path / "run.json"
    arguments = ["late", "--shape", "INPUT0:4", "--measurement-interval", "100", "--warmup", "0", "--max-trials", "1"]
    arguments += ["--concurrency-range", "1:9:1", "--out", out]
    told = inferd("perf", *arguments, "--latency-threshold", "1500", "--binary-search")
    found = [each["level"] for each in json.loads(out.read_text())["levels"]]
    assert len(found) <= 5
    assert re.search(r"mean within 1500 ms: [1-6] at most", told)
    assert "at no level" in inferd("perf", *arguments, "--latency-threshold", "1", status=1)


def test_given_data(inferd, tmp_path):
    """Guards --input-data as perf_analyzer has it: contents, shapes, Base64, strings, lists of sequences."""
    (tmp_path / "data.json").write_text(
        json.dumps(
            {
                "data": [
                    {"INPUT0": [1, 2], "INPUT1": ["a"]},
                    {"INPUT0": {"content": [3, 4], "shape": [2]}, "INPUT1": {"b64": "eHk="}},
                ]
            }
        )
    )
    shapes = ["--shape", "INPUT0:2", "--shape", "INPUT1:1"]
    inferd("perf", "pair", "--input-data", tmp_path / "data.json", *shapes, "-b", "2", *SHORT)
    (tmp_path / "data.json").write_text('{"data": [{"INPUT0": [1]}]}')
    assert "lacks input 'INPUT1'" in inferd("perf", "pair", "--input-data", tmp_path / "data.json", *SHORT, status=2)


def test_shared_memory(inferd, server):
    """Guards --shared-memory, and that nothing of it is left."""
    address = ["--url", server.unix, "--shared-memory", "system", "--output-shared-memory-size", "64"]
    before = set(Path("/dev/shm").glob("inferd-client-*"))
    inferd("perf", "fp32", "--shape", "INPUT0:16", *address, *SHORT, url=False)
    made = set(Path("/dev/shm").glob("inferd-client-*")) - before
    owners = [Path("/proc") / path.name.split("-")[2] for path in made]  # other tests have their own at the same time
    assert all(map(Path.exists, owners))


def test_streams(inferd, tmp_path):
    """Guards decoupled models: whole requests, first answers, and what lies between answers."""
    out = tmp_path / "run.json"
    inferd("perf", "repeat", "--shape", "IN:3", "--concurrency", "2", *SHORT, "--out", out)
    (level,) = json.loads(out.read_text())["levels"]
    assert not level["errors"]
    assert level["time_to_first_token"]["mean"] <= level["mean"]
    assert level["inter_token_latency"]["mean"] > 0
    assert level["output_token_throughput"] == pytest.approx(3 * level["rate"])
    inferd("perf", "fp32", "--shape", "INPUT0:4", "--streaming", *SHORT)


def test_streams_with_a_rate(inferd, server, tmp_path):
    """Guards --streaming with a rate, the wait for a stream included, and with shared memory; decoupled models, too."""
    out = tmp_path / "run.json"
    rate = ["--rate", "200", "--request-distribution", "constant", "--out", out]
    inferd("perf", "fp32", "--shape", "INPUT0:16", "--streaming", *rate, *SHORT)
    assert (level_of(out)["kind"], level_of(out)["errors"]) == ("rate", {})
    assert 5 <= level_of(out)["requests"] <= 60  # in three windows
    region = ["--url", server.unix, "--shared-memory", "system", "--output-shared-memory-size", "64"]
    inferd("perf", "fp32", "--shape", "INPUT0:16", "--streaming", *rate, *SHORT, *region, url=False)
    assert not level_of(out)["errors"]
    inferd("perf", "repeat", "--shape", "IN:3", *rate, *SHORT, *region, url=False)
    assert level_of(out)["inter_token_latency"]["mean"] > 0
    slow = ["--rate", "10", "--max-in-flight", "1", "--warmup", "0", "--measurement-interval", "1000"]
    inferd("perf", "late", "--shape", "INPUT0:4", "--streaming", *slow, "--max-trials", "1", "--out", out)
    assert level_of(out)["max"] > 700_000


def test_streams_that_end(models, tmp_path):
    """Guards that the loss of the server ends a run with streams, and that it is told."""
    out = tmp_path / "run.json"
    command = (sys.executable, "-m", "inferd", "serve", "--model-repository", str(models), "--grpc-port", "0")
    with doors.running(*command, ends_with=-signal.SIGKILL) as server, ThreadPoolExecutor(1) as pool:
        arguments = ["--url", server.address, "--shape", "IN:3", "--measurement-interval", "600000", "--warmup", "0"]
        run = pool.submit(cli.main, ["perf", "repeat", *arguments, "--out", str(out)])
        with grpcclient.InferenceServerClient(server.address) as client:
            while not client.get_inference_statistics("repeat").model_stats[0].execution_count:
                assert not run.done()
        server.kill()
        assert run.result(60) == 1
    assert level_of(out)["errors"] == {"lost": 1}


def level_of(path):
    """The only one of a run."""
    (level,) = json.loads(path.read_text())["levels"]
    return level


@pytest.mark.parametrize(
    "load",
    [
        ["--concurrency", "3"],
        ["--rate", "300", "--num-of-sequences", "3"],
        ["--streaming"],
        ["--streaming", "--rate", "300", "--num-of-sequences", "3"],
    ],
)
def test_sequences(inferd, tmp_path, load):
    """Guards that each sequence has its start, its end, and one request at a time: the server refuses others."""
    out = tmp_path / "run.json"
    more = ["--sequence-length", "5", "--sequence-length-variation", "40", "--sequence-id-range", "7:900000"]
    inferd("perf", "ordered", "--shape", "INPUT0:4", *load, *more, *SHORT, "--out", out)
    level = level_of(out)
    assert not level["errors"]
    assert level["requests"] >= 3
    # all that were begun are ended: the first number is free
    inferd("perf", "ordered", "--shape", "INPUT0:4", "--sequence-id-range", "7:9", "--sequence-length", "1", *SHORT)


@pytest.mark.parametrize(
    "load",
    [
        ["fp16", "--concurrency", "4", "--connections", "2"],
        ["fp16", "--concurrency", "4", "--streaming"],
        ["fp16", "--rate", "2000"],
        ["fp16", "--rate", "2000", "--streaming"],
        ["repeat", "--concurrency", "3"],
        ["repeat", "--periodic-concurrency-range", "2:23:4", "--request-period", "2"],
    ],
)
def test_exactly_so_many_requests(inferd, server, tmp_path, load):
    """Guards --request-count, --warmup-request-count and periods: the server counts what was asked for, the profile has
    each request with its times, its tensors and its answers in the form that genai-perf reads."""
    profile = tmp_path / "profile.json"
    with grpcclient.InferenceServerClient(server.tcp) as client:

        def asked():
            return client.get_inference_statistics(load[0]).model_stats[0].inference_stats.success.count

        before = asked()
        shapes = ["--shape", "INPUT0:4", "--shape", "IN:3", "--profile-export-file", profile]
        inferd("perf", *load, *shapes, "--request-count", "23", "--warmup-request-count", "5")
        assert asked() - before == 23 + 5
    written = json.loads(profile.read_text())
    (experiment,) = written["experiments"]
    assert (written["service_kind"], experiment["experiment"]["mode"] == "request_rate") == ("triton", "--rate" in load)
    assert len(experiment["requests"]) == 23
    for each in experiment["requests"]:
        assert experiment["window_boundaries"][0] <= each["timestamp"] <= each["response_timestamps"][0]
        assert len(each["response_outputs"]) == len(each["response_timestamps"])
    if load[0] == "repeat":
        assert [each["OUT"] for each in experiment["requests"][0]["response_outputs"]] == (
            experiment["requests"][0]["request_inputs"]["IN"]
        )
    else:
        assert all(
            each["response_outputs"] == [{"OUTPUT0": each["request_inputs"]["INPUT0"]}]
            for each in experiment["requests"]
        )


@pytest.mark.parametrize("more", [[], ["--streaming"]])
def test_given_intervals(inferd, tmp_path, more):
    """Guards --request-intervals: requests are due when the file says, in turn."""
    (tmp_path / "gaps").write_text("3000\n1000\n")
    profile = tmp_path / "profile.json"
    arguments = ["--request-intervals", tmp_path / "gaps", "--request-count", "5", "--profile-export-file", profile]
    inferd("perf", "fp32", "--shape", "INPUT0:4", *arguments, *more)
    due = [each["timestamp"] for each in json.loads(profile.read_text())["experiments"][0]["requests"]]
    gaps = [round((after - before) / 1e6) for before, after in itertools.pairwise(due)]
    assert gaps in ([3, 1, 3, 1], [1, 3, 1, 3])
    (tmp_path / "gaps").write_text("0\n")
    assert "one of them above 0" in inferd("perf", "fp32", *arguments, status=2)


@pytest.mark.parametrize("more", [[], ["--streaming"]])
def test_expected_outputs(inferd, tmp_path, more):
    """Guards validation_data: a right model passes, a wrong output is told and is the status 1."""
    data, shape = tmp_path / "data.json", ["--shape", "INPUT0:2", "--request-count", "4", *more]
    said = {
        "data": [{"INPUT0": [1, 2]}, {"INPUT0": [3, 4]}],
        "validation_data": [{"OUTPUT0": [1, 2]}, {"OUTPUT0": [3, 4]}],
    }
    data.write_text(json.dumps(said))
    inferd("perf", "fp32", "--input-data", data, *shape)
    said["validation_data"][1]["OUTPUT0"] = [3, 5]
    data.write_text(json.dumps(said))
    told = inferd("perf", "fp32", "--input-data", data, *shape, status=1)
    assert "'OUTPUT0' is [3.0, 4.0], validation_data says [3.0, 5.0]" in told


def test_a_folder_of_data(inferd, tmp_path):
    """Guards a folder as --input-data: raw tensors, strings by lines, a row for each of the batch."""
    (tmp_path / "INPUT0").write_bytes(np.array([1, 2], np.float32).tobytes())
    (tmp_path / "INPUT1").write_text("one\ntwo\n")
    profile = tmp_path / "profile.json"
    shapes = ["--shape", "INPUT0:2", "--shape", "INPUT1:2", "-b", "2"]
    inferd("perf", "pair", "--input-data", tmp_path, *shapes, "--request-count", "1", "--profile-export-file", profile)
    (request,) = json.loads(profile.read_text())["experiments"][0]["requests"]
    assert request["request_inputs"] == {"INPUT0": [1, 2, 1, 2], "INPUT1": ["one", "two", "one", "two"]}
    (tmp_path / "INPUT1").unlink()
    assert "INPUT1" in inferd("perf", "pair", "--input-data", tmp_path, *shapes, status=2)


def test_goodput(inferd, tmp_path):
    """Guards --goodput: a request counts if no figure exceeds its limit, for streams and unary calls."""
    out = tmp_path / "run.json"
    for load in (["fp32", "--shape", "INPUT0:4"], ["repeat", "--shape", "IN:3"]):
        for limit, good in (("60000", True), ("0.0001", False)):
            inferd("perf", *load, "--request-count", "9", "--goodput", f"request_latency:{limit}", "--out", out)
            assert level_of(out)["goodput"] == pytest.approx(level_of(out)["rate"] if good else 0)
    assert "request_latency only" in inferd("perf", "fp32", "--goodput", "time_to_first_token:1", status=2)
    assert "expected FIGURE" in inferd("perf", "fp32", "--goodput", "ttft:1", status=2)


def test_several_models_at_once(inferd, tmp_path):
    """Guards that each has the load, and a row and a place in the file of its own."""
    out = tmp_path / "run.json"
    told = inferd("perf", "fp32", "fp16", "repeat", "--shape", "INPUT0:4", "--shape", "IN:2", *SHORT, "--out", out)
    assert [line.split()[:2] for line in told.splitlines()[:4]] == [
        ["model", "in"], ["fp32", "1"], ["fp16", "1"], ["repeat", "1"],
    ]  # fmt: skip
    run = json.loads(out.read_text())
    assert run["model"] == "fp32, fp16, repeat"
    assert all(each["requests"] and not each["errors"] for each in run["levels"])
    assert "different ones" in inferd("perf", "fp32", "fp32", status=2)


def test_the_spelling_of_perf_analyzer(inferd):
    """Guards the options of perf_analyzer that have other names here, or mean nothing, and what is refused of them."""
    quiet = ["-i", "gRPC", "--service-kind=triton", "-a", "-v", "--max-threads", "4", "-H", "some-key: some value"]
    given = ["--request-parameter", "a:1:int", "--request-parameter", "b:x:y:string", "--string-data", "hello", "-z"]
    inferd("perf", "-m", "text", "--shape", "INPUT0:1", *quiet, *given, "--request-count", "20", *SHORT)
    assert "expected grpc" in inferd("perf", "-m", "text", "-i", "http", status=2)
    assert "NAME:VALUE:TYPE" in inferd("perf", "text", "--request-parameter", "a:b:int", status=2)


def test_compressed_requests(inferd):
    """Guards --grpc-compression-algorithm: the server reads what it is sent, by unary calls and in streams."""
    arguments = ["fp32", "--shape", "INPUT0:4000", "--input-data", "zero", *SHORT, "--grpc-compression-algorithm"]
    for more in (["gzip"], ["deflate"], ["gzip", "--streaming"]):
        inferd("perf", *arguments, *more)
    assert "nothing to compress" in inferd("perf", *arguments, "gzip", "--shared-memory", "system", status=2)


def test_a_server_that_wants_tls_and_a_header(models, tmp_path, inferd):
    """Guards TLS both ways, and headers, with the native driver: closed loop, open loop, streams."""
    authority = Authority(tmp_path / "tls")
    pair, own = authority.issue("server", "IP:127.0.0.1"), authority.issue("client")
    arguments = ("--grpc-use-ssl", "--grpc-use-ssl-mutual", f"--grpc-server-cert={pair.certificate}",
                 f"--grpc-server-key={pair.key}", f"--grpc-root-cert={authority.root}",
                 "--grpc-restricted-protocol=inference:key=open")  # fmt: skip
    with doors.running_server("native", models, *arguments) as process:
        to = ["--url", process.address, "--root-cert", authority.root, "--client-cert", own.certificate]
        to += ["--client-key", own.key, "--header", "triton-grpc-protocol-key=open"]
        theirs = {"--root-cert": "--ssl-grpc-root-certifications-file", "--client-key": "--ssl-grpc-private-key-file"}
        theirs["--client-cert"] = "--ssl-grpc-certificate-chain-file"
        command = ["perf", "fp32", "--shape", "INPUT0:40000", *SHORT, *to]
        for load in (["--concurrency", "4"], ["--rate", "100"], ["--streaming"]):
            inferd(*command, *load, url=False)
        inferd(*(theirs.get(each, each) for each in command), "--ssl-grpc-use-ssl", url=False)
        assert "calls that failed" in inferd(*command[:-2], url=False, status=1)
        command[command.index(authority.root)] = tmp_path / "none"
        assert "--root-cert" in inferd(*command, url=False, status=1)


@pytest.mark.parametrize("more", [[], ["--streaming"]])
def test_an_interrupt_ends_a_long_window(server, tmp_path, more):
    """Guards ^C: the status 130, a word, no wait for the window's end, and files of what was measured before."""
    command = [sys.executable, "-m", "inferd", "perf", "fp32", "--shape", "INPUT0:4", "--url", server.tcp]
    command += ["--measurement-interval", "3600000", "--warmup", "0", *more]
    command += ["--out", tmp_path / "run.json", "--profile-export-file", tmp_path / "profile.json"]
    with grpcclient.InferenceServerClient(server.tcp) as client:

        def asked():
            return client.get_inference_statistics("fp32").model_stats[0].inference_stats.success.count

        before = asked()
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
            while asked() < before + 2 and process.poll() is None:
                pass
            process.send_signal(signal.SIGINT)
            assert "inferd: cancelled" in process.communicate(timeout=60)[1]
        assert process.returncode == 130
    assert level_of(tmp_path / "run.json")["requests"] > 0
    (experiment,) = json.loads((tmp_path / "profile.json").read_text())["experiments"]
    assert len(experiment["requests"]) == level_of(tmp_path / "run.json")["requests"]


def test_calls_that_fail_are_counted(inferd):
    """Guards the status and the table of a model that refuses what is sent."""
    address = ["--shared-memory", "system", "--output-shared-memory-size", "4"]
    told = inferd("perf", "fp32", "--shape", "INPUT0:16", *address, *SHORT, status=1)
    assert "calls that failed" in told or "shared memory" in told


# ---- plot -----------------------------------------------------------------------------------------------------------


def test_runs_are_drawn(inferd, tmp_path):
    """Guards `plot`: pictures and the page, which stands alone; models of one run by name; and what is no run."""
    pytest.importorskip("matplotlib")
    runs = [tmp_path / "one.json", tmp_path / "two.json"]
    inferd("perf", "fp32", "--shape", "INPUT0:4", "--concurrency", "1:2", *SHORT, "--out", runs[0])
    inferd("perf", "fp32", "fp16", "--shape", "INPUT0:4", *SHORT, "--out", runs[1])
    inferd("plot", *runs, "--out", tmp_path / "x.html", url=False)
    page = (tmp_path / "x.html").read_text()
    assert page.count("<svg") == 6
    assert "<script" not in page
    assert not re.search(r"(src|href)=\"https?:", page)
    assert "one p99" in page
    assert "two fp16 p99" in page
    inferd("plot", runs[0], "--out", tmp_path / "x.png", url=False)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    lost = json.loads(runs[0].read_text())
    for level in lost["levels"]:
        level["requests"] = 0
    (tmp_path / "lost.json").write_text(json.dumps(lost))
    told = inferd("plot", tmp_path / "lost.json", "--out", tmp_path / "x.html", status=2, url=False)
    assert "no request of this run was answered" in told
    (tmp_path / "other.json").write_text("{}")
    assert "expected a file that" in inferd("plot", tmp_path / "other.json", status=2, url=False)


# ---- tune -----------------------------------------------------------------------------------------------------------


def alone(setting):
    """The settings of a search with one model."""
    return Settings((("m", setting),))


class Hill:
    """What a setting gives: the more the nearer it is to the best, and nothing beyond 64 rows."""

    def __call__(self, settings, best):
        setting = settings.of[0][1]
        if setting.batch > 64:
            return Tried(settings, (), 10, "too large")
        rate = 100.0 * min(setting.batch, 64) * min(setting.instances, 3) * (1.2 if setting.delay_us == 300 else 1.0)
        level = types.SimpleNamespace(inferences=rate, p50=rate, p99=rate, mean=0.0)
        return Tried(settings, (level,), 10 * setting.instances)


BATCH = (("m",), "batch")
AXES = [(BATCH, BATCHES), ((("m",), "instances"), list(range(1, 9))), ((("m",), "delay_us"), list(DELAYS_US))]


def test_the_search_finds_the_top_with_few_tries():
    """Guards the search: the best of 432 settings, with less than a fifth of them, and what it shows beside it."""
    told = []
    search = Search(Hill(), told.append, 80)
    best = search.climb(alone(Setting(1, 1, 0, 0)), AXES)
    assert best.setting == alone(Setting(64, 3, 300, 0))
    assert len(told) == len(search.tried) <= 80
    assert search.front()[0] is best
    assert all(each.best for each in search.front())


class Lucky(Hill):
    """A hill whose first measurement of a batch of 16 is far too good."""

    def __init__(self):
        self.before = set()

    def __call__(self, setting, best):
        found = super().__call__(setting, best)
        if setting.value(BATCH) == 16 and setting not in self.before:
            found.best[0].inferences *= 4.2
        self.before.add(setting)
        return found


def test_the_search_is_not_misled_by_one_measurement():
    """Guards that the best few are measured again: one lucky measurement does not win."""
    told = []
    search = Search(Lucky(), told.append, 80)
    lucky = search.climb(alone(Setting(16, 3, 300, 0)), [(BATCH, BATCHES)])
    assert lucky.setting.value(BATCH) == 16
    assert search.settle(lucky).setting.value(BATCH) == 64
    assert len(told) > len(search.tried)


def test_no_throughput_is_more_than_little_allows():
    """Guards that a figure is at most what is in flight divided by its latency, and is called noise if it were more."""
    level = (types.SimpleNamespace(inferences=100_000.0, level=32, mean=240.0),)
    setting = alone(Setting(1, 1, 0, 0))
    assert Tried(setting, level, 0, pace=3.0).rate == pytest.approx(32 / 240e-6)
    assert Tried(setting, level, 0, pace=3.0).noise
    assert Tried(setting, level, 0, pace=0.9).rate == pytest.approx(90_000)
    assert not Tried(setting, level, 0, pace=1.3).noise


def test_a_gain_counts_the_same_for_each_of_several_models():
    """Guards that a fast model is not tuned at the cost of a slow one, and that models of a process share threads."""

    def rate(*inferences):
        levels = [types.SimpleNamespace(inferences=each, level=1, mean=0.0) for each in inferences]
        return Tried(None, tuple(levels), 0).rate

    assert rate(10_000.0, 10.0) == pytest.approx(rate(1_000.0, 100.0))
    assert rate(10_000.0, 20.0) > rate(15_000.0, 10.0)
    assert rate(10_000.0, 0.0) == 0
    configs = {name: pb.ModelConfig(name=name, backend="pytorch", max_batch_size=4) for name in "ab"}
    start = Settings(tuple((name, setting_of(each)) for name, each in configs.items()))
    axes = dict(all_axes(configs, start, Wanted(("a", "b"), Path("models"))))
    assert {names for names, field in axes if field == "threads"} == {("a", "b")}
    changed = start.changed((("a", "b"), "threads"), 2)
    assert [own.threads for _, own in changed.of] == [2, 2]
    assert [own.batch for _, own in changed.changed((("b",), "batch"), 8).of] == [4, 8]


def test_the_search_ends_when_it_may_not_try_more():
    """Guards the limit of tries."""
    search = Search(Hill(), lambda tried: None, 5)
    assert search.climb(alone(Setting(1, 1, 0, 0)), AXES).rate > 100
    assert len(search.tried) == 5


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--max-runs", "0"], "--max-runs, --measurement-interval: expected 1 or more"),
        (["--most-instances", "0"], "--most-instances, --max-runs, --measurement-interval: expected 1 or more"),
        (["--largest-batch", "0"], "--largest-batch, --most-instances"),
        (["--concurrency", "0"], "--concurrency: expected numbers above 0"),
        (["--percentile", "42"], "--percentile: expected 50, 90, 95 or 99, got 42"),
        (["--latency-budget", "nan"], "--latency-budget, --memory-budget: expected 0 or more"),
    ],
)
def test_searches_that_make_no_sense(inferd, arguments, text):
    """Guards the status 2 and a sentence, before a server is started."""
    assert text in inferd("tune", "nobody", *arguments, status=2, url=False)


def test_settings_are_written_as_they_are_read():
    """Guards what `tune` writes: each setting that it tries is the one that its configuration has."""
    config = pb.ModelConfig(name="m", backend="onnxruntime", max_batch_size=8)
    config.dynamic_batching.preferred_batch_size[:] = [8]  # as completion leaves it
    start = setting_of(config)
    assert start == Setting(8, 1, 0, 0)
    tried = [start]
    for name, values in axes_of(config, start, Wanted(("m",), Path("models"))):
        tried += [setting.changed(name, value) for setting in list(tried) for value in values]
    assert {setting.adaptive for setting in tried} == {False, True}
    assert {(4,), (64,)} < {setting.preferred for setting in tried}
    for setting in tried:
        assert setting_of(applied(config, setting)) == setting
        assert all(size < setting.batch for size in setting.preferred)


def test_the_search_goes_on_from_preferred_sizes_that_a_smaller_batch_has_left():
    """Guards models whose configuration has several preferred sizes, of which a smaller batch has no use for all."""
    config = pb.ModelConfig(name="m", backend="identity", max_batch_size=128)
    config.dynamic_batching.max_queue_delay_microseconds = 300
    config.dynamic_batching.preferred_batch_size[:] = [2, 100]
    start = alone(setting_of(config))
    search = Search(Hill(), lambda tried: None, 80)
    best = search.climb(start, all_axes({"m": config}, start, Wanted(("m",), Path("models"))))
    preferred = (("m",), "preferred")
    assert (best.setting.value(BATCH), best.setting.value(preferred)) == (64, (2,))
    assert {(2, 100), (2,), (), (4,)} <= {setting.value(preferred) for setting in search.tried}


class Serving:
    """Stands for a server of `tune`, which loads no batch above 64."""

    def __init__(self, wanted, folder):
        self.serves = None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.unload()

    def is_up(self):
        return True

    def configs(self):
        return {"m": pb.ModelConfig(name="m", backend="identity", max_batch_size=8)}

    def serve(self, configs):
        self.serves = None if configs["m"].max_batch_size > 64 else alone(setting_of(configs["m"]))
        return "" if self.serves else "too large"

    def unload(self):
        self.serves = None


def test_the_best_setting_is_served_on_after_one_that_does_not_load(tmp_path, monkeypatch):
    """Guards that further settings are measured beside it: without that, the machine's speed would decide."""
    monkeypatch.setattr(pair, "Trial", Serving)
    monkeypatch.setattr(Pair, "_tried", lambda self, trial, setting: Hill()(setting, None))
    beside = []
    monkeypatch.setattr(
        Pair, "_ratio", lambda self, first, second: beside.append((first[0].serves, second[0].serves)) or (2, "")
    )
    with Pair(Wanted(("m",), tmp_path), tmp_path) as two:
        start, double = alone(Setting(8, 1, None, 0)), alone(Setting(16, 1, None, 0))
        best = two.measure(start, None)
        assert two.measure(alone(Setting(128, 1, None, 0)), best).problem == "too large"
        assert two.measure(double, best).rate == 2 * best.rate
    assert beside == [(start, double)]


@pytest.mark.long
def test_threads_of_a_whole_process_want_another_server(tmp_path):
    """Guards that TorchScript's threads are varied at all: a process keeps those of the first model that it loads."""
    folder = tmp_path / "models" / "layer"
    (folder / "1").mkdir(parents=True)
    save_script(torch.nn.Linear(2, 2), folder / "1")
    tensor = 'name: "{}__0" data_type: TYPE_FP32 dims: [ 2 ]'
    config = f'backend: "pytorch" max_batch_size: 4 input {{ {tensor.format("I")} }} output {{ {tensor.format("O")} }}'
    (folder / "config.pbtxt").write_text(config)
    with Trial(Wanted(("layer",), tmp_path / "models"), tmp_path / "trial") as trial:
        whole = trial.configs()["layer"]
        start = setting_of(whole)
        assert start.threads == 0
        first = process_of(trial.reach.url)
        assert trial.serve({"layer": applied(whole, replace(start, batch=2))}) == ""
        assert process_of(trial.reach.url) == first
        threaded = applied(whole, replace(start, threads=1))
        assert trial.serve({"layer": threaded}) == ""
        assert process_of(trial.reach.url) != first
    assert not applied(threaded, start).parameters


def test_a_model_is_tuned(tmp_path, capsys):
    """Guards `tune`: a model that takes 5 ms for any batch gets larger ones, and what is written serves.

    Its configuration has a variable, which only the server can read.
    """
    slow = Identity("slow", (("FP32", 1),), max_batch_size=1, parameters={"gather": "true", "delay_us": "5000"})
    config = write(tmp_path / "models", [slow]) / "slow" / "config.pbtxt"
    written = config.read_text().replace("max_batch_size: 1", "max_batch_size: ${MODEL_ROWS:-1}")
    assert "${" in written
    config.write_text(written)
    command = ["tune", "slow", "--model-repository", str(tmp_path / "models"), "--shape", "INPUT0:4"]
    command += ["--concurrency", "32", "--max-runs", "4", "--most-instances", "2", "--measurement-interval", "100"]
    assert cli.main([*command, "--write", "--out", str(tmp_path / "tried.json")]) == 0
    assert re.search(r"best of \d: .*batch (4|8)", capsys.readouterr().out)
    assert len(json.loads((tmp_path / "tried.json").read_text())["tried"]) <= 4
    text = config.read_text()
    assert int(re.search(r"max_batch_size: (\d+)", text)[1]) > 1
    assert config.with_name("config.pbtxt.before-tune").read_text() == written
    assert cli.main(["check", str(tmp_path / "models")]) == 0
    assert cli.main(["tune", "nobody", "--model-repository", str(tmp_path)]) == 2
    assert cli.main(["tune", "slow", "slow", "--model-repository", str(tmp_path / "models")]) == 2


SLOW = {"gather": "true", "delay_us": "1000"}


@pytest.mark.long
def test_an_ensemble_and_another_model_are_tuned(tmp_path, capsys):
    """Guards that the models of an ensemble's steps are tuned under its load, at the same time as another one."""
    models = [Identity(name, (("FP32", 1),), max_batch_size=1, parameters=SLOW) for name in ("first", "second")]
    write(tmp_path / "models", [*models, Identity("plain", (("FP32", 1),), max_batch_size=4)])
    (tmp_path / "models" / "both" / "1").mkdir(parents=True)
    step = """step {{ model_name: "{0}" model_version: -1
      input_map {{ key: "INPUT0" value: "{1}" }} output_map {{ key: "OUTPUT0" value: "{2}" }} }}"""
    (tmp_path / "models" / "both" / "config.pbtxt").write_text(
        'platform: "ensemble" max_batch_size: 1 input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }'
        ' output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }'
        f" ensemble_scheduling {{ {step.format('first', 'x', 'mid')} {step.format('second', 'mid', 'y')} }}"
    )
    command = ["tune", "both", "plain", "--model-repository", str(tmp_path / "models"), "--shape", "INPUT0:4"]
    command += ["--concurrency", "8", "--max-runs", "3", "--largest-batch", "4", "--measurement-interval", "100"]
    assert cli.main([*command, "--write", "--out", str(tmp_path / "tried.json")]) == 0
    told = json.loads((tmp_path / "tried.json").read_text())
    assert told["models"] == ["both", "plain"]
    for each in told["tried"]:
        assert list(each["settings"]) == ["first", "second", "plain"]
        assert [level["model"] for level in each["levels"]] == ["both", "plain"] or each["problem"]
    assert re.search(r"best of \d: .*both [\d.]+, plain [\d.]+ inferences/s", capsys.readouterr().out)
    for name in ("first", "second", "plain"):
        assert "# Changed by `inferd tune`." in (tmp_path / "models" / name / "config.pbtxt").read_text()
    assert cli.main(["check", str(tmp_path / "models")]) == 0


ONLY_ONCE = """
import fcntl
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, args):
        self.room = open({lock!r}, "w")
        fcntl.flock(self.room, fcntl.LOCK_EX | fcntl.LOCK_NB)
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", each.inputs()[0].as_numpy())]) for each in requests]
"""


@pytest.mark.long
def test_a_model_is_tuned_that_has_room_only_once(tmp_path, capsys):
    """Guards that a model that cannot be served by two servers side by side is measured by one after the other."""
    python_model(tmp_path / "models" / "single", ONLY_ONCE.format(lock=str(tmp_path / "lock")))
    command = ["tune", "single", "--model-repository", str(tmp_path / "models"), "--concurrency", "4"]
    command += ["--max-runs", "2", "--most-instances", "1", "--measurement-interval", "50"]
    assert cli.main([*command, "--out", str(tmp_path / "tried.json")]) == 0
    assert "best of 2: " in capsys.readouterr().out
    assert not any(each["problem"] for each in json.loads((tmp_path / "tried.json").read_text())["tried"])


KILLER = """
import json, os, signal
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, args):
        self.kills = json.loads(args["model_config"])["max_batch_size"] == 2
    def execute(self, requests):
        if self.kills:
            os.kill({server}, signal.SIGKILL)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", each.inputs()[0].as_numpy())]) for each in requests]
"""
ABOVE = """
def above(process):
    while b"serve" not in open(f"/proc/{process}/cmdline", "rb").read():
        process = int(open(f"/proc/{process}/stat").read().rsplit(")", 1)[1].split()[1])
    return process
"""


def python_model(folder, text):
    """A model in Python with batches."""
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(text)
    config = 'backend: "python" max_batch_size: 1 input { name: "IN" data_type: TYPE_FP32 dims: [ 2 ] }'
    config += ' output { name: "OUT" data_type: TYPE_FP32 dims: [ 2 ] } instance_group { count: 1 kind: KIND_CPU }'
    (folder / "config.pbtxt").write_text(config)


@pytest.mark.long
def test_a_setting_that_ends_the_server_is_only_a_bad_one(tmp_path, capsys):
    """Guards that `tune` goes on with another server, and measures further settings."""
    python_model(tmp_path / "models" / "killer", ABOVE + KILLER.format(server="above(os.getppid())"))
    command = ["tune", "killer", "--model-repository", str(tmp_path / "models"), "--concurrency", "1"]
    command += ["--max-runs", "3", "--most-instances", "1", "--measurement-interval", "50"]
    assert cli.main([*command, "--out", str(tmp_path / "tried.json")]) == 0
    tried = json.loads((tmp_path / "tried.json").read_text())["tried"]
    tried = {each["settings"]["killer"]["batch"]: each for each in tried}
    assert tried[2]["problem"]
    assert not tried[1]["problem"]
    assert not tried[4]["problem"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_of_an_ended_search(tmp_path, number):
    """Guards that `tune`, ended while its server starts, leaves neither the server nor its folder."""
    python_model(tmp_path / "models" / "m", KILLER.format(server="os.getpid()"))
    left = Path(tempfile.mkdtemp(dir="/tmp"))  # tmp_path is too long for the socket
    command = [sys.executable, "-m", "inferd", "tune", "m", "--model-repository", str(tmp_path / "models")]
    process = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(left)}, cwd=ROOT, start_new_session=True)
    try:
        while not list(left.glob("inferd-tune-*/0/tune.sock")):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait(120) == cli.CANCELLED
    finally:
        process.kill()
        process.wait()
    assert not list(left.iterdir())
    assert not [each for each in Path("/proc").glob("[0-9]*/cmdline") if str(left) in text_of(each)]
    left.rmdir()


def text_of(path):
    """The text of a file of a process; empty if that has ended."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


# ---- the others -----------------------------------------------------------------------------------------------------


def test_origins_of_options(inferd, tmp_path, monkeypatch):
    """Guards `config show`: each value, and where it is from; secrets are left out."""
    (tmp_path / "options.toml").write_text("log-verbose = 1\ngrpc-port = 7\n")
    monkeypatch.setenv("INFERD_METRICS_PORT", "9")
    command = ["config", "show", "--config", tmp_path / "options.toml", "--model-repository", "/m", "--grpc-port", "5"]
    told = inferd(*command, "--grpc-restricted-protocol", "health:key=secret", url=False)
    lines = {line.split()[0]: line for line in told.splitlines()}
    assert lines["grpc-port"].split(maxsplit=2)[1:] == ["5", "the command line"]
    assert lines["metrics-port"].split(maxsplit=2)[1:] == ["9", "INFERD_METRICS_PORT"]
    assert lines["log-verbose"].endswith(f"the file {tmp_path / 'options.toml'}")
    assert lines["grpc-address"].endswith("the default")
    assert "secret" not in told


def test_checks_for_machines(tmp_path, capsys):
    """Guards `check --format json` and `github`."""
    tmp_path = tmp_path / "with a blank"
    (tmp_path / "wrong" / "1").mkdir(parents=True)
    (tmp_path / "wrong" / "config.pbtxt").write_text('backend: "identity"\nmax_batch_sizes: 1\n')
    assert cli.main(["check", str(tmp_path), "--format", "json"]) == 1
    (report,) = json.loads(capsys.readouterr().out)
    assert (report["model"], report["ok"]) == ("wrong", False)
    assert report["problems"][0]["file"].endswith("wrong/config.pbtxt")
    assert report["problems"][0]["line"] == 2
    assert cli.main(["check", str(tmp_path), "--format", "github"]) == 1
    assert re.match(
        r"::error file=\S+/with a blank/wrong/config.pbtxt,line=2.*::wrong: .*max_batch_sizes", capsys.readouterr().out
    )


def test_completion_and_help():
    """Guards that the program tells what it can do, and imports no client for it."""
    printed = {
        shell: subprocess.run(
            [sys.executable, "-m", "inferd", "completion", shell], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        for shell in ("bash", "zsh")
    }
    asked = "COMP_WORDS=(inferd models de); COMP_CWORD=2; _inferd; echo ${COMPREPLY[@]}"
    done = subprocess.run(["bash", "-c", printed["bash"] + asked], capture_output=True, text=True, check=True)
    assert done.stdout == "describe\n"
    assert "compdef _cyclopts_inferd inferd" in printed["zsh"].splitlines()[-1]
    code = "import sys, inferd.server.cli; print(sorted({'numpy', 'grpc', 'inferd_client'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


HOSTILE = "a\x1b]0;title\x07\x9b31m\u202efailed"


def test_texts_of_a_server_do_nothing_to_the_terminal():
    """A table shows names and reasons that a server sent: neither its escape sequences nor its bidirectional marks."""
    shown = table(["model", "reason"], [["a", HOSTILE]])
    assert shown.replace("\n", "").isprintable()


class Hostile(grpc.GenericRpcHandler):
    """Refuses each call with a text that changes a terminal."""

    def service(self, handler_call_details):
        return grpc.unary_unary_rpc_method_handler(lambda _, context: context.abort(grpc.StatusCode.INTERNAL, HOSTILE))


def test_errors_of_a_server_do_nothing_to_the_terminal(inferd):
    server = grpc.server(ThreadPoolExecutor(1), handlers=(Hostile(),))
    url = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        for command in (["health", "--url", url], ["top", f"grpc://{url}", "--once"], ["models", "ls", "--url", url]):
            told = inferd(*command, url=False, status=1)
            assert "INTERNAL" in told
            assert told.replace("\n", "").isprintable(), told
    finally:
        server.stop(None)
