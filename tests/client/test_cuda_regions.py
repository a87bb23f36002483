"""CUDA shared memory of inferd_client, in a process of its own, with a server; both on the stub driver."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import gpu_stub

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
backend: "identity"
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 100 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 100 ] }
instance_group { kind: KIND_GPU gpus: [ 1 ] }
"""
PROGRAM = """
import json, sys
import numpy as np
import inferd_client.grpc as grpcclient
import inferd_client.utils as utils
import inferd_client.utils.cuda_shared_memory as cudashm

SIZE = 2 * 100 * 4
found = {}


def refused(function, *arguments):
    try:
        function(*arguments)
    except cudashm.CudaSharedMemoryException as error:
        return str(error)


with grpcclient.InferenceServerClient(sys.argv[1]) as client:
    given = np.arange(200, dtype=np.float32).reshape(2, 100)
    there, back = (cudashm.create_shared_memory_region(name, SIZE, 1) for name in ("there", "back"))
    for region, name in ((there, "there"), (back, "back")):
        client.register_cuda_shared_memory(name, cudashm.get_raw_handle(region), 1, SIZE)
    wanted = [grpcclient.InferRequestedOutput("OUTPUT0")]
    wanted[0].set_shared_memory("back", SIZE)
    asked = [grpcclient.InferInput("INPUT0", [2, 100], "FP32").set_shared_memory("there", SIZE)]
    for fill in (
        lambda: cudashm.set_shared_memory_region(there, [given[:1], given[1:]]),
        lambda: cudashm.set_shared_memory_region_from_dlpack(there, [given * 2]),
    ):
        fill()
        client.infer("m", asked, outputs=wanted)
        found.setdefault("infer", []).append(float(cudashm.get_contents_as_numpy(back, np.float32, [2, 100]).sum()))
    capsule_of = cudashm.as_shared_memory_tensor(there, "FP32", [2, 100])
    cudashm.set_shared_memory_region_from_dlpack(back, [capsule_of])
    found["device to device"] = float(cudashm.get_contents_as_numpy(back, np.float32, [2, 100]).sum())
    found["device"] = list(capsule_of.__dlpack_device__())
    words = np.array([b"one", b"", b"three"], dtype=object)
    cudashm.set_shared_memory_region(back, [utils.serialize_byte_tensor(words)])
    found["words"] = [each.decode() for each in cudashm.get_contents_as_numpy(back, np.object_, [3])]
    found["too much"] = refused(cudashm.set_shared_memory_region, back, [given, given])
    found["no arrays"] = refused(cudashm.set_shared_memory_region, back, given)
    found["no device"] = refused(cudashm.create_shared_memory_region, "x", 64, 7)
    kept = capsule_of.__dlpack__()
    found["allocated"] = len(cudashm.allocated_shared_memory_regions())
    client.unregister_cuda_shared_memory()
    for region in (there, back):
        cudashm.destroy_shared_memory_region(region)
    del kept
    found["destroyed"] = refused(cudashm.get_contents_as_numpy, back, np.float32, [1])
    with client.shared({"INPUT0": given, "OUTPUT0": ((2, 100), "float32")}, device=1) as region:
        client.infer("m", [region.input("INPUT0")], outputs=[region.output("OUTPUT0")])
        found["shared"] = float(region.numpy("OUTPUT0").sum())
        found["view"] = list(region["OUTPUT0"].__dlpack_device__())
    found["left"] = len(cudashm.allocated_shared_memory_regions())
    found["registered"] = len(client.get_cuda_shared_memory_status().regions)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory):
    """The environment of a client whose CUDA driver is the stub."""
    pytest.importorskip("cuda.bindings")
    folder = tmp_path_factory.mktemp("cuda")
    (folder / "libcuda.so.1").symlink_to(gpu_stub.library())
    return {**os.environ, "LD_LIBRARY_PATH": str(folder), "CUDA_STUB": "devices=2", "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def served(stub, tmp_path_factory):
    """The unix socket of a server with two GPUs."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "models" / "m" / "1").mkdir(parents=True)
    (folder / "models" / "m" / "config.pbtxt").write_text(CONFIG)
    command = [sys.executable, "-m", "inferd", "serve", "--model-repository", str(folder / "models")]
    command += ["--grpc-address", f"unix:{folder}/socket", "--cuda-driver", str(gpu_stub.library())]
    report = folder / "report"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**stub, "CUDA_STUB_REPORT": str(report)}, stdout=log, stderr=log
        )
    wait = [sys.executable, "-m", "inferd", "health", "--url", f"unix:{folder}/socket"]
    try:
        while process.poll() is None and subprocess.run(wait, cwd=ROOT, capture_output=True, check=False).returncode:
            pass
        assert process.poll() is None, (folder / "log").read_text()
        yield f"unix:{folder}/socket"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    assert "violation" not in report.read_text()


def test_tensors_in_regions_of_a_device(stub, served, tmp_path):
    """Guards the utilities and `client.shared(device=...)`: in, out, DLPack, strings, refusals, nothing left over."""
    report = tmp_path / "report"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, served],
        cwd=ROOT, env={**stub, "CUDA_STUB_REPORT": str(report)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("infer") == [19900.0, 39800.0]
    assert found.pop("device to device") == 39800.0
    assert found.pop("words") == ["one", "", "three"]
    assert "800 bytes: 800 at offset 800 do not fit" in found.pop("too much")
    assert "list/tuple" in found.pop("no arrays")
    assert "INVALID" in found.pop("no device")
    assert "was destroyed" in found.pop("destroyed")
    assert found == {
        "device": [2, 1], "view": [2, 1], "allocated": 2, "shared": 19900.0, "left": 0, "registered": 0,
    }  # fmt: skip
    assert "violation" not in report.read_text()


def test_perf_with_regions_of_a_device(stub, served):
    """Guards `perf --shared-memory cuda`."""
    command = [sys.executable, "-m", "inferd", "perf", "m", "--url", served, "--shared-memory", "cuda"]
    command += ["--measurement-interval", "100", "--max-trials", "1", "--warmup", "0", "--cuda-device"]
    for device, status in (("1", 0), ("9", 1)):
        done = subprocess.run([*command, device], cwd=ROOT, env=stub, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stdout + done.stderr
    assert "--shared-memory cuda: cuDeviceGet" in done.stderr


def test_without_cuda_bindings_it_says_what_to_install():
    """Guards the sentence."""
    code = "import sys; sys.modules['cuda'] = None\nimport inferd_client.utils.cuda_shared_memory"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert 'needs cuda-bindings: pip install "inferd-client[cuda]"' in done.stderr
