"""Guards how the CUDA driver is found: without one nothing breaks, and what is missing is named."""

import os
import subprocess
import sys

import pytest

from tests import gpu_stub

PROGRAM = """
import sys
from inferd._native.cuda import device, driver
assert not driver.is_loaded() and driver.device_count() == 0
for attempt in range(2):
    try:
        driver.load(*sys.argv[1:])
        print("loaded", driver.version(), driver.device_count())
    except driver.CudaUnavailable as error:
        print(error)
try:
    device.device(0)
    print("a device")
except driver.CudaUnavailable as error:
    print(error)
"""


# sanitizers' libraries have to be there before the interpreter starts
KEPT = {name: os.environ[name] for name in ("LD_PRELOAD", "ASAN_OPTIONS", "TSAN_OPTIONS") if name in os.environ}


def loaded(*arguments, stub=""):
    """What each of two attempts to load says, then what a device says, in a process of its own."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={"CUDA_STUB": stub, **KEPT},
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def test_driver_is_loaded_once():
    assert loaded(gpu_stub.library(), stub="devices=3") == ["loaded (13, 0) 3", "loaded (13, 0) 3", "a device"]


def test_no_driver_is_said_each_time(tmp_path):
    missing = tmp_path / "libcuda.so.1"
    first, second, device = loaded(missing)
    assert first.startswith(f"no CUDA driver: {missing}: cannot open")
    assert first == second == device


def test_driver_without_a_function_names_it(tmp_path):
    old = tmp_path / "libold.so"
    source = tmp_path / "old.c"
    source.write_text("int cuInit(unsigned f) { return (int)f; } int cuDriverGetVersion(int *v) { return *v = 0; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(old), str(source)], check=True)
    first, *_ = loaded(old)
    assert first == f"the CUDA driver in '{old}' has no function cuGetErrorName: CUDA 12.0 or newer is needed"


def test_driver_without_a_device_says_why():
    first, *_ = loaded(gpu_stub.library(), stub="devices=0")
    assert "cuInit: CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected" in first


def test_another_driver_is_not_loaded_beside_the_first():
    from inferd._native.cuda import driver

    gpu_stub.load()
    with pytest.raises(driver.CudaUnavailable, match="was loaded from"):
        driver.load("/nowhere/libcuda.so.1")
    assert driver.is_loaded()
