"""What an ensemble costs beyond its steps: three identity models in a row, compared with one of them alone.

    python -m bench.ensembles

Each round measures every model one after the other on one server, so that they share the machine's good and bad
moments; the best round of each counts. With its defaults it takes three quarters of a minute.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench import inferd, messages
from bench.figures import Figure, measure
from bench.processes import ServerProcess
from bench.repository import GATHER, Identity, write
from inferd_client.driver import Fixed

STEPS = 3
IDENTITY = (("FP32", 1),)
SIZES = (64, 600_000)
LOADS = ((1, 1), (1, 32), (8, 8))  # connections, calls in flight on each
MODELS = ("step_0", "ensemble")


def chain(*models: str) -> str:
    """The configuration of an ensemble of these models, one after the other."""
    tensors = ["INPUT0", *(f"between_{n}" for n in range(1, len(models))), "OUTPUT0"]
    steps = "".join(
        f'step {{ model_name: "{model}" model_version: -1 '
        f'input_map {{ key: "INPUT0" value: "{tensors[n]}" }} '
        f'output_map {{ key: "OUTPUT0" value: "{tensors[n + 1]}" }} }}\n'
        for n, model in enumerate(models)
    )
    return f"""platform: "ensemble"
max_batch_size: 64
input {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }}
output {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }}
ensemble_scheduling {{ {steps} }}
"""


def repository(folder: Path, gather: bool) -> Path:
    """The steps and their ensemble; with `gather`, each batch is made contiguous and split again."""
    steps = [Identity(f"step_{n}", IDENTITY, parameters=GATHER if gather else {}) for n in range(STEPS)]
    root = write(folder / "models", steps)
    (root / "ensemble" / "1").mkdir(parents=True)
    (root / "ensemble" / "config.pbtxt").write_text(chain(*(f"step_{n}" for n in range(STEPS))))
    return root


def workload(model: str, size: int) -> Fixed:
    """One request, whose answer is compared."""
    exchange = messages.identity(size, model)
    return Fixed([exchange.request], [exchange.response])


def lines(server: ServerProcess, sizes: tuple[int, ...], rounds: int, seconds: float) -> Iterator[str]:
    """Print a table, each line as soon as it has been measured; then the worst ratio of CPU."""
    yield f"| tensor, connections x in flight | one step: CPU · rate · p50 | {STEPS} steps | CPU, ratio | rate, ratio |"
    yield "|---|---|---|---:|---:|"
    worst = 0.0
    for size in sizes:
        for load in LOADS:
            found: dict[str, list[Figure]] = {model: [] for model in MODELS}
            for _ in range(rounds):
                for model in MODELS:
                    found[model].append(measure(server, workload(model, size), load, seconds))
            one, three = (min(found[model], key=lambda figure: figure.cpu_us) for model in MODELS)
            ratio = three.cpu_us / one.cpu_us if one.cpu_us else float("nan")
            worst = max(worst, ratio)
            cells = f"{one} | {three} | {ratio:.2f} | {one.rate / three.rate:.2f}"
            yield f"| {size} B, {load[0]} x {load[1]} | {cells} |"
    yield f"\n{STEPS} steps cost at most {worst:.2f} times the CPU of one; {STEPS} is the aim"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each round")
    parser.add_argument("--gather", action="store_true", help="make each batch contiguous, as a real model does")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of the tensor")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="inferd-ensembles-") as name:
        server = inferd.start(repository(Path(name), arguments.gather), Path(name) / "log")
        try:
            for line in lines(server, tuple(arguments.sizes), arguments.rounds, arguments.seconds):
                print(line, flush=True)
        finally:
            server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
