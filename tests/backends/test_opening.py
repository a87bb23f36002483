"""Guards that frameworks' libraries are in memory before Python imports them, and that the import then works."""

import subprocess
import sys

import pytest

from backends.loader import BUILTIN
from backends.opening import open_libraries

PROGRAM = """
import sys
from backends.loader import BUILTIN
from backends.opening import open_libraries
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
