"""What the build says of an interpreter that it is not for."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FREE_THREADED = """
import runpy, sys, sysconfig
sysconfig.get_config_vars()["Py_GIL_DISABLED"] = 1
sys.argv = ["setup.py", "-q", "build_ext"]
runpy.run_path("setup.py")
"""


def test_free_threaded_interpreters_are_refused() -> None:
    """Guards that a build without the global lock ends before anything is compiled, with a sentence."""
    done = subprocess.run([sys.executable, "-c", FREE_THREADED], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr.startswith("inferd needs an interpreter with the global interpreter lock")
