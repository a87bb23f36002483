"""What live sequences cost: requests of many sequences in turn, compared with the same requests to a stateless model.

python -m bench.sequences --sequences 10000
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from bench import inferd, messages
from bench.figures import measure
from bench.repository import Identity, write
from inferd.server.pb import grpc_service_pb2 as pb
from inferd_client.driver import Fixed

LOADS = ((1, 32), (8, 8))  # connections, calls in flight on each
PAYLOAD = 64


def repository(folder: Path, sequences: int) -> Path:
    """A stateless model, and one with slots for all sequences."""
    root = write(folder / "models", [Identity("plain", (("FP32", 1),)), Identity("sequences", (("FP32", 1),))])
    path = root / "sequences" / "config.pbtxt"
    kept = [line for line in path.read_text().splitlines() if "dynamic_batching" not in line]
    oldest = f"oldest {{ max_candidate_sequences: {sequences} }}"
    kept.append(f"sequence_batching {{ max_sequence_idle_microseconds: 600000000 {oldest} }}")
    path.write_text("\n".join(kept))
    return root


def requests(count: int, *, start: bool) -> list[bytes]:
    """One for each sequence."""
    encoded = []
    for number in range(1, count + 1):
        message = pb.ModelInferRequest.FromString(messages.identity(PAYLOAD, "sequences").request)
        message.parameters["sequence_id"].int64_param = number
        message.parameters["sequence_start"].bool_param = start
        encoded.append(message.SerializeToString())
    return encoded


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--sequences", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each round")
    arguments = parser.parse_args()
    count = arguments.sequences
    plain = messages.identity(PAYLOAD, "plain")
    answer = messages.identity(PAYLOAD, "sequences").response
    with tempfile.TemporaryDirectory(prefix="inferd-sequences-") as name:
        options = ("--exit-timeout-secs=1",)  # for which its live sequences keep it
        server = inferd.start(repository(Path(name), count), Path(name) / "log", options=options)
        try:
            begin = Fixed(requests(count, start=True), [answer] * count)
            print(f"{count} sequences begin: {measure(server, begin, LOADS[0], requests=count)}")
            go_on = Fixed(requests(count, start=False), [answer] * count)
            print(f"\n| load | stateless: CPU · rate · p50 | {count} sequences |\n|---|---|---|", flush=True)
            for load in LOADS:
                one = measure(server, Fixed([plain.request], [plain.response]), load, seconds=arguments.seconds)
                many = measure(server, go_on, load, seconds=arguments.seconds)
                print(f"| {load[0]} x {load[1]} | {one} | {many} |", flush=True)
        finally:
            server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
