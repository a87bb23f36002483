"""Logs: their forms, their file, what slow requests and the access log say, and that nobody waits for a writer."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from inferd.server.observe import writer as writing
from inferd.server.observe.lines import LineFormatter
from inferd.server.observe.writer import LogWriter
from inferd_client.pb import grpc_service_pb2 as pb
from tests.conformance import doors, raw
from tests.observe.test_metrics import DECOUPLED, IDENTITY, tensor, triton, write
from tests.waiting import wait_until

DELAYED = IDENTITY + 'parameters { key: "delay_us" value { string_value: "20000" } }\n'


def record(message, **extra):
    made = logging.LogRecord("inferd.x", logging.WARNING, "", 0, message, None, None)
    made.created = 0.25
    for name, value in extra.items():
        setattr(made, name, value)
    return made


def test_the_forms_of_lines():
    pid = os.getpid()
    assert LineFormatter("default").format(record("x\ny")) == f'W0101 00:00:00.250000 {pid} inferd.x] "x\\ny"'
    assert LineFormatter("ISO8601").format(record("x")) == f'1970-01-01T00:00:00Z W {pid} inferd.x] "x"'
    line = json.loads(LineFormatter("json").format(record("x", fields={"model": "m\n\x7f\u202e"})))
    assert line == {
        "time": "1970-01-01T00:00:00.250000Z",
        "level": "warning",
        "pid": pid,
        "logger": "inferd.x",
        "message": "x",
        "model": "m\n\x7f\u202e",
    }
    assert LineFormatter("json").format(record("\x7f\u202e\x85")).isprintable()


def test_only_a_terminal_gets_colours():
    assert "\x1b" in LineFormatter("default", coloured=True).format(record("x"))
    assert "\x1b" not in LineFormatter("json", coloured=True).format(record("x"))


def test_whoever_logs_does_not_wait_for_the_writer_and_what_is_left_out_is_counted(tmp_path):
    """The file is a pipe that nobody reads until the queue has overflowed."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDWR)
    writer = LogWriter(pipe, most=10)
    writer.setFormatter(LineFormatter("default"))
    for number in range(1000):
        writer.handle(record("x" * 1000 + str(number)))
    assert writer.lost > 0
    read, lines = b"", []
    while not any(b"were left out" in line for line in lines):
        read += os.read(end, 1 << 16)
        lines = read.split(b"\n")
        writer.handle(record("more"))
    assert b"log lines were left out: the writer did not keep up" in read
    closing = threading.Thread(target=writer.close)
    closing.start()
    while closing.is_alive():
        os.set_blocking(end, False)
        try:
            os.read(end, 1 << 16)
        except BlockingIOError:
            closing.join(0.01)
    os.close(end)


def test_a_lack_of_memory_costs_lines_and_nothing_else(tmp_path, monkeypatch):
    writer = LogWriter(tmp_path / "log")
    writer.setFormatter(LineFormatter("default"))

    def exhausted(*_):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(writing, "write_all", exhausted)
        writer.handle(record("one"))
        writer.flush()
    writer.handle(record("two"))
    writer.close()
    assert writer.lost == 1
    assert (tmp_path / "log").read_text().splitlines()[-1].endswith('"two"')


def test_a_full_disk_costs_lines_and_nothing_else(tmp_path):
    """The writer goes on in the next file, says what is missing, and no line is glued to a part of another."""
    path, full, good = tmp_path / "log", Path("/dev/full"), tmp_path / "good"
    path.symlink_to(full)
    writer = LogWriter(path)
    writer.setFormatter(LineFormatter("default"))
    writer.handle(record("one"))
    writer.flush()
    assert writer.lost == 1
    path.unlink()
    path.symlink_to(good)
    writer.reopen()
    writer.handle(record("two"))
    writer.close()
    missing, line = good.read_text().splitlines()
    assert "1 log lines were left out" in missing
    assert line.endswith('"two"')


def test_arguments_that_do_not_fit_their_text_disturb_nobody_who_logs(tmp_path):
    """The mistake is of a line in some library; what stands in it is written all the same."""
    path = tmp_path / "log"
    writer = LogWriter(path)
    writer.setFormatter(LineFormatter("default"))
    unfit = record("%d of %s")
    unfit.args = ("two",)
    writer.handle(unfit)
    writer.close()
    assert "%d of %s ('two',)" in path.read_text()


