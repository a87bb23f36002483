"""How the server starts: what is wrong is told before models are loaded, and what it loads while it does."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from tests import forkserver
from tests.conformance import doors

MODEL = """
backend: "python"
input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
WAITS = """
import time

class TritonPythonModel:
    def initialize(self, args):
        print("initializing", flush=True)
        time.sleep(600)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return forkserver.run("inferd", "serve", *arguments)


@pytest.fixture
def slow(tmp_path):
    """A repository with a model that takes minutes to load."""
    (tmp_path / "models/slow/1").mkdir(parents=True)
    (tmp_path / "models/slow/config.pbtxt").write_text(MODEL)
    (tmp_path / "models/slow/1/model.py").write_text(WAITS)
    return str(tmp_path / "models")


def test_a_port_in_use_is_told_before_models_are_loaded(slow):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run("--model-repository", slow, "--grpc-port", str(port))
    assert ended.returncode == 1
    assert f"Socket '127.0.0.1:{port}' already in use: choose another with --grpc-port" in ended.stderr
    assert "loading" not in ended.stderr


def test_a_port_of_metrics_in_use_is_told_before_models_are_loaded(slow):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run("--model-repository", slow, "--grpc-port=0", "--metrics-port", str(port))
    assert ended.returncode == 1
    assert (
        f"metrics cannot be served at 127.0.0.1:{port}: Address already in use; choose another with --metrics-address"
        in ended.stderr
    )
    assert "loading" not in ended.stderr


def test_a_socket_that_cannot_be_made_is_told_before_models_are_loaded(slow, tmp_path):
    ended = run("--model-repository", slow, "--grpc-address", f"unix:{tmp_path}/nowhere/socket")
    assert ended.returncode == 1
    assert "nowhere/socket" in ended.stderr
    assert "loading" not in ended.stderr


def test_a_model_that_is_not_there_is_named_with_what_is(slow):
    ended = run(
        "--model-repository", slow, "--model-control-mode=explicit", "--load-model=slo", "--grpc-port=0",
    )  # fmt: skip
    assert ended.returncode == 1
    assert "failed to load 'slo', failed to poll from model repository: it is in no repository: " in ended.stderr
    assert f"{slow} has slow" in ended.stderr
    assert "1 of the models could not be loaded: slo; --exit-on-error=false" in ended.stderr


def test_a_repository_without_models_is_said(tmp_path):
    with doors.running_server("native", tmp_path) as process:
        assert process.says(f"there is no model in {tmp_path}")


def test_loading_is_told_and_a_table_follows(repository):
    with doors.running_server("native", repository, "--log-verbose=1") as process:
        text = "\n".join(process.lines)
    assert re.search(r'"loading \'simple\' version 1"', text)
    assert re.search(r'"model +version +status +seconds +instances"', text)
    assert re.search(r'"simple +1 +READY +\d+\.\d\d +1 on CPU"', text)
    assert '"--grpc-port=0"' in text


def test_a_second_signal_ends_a_load_at_once(slow):
    process = doors.Process(sys.executable, "-m", "inferd", "serve", "--model-repository", slow, "--grpc-port=0")
    process.says("initializing")
    process.interrupt(signal.SIGINT)
    process.says("a second signal ends the process at once")
    process.interrupt_until_it_ends(signal.SIGINT)
    assert process.wait() == 128 + signal.SIGINT
    assert not any("Exit timeout expired" in line for line in process.lines)


def test_a_load_that_outlasts_the_exit_timeout_ends_like_the_signal(slow):
    process = doors.Process(
        sys.executable, "-m", "inferd", "serve", "--model-repository", slow, "--grpc-port=0", "--exit-timeout-secs=0"
    )
    process.says("initializing")
    process.terminate()
    assert process.wait() == 128 + signal.SIGTERM
    assert any("Exit timeout expired" in line for line in process.lines)


@pytest.fixture
def manager(tmp_path, monkeypatch):
    """The socket of a service manager, which the server's environment names."""
    path = f"\0inferd-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(path)
        listener.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", path.replace("\0", "@"))
        yield listener


def heard(manager, wanted):
    """Wait for one of these messages; how a load goes on, which is told every ten seconds, does not count."""
    while (said := manager.recv(1000).decode()) not in wanted:
        assert said.startswith("STATUS=after"), said
    return said


READY, STOPPING, ALIVE = "READY=1\nSTATUS=serving", "STOPPING=1\nSTATUS=stopping", "WATCHDOG=1"


def test_the_service_manager_hears_when_the_server_is_ready_alive_and_stopping(manager, repository, monkeypatch):
    """Guards what systemd expects of a unit with `Type=notify` and a watchdog."""
    monkeypatch.setenv("WATCHDOG_USEC", "100000")
    with doors.running_server("native", repository) as process:
        heard(manager, {READY})
        with socket.create_connection(("127.0.0.1", int(process.address.rpartition(":")[2]))):
            pass  # it listens by now
        heard(manager, {ALIVE})
        heard(manager, {ALIVE})
        process.terminate()
        while heard(manager, {ALIVE, STOPPING}) == ALIVE:
            pass


def test_another_process_s_watchdog_is_left_alone(manager, repository, monkeypatch):
    """A wrapper's, which has started the server."""
    monkeypatch.setenv("WATCHDOG_USEC", "1000")
    monkeypatch.setenv("WATCHDOG_PID", "1")
    with doors.running_server("native", repository):
        heard(manager, {READY})
    heard(manager, {STOPPING})
