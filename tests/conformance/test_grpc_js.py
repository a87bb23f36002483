"""grpc-js, a gRPC and HTTP/2 stack that shares nothing with C core or libnghttp2's session.

Its packages are those that `package-lock.json` names, installed beside it on the first run.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest

from tests.conformance.interop import PROTO

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "clients" / "js"


@pytest.fixture(scope="module")
def node():
    """The path of node, with the packages in place."""
    found, npm = shutil.which("node"), shutil.which("npm")
    if not (found and npm):
        warnings.warn("node or npm is not installed: grpc-js is NOT tested", stacklevel=1)
        pytest.skip("node or npm is not installed")
    if not (FOLDER / "node_modules" / "@grpc" / "grpc-js").exists():
        command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        installed = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=240, check=False)
        if installed.returncode:
            warnings.warn(f"npm ci failed: grpc-js is NOT tested\n{installed.stderr}", stacklevel=1)
            pytest.skip("npm ci failed")
    return found


def test_unary_calls_streams_errors_and_deadlines_work(node, server):
    command = [node, FOLDER / "client.js", server, ROOT / "proto"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert report["ready"] is True
    assert report["unary"] == [1, 2, 3]
    assert report["large"] == 300_000
    assert report["compressed"] == 300_000
    assert report["parallel"] is True
    assert report["stream"] == [
        ["first", ""],
        ["wrong", "Request for unknown model: 'nothing' is not found"],
        ["last", ""],
    ]
    assert report["error"] == {"code": 5, "details": "Request for unknown model: 'nothing' is not found"}
    assert report["special"] == {"code": 5, "details": "Request for unknown model: '\u2603 % \n' is not found"}
    assert report["deadline"]["code"] == 4


def test_interop(node, hosted):
    """gRPC's interop cases (see `interop`); each tells "ok" or what it found. With C core: test_generic."""
    command = [node, FOLDER / "interop.js", hosted, PROTO]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert len(report) == 17
    assert set(report.values()) == {"ok"}, report