def test_a_line_that_was_cut_short_is_ended_before_the_next(tmp_path):
    path = tmp_path / "log"
    writer = LogWriter(path)
    writer.setFormatter(LineFormatter("default"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        writer.handle(record("x" * 1000))
        writer.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    writer.handle(record("whole"))
    writer.close()
    part, missing, whole = path.read_text().splitlines()
    assert len(part) == 100
    assert "1 log lines were left out" in missing
    assert whole.endswith('"whole"')


def test_a_pipe_that_nobody_reads_and_a_folder_are_no_log_files(tmp_path):
    """Opening the former waits for a reader, and so the server would."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="a pipe without a reader"):
        LogWriter(tmp_path / "pipe")
    with pytest.raises(IsADirectoryError):
        LogWriter(tmp_path)


def test_a_file_that_was_moved_away_is_made_anew_at_sighup(tmp_path):
    root = write(tmp_path / "models", plain=IDENTITY)
    file = tmp_path / "log"
    command = (sys.executable, "-m", "inferd", "serve", "--model-repository", str(root), "--grpc-port", "0")
    address = tmp_path / "socket"
    process = subprocess.Popen([*command, "--grpc-address", f"unix:{address}", "--log-file", str(file)], cwd=doors.ROOT)
    try:
        with triton.InferenceServerClient(f"unix:{address}") as client:
            wait_until(client.is_server_ready, "the server is not ready", triton.InferenceServerException)
            file.rename(tmp_path / "log.1")
            process.send_signal(signal.SIGHUP)
            client.update_log_settings({"log_verbose_level": 1})

            def written():
                client.infer("plain", [tensor()])
                return file.exists() and "inferd.batch" in file.read_text()

            wait_until(written)
            with pytest.raises(triton.InferenceServerException, match="can not be updated"):
                client.update_log_settings({"log_file": "elsewhere"})
            assert client.get_log_settings(as_json=True)["settings"]["log_file"]["string_param"] == str(file)
    finally:
        process.terminate()
        assert process.wait(60) == 0
    assert "Started GRPCInferenceService" in (tmp_path / "log.1").read_text()


def lines_of(process, logger):
    return [found for line in process.lines if line.startswith("{") and (found := json.loads(line))["logger"] == logger]


def test_requests_are_logged_where_that_is_asked_for(tmp_path):
    root = write(tmp_path / "models", plain=IDENTITY, slow=DELAYED)
    arguments = ("--log-format", "json", "--access-log", "2", "--slow-request-ms", "10")
    with doors.running_server("native", root, *arguments) as process, doors.connected(process) as client:
        for number in range(4):
            client.infer("plain", [tensor(2)], request_id=f'id "{number}"\n')
        client.infer("slow", [tensor()], request_id="late")
        with pytest.raises(triton.InferenceServerException):
            client.infer("nobody", [tensor()])
    access = lines_of(process, "inferd.access")
    assert [line["request_id"] for line in access[:2]] == ['id "1"\n', 'id "3"\n']
    assert len(access) == 3
    line = access[0]
    assert f" request_id={json.dumps(line['request_id'])} " in line["message"], "it cannot pass for other fields"
    assert (line["model"], line["version"], line["status"], line["method"]) == ("plain", 1, "OK", "ModelInfer")
    assert line["peer"].startswith("ipv4:127.0.0.1:")
    assert line["batch_size"] == 2
    assert line["received_bytes"] > 0
    assert line["sent_bytes"] == 32
    assert 0 <= line["queue_us"] + line["compute_us"] <= line["total_us"]
    assert access[2]["status"] == "NOT_FOUND"
    [slow] = [line for line in lines_of(process, "inferd.slow") if line["request_id"] == "late"]
    assert slow["level"] == "warning"
    assert slow["total_us"] >= 20_000


@pytest.fixture(scope="module")
def logging_server(tmp_path_factory):
    root = write(tmp_path_factory.mktemp("models"), stream=DECOUPLED, slow=DELAYED.replace("20000", "500000"))
    with doors.running_server("native", root, "--log-format", "json", "--access-log", "1") as process:
        yield process


def accesses(process, model, count):
    """The lines of calls of the model, when there are so many."""

    def found():
        return [line for line in lines_of(process, "inferd.access") if line["model"] == model]

    wait_until(lambda: len(found()) >= count)
    return found()


def test_responses_of_a_stream_are_counted_with_their_bytes(logging_server):
    done = threading.Semaphore(0)
    with doors.connected(logging_server) as client:
        client.start_stream(lambda result, error: done.release())
        client.async_stream_infer("stream", [tensor(3)], enable_empty_final_response=True)
        for _ in range(4):
            assert done.acquire(timeout=30)
        client.stop_stream()
    [line] = accesses(logging_server, "stream", 1)
    assert (line["method"], line["status"]) == ("ModelStreamInfer", "OK")
    assert (line["responses"], line["sent_bytes"]) == (3, 3 * 2 * 8)


def test_a_request_whose_time_is_over_has_exceeded_its_deadline(logging_server):
    """The client waits for what the server says, instead of giving up itself."""
    message = pb.ModelInferRequest(model_name="slow", raw_input_contents=[bytes(16)])
    message.inputs.add(name="x", datatype="INT64", shape=(1, 2))
    with raw.Client(logging_server.address) as client:
        path, asked = "/inference.GRPCInferenceService/ModelInfer", message.SerializeToString()
        assert client.call(path, asked, grpc_timeout="50m").status == 4
        assert client.call(path, asked).status == 0  # the only instance is done with the first one, too
    assert [line["status"] for line in accesses(logging_server, "slow", 2)] == ["DEADLINE_EXCEEDED", "OK"]


def test_json_is_one_of_the_forms_that_log_settings_takes(logging_server):
    with doors.connected(logging_server) as client:
        for form in ("default", "json"):
            settings = client.update_log_settings({"log_format": form}, as_json=True)["settings"]
            assert settings["log_format"]["string_param"] == form
        with pytest.raises(triton.InferenceServerException, match="invalid argument for log_format, got: xml"):
            client.update_log_settings({"log_format": "xml"})
