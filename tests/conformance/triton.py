"""The suite against a real Triton: its server from PyTriton's wheel, the suite's models in its Python backend.

    python -m tests.conformance.triton [files of tests/conformance]

Each file gets a Triton of its own, because some requests end the process. The output lists the tests that fail with
Triton; docs/differences.md has the intended differences. Tests of features that only inferd has skip themselves.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from bench.peers.download import unpacked_wheel
from bench.peers.triton import NUMPY_WHEEL, START_SECONDS, STUB_PYTHON, Triton
from bench.processes import ServerProcess, free_port
from tests.conformance import models

MODEL = """import json
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        delay = config["parameters"].get("delay_us", {}).get("string_value", "0")
        self.delay = int(delay) / 1e6
        self.names = [each["name"] for each in config["input"]]

    def execute(self, requests):
        time.sleep(self.delay)
        return [self.answer(request) for request in requests]

    def answer(self, request):
        outputs = []
        for name in self.names:
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            if tensor is not None:
                outputs.append(pb_utils.Tensor(name.replace("INPUT", "OUTPUT"), tensor.as_numpy()))
        return pb_utils.InferenceResponse(outputs)
"""


def write_repository(root: Path) -> None:
    """The models of the suite, for Triton."""
    models.write_repository(root)
    numpy = list(unpacked_wheel(NUMPY_WHEEL, python=STUB_PYTHON).glob("numpy*"))
    for config in root.glob("*/config.pbtxt"):
        config.write_text(config.read_text().replace('backend: "identity"', 'backend: "python"'))
        for version in filter(Path.is_dir, config.parent.iterdir()):
            (version / "model.py").write_text(MODEL)
            for part in numpy:  # the stub looks for packages beside model.py
                (version / part.name).symlink_to(part)


def started(folder: Path) -> ServerProcess:
    """Start Triton with these models. It serves without those that its Python backend cannot load."""
    home, port = Triton.home(), free_port()
    repository = folder / "models"
    repository.mkdir()
    write_repository(repository)
    command = [home / "bin" / "tritonserver", f"--model-repository={repository}", "--exit-on-error=false"]
    command += [f"--backend-directory={home / 'backends'}", "--strict-readiness=false"]
    command += ["--allow-http=false", "--allow-metrics=false", "--grpc-address=127.0.0.1", f"--grpc-port={port}"]
    libraries = str(home.parent.parent / "nvidia_pytriton.libs")
    environment = {"LD_LIBRARY_PATH": libraries, "PATH": "/usr/bin:/bin"}
    return ServerProcess(command, port, log=folder / "log", env=environment, patience=START_SECONDS)


ROOT = Path(__file__).parents[2]


def run(file: Path) -> None:
    """One file of the suite against a Triton of its own."""
    with tempfile.TemporaryDirectory(prefix="triton-") as folder:
        server = started(Path(folder))
        try:
            command = [sys.executable, "-m", "pytest", str(file), "--target", server.address]
            command += ["-q", "--tb=line", "-rfE", "-p", "no:cacheprovider"]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            ended = next(iter(server.processes())).status() == psutil.STATUS_ZOMBIE
            log = server.log_end()
        finally:
            server.stop()
    failures = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR", "E  ", str(ROOT)))]
    print(f"== {file.name}: {done.stdout.splitlines()[-1]}", *failures, sep="\n")
    if ended:
        print(f"Triton ended during the tests:\n{log}")


def main() -> int:
    folder = Path(__file__).parent
    for file in [Path(name) for name in sys.argv[1:]] or sorted(folder.glob("test_*.py")):
        run(file)
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
