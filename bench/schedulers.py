"""What each scheduler costs more than the plain lane: CPU of the server for each request.

    python -m bench.schedulers

The driver sends the same small requests to identity models that differ only in their scheduler. Each round measures
every model one after the other on one server, so a disturbance affects all of them; the best round of each counts.
Instructions of single lanes: `python -m bench.instructions`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path

from bench import inferd, messages
from bench.figures import Figure, best, measure
from bench.processes import ServerProcess
from bench.repository import Identity, write
from inferd.server.pb import grpc_service_pb2 as pb
from inferd_client.driver import Driver, Fixed

TENSOR = (("FP32", 1),)
PAYLOAD = 64
LOAD = (8, 8)  # connections, calls in flight on each
SEQUENCES = 1000
QUESTIONS = 1000  # different requests in turn, where identical ones share a response
LEVELS = (
    "dynamic_batching { priority_levels: 3 default_priority_level: 2 default_queue_policy "
    "{ max_queue_size: 1000 default_timeout_microseconds: 1000000 } }"
)
ENSEMBLE = """platform: "ensemble"
max_batch_size: 64
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
ensemble_scheduling { step { model_name: "plain" model_version: -1
  input_map { key: "INPUT0" value: "INPUT0" } output_map { key: "OUTPUT0" value: "OUTPUT0" } } }
"""

MODELS = {
    "plain": ("dynamic batching", Identity("plain", TENSOR)),
    "alone": ("no batching", Identity("alone", TENSOR, batching="")),
    "delay": (
        "delay of 100 µs",
        Identity("delay", TENSOR, batching="dynamic_batching { max_queue_delay_microseconds: 100 }"),
    ),
    "adaptive": ("adaptive delay", Identity("adaptive", TENSOR, parameters={"adaptive_queue_delay": "true"})),
    "levels": ("three levels, limit, timeout", Identity("levels", TENSOR, batching=LEVELS)),
    "ordered": (
        "order kept",
        Identity("ordered", TENSOR, batching="dynamic_batching { preserve_ordering: true }"),
    ),
    "coalescing": ("coalescing", Identity("coalescing", TENSOR, parameters={"coalesce_requests": "true"})),
    "cached": ("response cache, hits", Identity("cached", TENSOR)),
    "direct": ("sequences, direct", Identity("direct", TENSOR)),
    "oldest": ("sequences, oldest", Identity("oldest", TENSOR)),
    "ensemble": ("ensemble of one step", Identity("ensemble", TENSOR)),
}


def repository(folder: Path) -> Path:
    """All of MODELS."""
    root = write(folder / "models", [model for _, model in MODELS.values()])
    replace_batching(root, "cached", "dynamic_batching { } response_cache { enable: true }")
    slots = f"max_sequence_idle_microseconds: 600000000 oldest {{ max_candidate_sequences: {SEQUENCES} }}"
    replace_batching(root, "oldest", f"sequence_batching {{ {slots} }}")
    replace_batching(root, "direct", "sequence_batching { max_sequence_idle_microseconds: 600000000 direct { } }")
    (root / "ensemble" / "config.pbtxt").write_text(ENSEMBLE)
    return root


def replace_batching(root: Path, name: str, scheduler: str) -> None:
    """Give the model another scheduler."""
    path = root / name / "config.pbtxt"
    path.write_text(path.read_text().replace("dynamic_batching { }", scheduler))


def workload(name: str) -> Fixed:
    """Requests in turn and their answers; their sequences have begun."""
    exchange = messages.identity(PAYLOAD, name)
    if name in ("direct", "oldest"):
        count = SEQUENCES if name == "oldest" else 64  # as many as there are slots
        return Fixed([of_sequence(exchange.request, n + 1) for n in range(count)], [exchange.response] * count)
    if name in ("coalescing", "cached"):
        questions = [question(name, number) for number in range(QUESTIONS)]
        return Fixed([each.request for each in questions], [each.response for each in questions])
    return Fixed([exchange.request], [exchange.response])


def of_sequence(request: bytes, number: int, *, start: bool = False) -> bytes:
    """The same request as one of a sequence."""
    message = pb.ModelInferRequest.FromString(request)
    message.parameters["sequence_id"].int64_param = number
    message.parameters["sequence_start"].bool_param = start
    return message.SerializeToString()


def question(name: str, number: int) -> messages.Exchange:
    """A request that differs from the others in its bytes."""
    tensor = ("FP32", [1, PAYLOAD // 4], number.to_bytes(4, "little") * (PAYLOAD // 4))
    return messages.Exchange(messages.request(name, {"INPUT0": tensor}), messages.response(name, {"OUTPUT0": tensor}))


def begin_sequences(server: ServerProcess) -> None:
    """Send each sequence's first request."""
    for name, count in (("direct", 64), ("oldest", SEQUENCES)):
        request = messages.identity(PAYLOAD, name).request
        with Driver(server.address) as driver:
            driver.run(Fixed([of_sequence(request, n + 1, start=True) for n in range(count)]), requests=count)


def taken(server: ServerProcess, name: str, seconds: float) -> Figure:
    """One round of a model, with new requests."""
    return measure(server, workload(name), LOAD, seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="of each model in each round")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="inferd-schedulers-") as folder:
        options = ("--cache-config=local,size=67108864", "--exit-timeout-secs=1")  # for which live sequences keep it
        server = inferd.start(repository(Path(folder)), Path(folder) / "log", options=options)
        try:
            begin_sequences(server)
            ways = {name: partial(taken, server, name, arguments.seconds) for name in MODELS}
            found = best(ways, arguments.rounds)
        finally:
            server.stop()
    print("| scheduler | CPU, µs a request | over the plain lane | requests/s |\n|---|---:|---:|---:|")
    for name, (title, _) in MODELS.items():
        figure = found[name]
        print(f"| {title} | {figure.cpu_us:.2f} | {figure.cpu_us - found['plain'].cpu_us:+.2f} | {figure.rate:,.0f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
