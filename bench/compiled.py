"""The demo's digits CNN as TorchScript, compiled by AOTInductor, and as a module in Python, behind one server.

    python -m bench.compiled

Each round measures every model one after the other; the best round of each counts. Compiling takes a C++ compiler and
some 20 s.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
import tempfile
import warnings
from pathlib import Path

from bench import digits, inferd
from inferd_client.driver import Driver, Fixed

SCRIPTED, COMPILED = "digits_torchscript", "digits_aoti"
MODULE = "digits_module"
NOT_COMPILED = '{"disable": true}'
LOADS = ((1, 1), (8, 8))  # connections, calls in flight on each


def repository(folder: Path) -> Path:
    """The demo's repository and the compiled model."""
    root = digits.make(folder)
    compiled = root / COMPILED
    (compiled / "1").mkdir(parents=True)
    config = (root / SCRIPTED / "config.pbtxt").read_text()
    config = config.replace(f'"{SCRIPTED}"', f'"{COMPILED}"').replace('backend: "pytorch"', 'platform: "torch_aoti"')
    (compiled / "config.pbtxt").write_text(config)
    (compiled / "labels.txt").write_bytes((root / SCRIPTED / "labels.txt").read_bytes())
    compile_model(root / SCRIPTED / "1" / "model.pt", compiled / "1" / "model.pt2")
    add_module(root)
    return root


def add_module(root: Path) -> None:
    """The same network as a module in Python, which a worker process executes."""
    import torch

    version = root / MODULE / "1"
    version.mkdir(parents=True)
    config = (root / SCRIPTED / "config.pbtxt").read_text().replace(f'"{SCRIPTED}"', f'"{MODULE}"')
    parameter = (
        f"parameters {{ key: \"TORCH_COMPILE_OPTIONAL_PARAMETERS\" value {{ string_value: '{NOT_COMPILED}' }} }}"
    )
    (version.parent / "config.pbtxt").write_text(f'{config}\nruntime: "model.py"\n{parameter}\n')
    (version.parent / "labels.txt").write_bytes((root / SCRIPTED / "labels.txt").read_bytes())
    made = importlib.import_module("make_repository")
    names = ("CHANNELS", "HIDDEN", "LABELS")
    text = "\n".join(f"{name} = {getattr(made, name)!r}" for name in names)
    network = inspect.getsource(made.DigitNet)
    (version / "model.py").write_text(f"import torch\nfrom torch import nn\n\n{text}\n\n\n{network}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = torch.jit.load(str(root / SCRIPTED / "1" / "model.pt")).state_dict()
    torch.save(dict(state), version / "model.pt")


def compile_model(scripted: Path, target: Path) -> None:
    """The same network, compiled."""
    import torch

    sys.path.insert(0, str(digits.MAKE_REPOSITORY.parent))
    network = importlib.import_module("make_repository").DigitNet().eval()
    # Without the libraries among which PyTorch chooses by the size of the batch: the compiled model would be bound to
    # one side of 16, while the server chooses for each run.
    libraries = torch.backends.mkldnn.flags(enabled=False), torch.backends.nnpack.flags(enabled=False)
    with warnings.catch_warnings(), libraries[0], libraries[1]:
        warnings.simplefilter("ignore")
        network.load_state_dict(torch.jit.load(str(scripted)).state_dict())
        batch = {0: torch.export.Dim("batch", max=64)}
        program = torch.export.export(network, (torch.zeros(64, 1, 8, 8),), dynamic_shapes=(batch,))
        torch._inductor.config.cpp.threads = 1
        torch._inductor.aoti_compile_and_package(program, package_path=str(target))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        root = repository(folder / "models")
        server = inferd.start(root, folder / "log", patience=120)
        try:
            requests = {model: digits.image_request(root / model, model) for model in (SCRIPTED, COMPILED, MODULE)}
            for connections, in_flight in LOADS:
                found: dict[str, list[tuple[float, float, float]]] = {model: [] for model in requests}
                for _ in range(arguments.rounds):
                    for model, request in requests.items():
                        with Driver(server.address, connections=connections) as driver:
                            driver.run(Fixed([request]), in_flight=in_flight, seconds=0.3)
                            before = server.cpu_seconds()
                            report = driver.run(Fixed([request]), in_flight=in_flight, seconds=arguments.seconds)
                            if report.wrong or report.lost:
                                raise RuntimeError(f"{model}: {report}")
                            cpu = (server.cpu_seconds() - before) / report.requests * 1e6
                            found[model].append((report.rate, cpu, report.latency.p50))
                print(f"{connections} x {in_flight} in flight")
                for model, rounds in found.items():
                    rate, cpu, p50 = max(each[0] for each in rounds), *(min(each[i] for each in rounds) for i in (1, 2))
                    print(f"  {model:20} {rate:9.0f} images/s  {cpu:7.1f} µs of CPU an image  p50 {p50:7.0f} µs")
        finally:
            server.stop()


if __name__ == "__main__":
    main()
