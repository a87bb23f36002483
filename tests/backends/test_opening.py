"""Guards that frameworks' libraries are in memory before Python imports them, and that the import then works; and that
a framework is imported before the server serves where the operator wants that."""

import subprocess
import sys
from pathlib import Path

import pytest

from inferd.backends.api import BackendError
from inferd.backends.loader import BUILTIN, BackendLoader
from inferd.backends.opening import open_libraries
from tests.conformance.doors import running_server

PROGRAM = """
import sys
from inferd.backends.loader import BUILTIN
from inferd.backends.opening import open_libraries
entry = BUILTIN[sys.argv[1]]
open_libraries(entry.requires, entry.libraries)
assert entry.requires not in sys.modules
print(open("/proc/self/maps").read())
__import__(entry.requires)
"""


@pytest.mark.parametrize(
    ("backend", "library"), [("pytorch", "libtorch_cpu.so"), ("onnxruntime", "onnxruntime_pybind11_state")]
)
def test_libraries_are_opened_before_the_import(backend, library):
    pytest.importorskip(BUILTIN[backend].requires)
    ran = subprocess.run([sys.executable, "-c", PROGRAM, backend], capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    assert library in ran.stdout


def test_what_is_not_there_is_left_to_the_import():
    open_libraries("no_such_package", ("lib/*.so",))
    open_libraries("wave", ("*.so", "nothing"))


def test_a_framework_is_imported_before_the_server_serves(tmp_path):
    pytest.importorskip("onnxruntime")
    options = ("--model-control-mode=explicit", "--backend-config=onnxruntime,preload=true")
    with running_server("native", tmp_path, *options) as process:
        assert "onnxruntime_pybind11_state" in Path(f"/proc/{process.pid}/maps").read_text()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("identity", "perhaps", "--backend-config=identity: parameter 'preload' is 'perhaps', expected true or false"),
        ("", "true", "parameter 'preload' is 'true', expected with a backend's name: BACKEND,preload=true"),
        ("nosuch", "true", "unable to find backend 'nosuch'"),
    ],
)
def test_what_cannot_be_imported_beforehand_is_told(name, value, said):
    with pytest.raises(BackendError, match=said):
        BackendLoader({name: {"preload": value}}).preload()


def test_a_framework_that_does_not_import_is_told(monkeypatch):
    def import_framework(package):
        raise OSError("libgomp.so.1: cannot open shared object file")

    pytest.importorskip("onnxruntime")
    monkeypatch.setattr("inferd.backends.loader.import_framework", import_framework)
    with pytest.raises(BackendError, match=r"backend 'onnxruntime': onnxruntime does not import: OSError: libgomp"):
        BackendLoader({"onnxruntime": {"preload": "true"}}).preload()
