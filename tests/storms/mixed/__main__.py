"""All features at once against one server, every answer checked against its own nonce.

    python -m tests.storms.mixed                              30 minutes
    python -m tests.storms.mixed --seconds 60 --only streams --only in_place
    python -m tests.storms.mixed --tls                        TCP is encrypted, the unix socket is not

Clients of every kind (`tests.storms.mixed.clients`) run beside each other: tensors from nothing to 64 MiB, compression,
cancels, deadlines, streams of decoupled models, ensembles of models that write in place, cache, coalescing, BLS,
failing requests, sequences, shared memory, an operator who reloads models in use; and clients that hardly read
(`hostile`). A polite client in a process of its own makes a small call every 5 ms. What must hold:

    lost, crossed   0   every request ends in one outcome, every answer belongs to its request
    memory              does not grow after the first third of the run
    polite p99          at most 10 ms, and none of its calls fails
    books               of each model: the phases of the answered requests add up to their times, within 2 %
    live            0   every native object is gone when the server has stopped, with status 0

With --instrumented the server is a sanitizer's build (`tools/sanitize.sh`): times, books and memory are not judged. The
exit status is 0 when all of it holds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import grpc

from bench.processes import ServerProcess, free_port
from inferd_client.pb import grpc_service_pb2 as pb
from tests.conformance import sums
from tests.front.encryption import Encryption
from tests.storms.mixed import clients, hostile, repository
from tests.storms.soak import LIVE_LINE, MemoryWatch, growth

MIB = 1 << 20
GROWTH_LIMIT = 48 * MIB
P99_LIMIT_MS = 10.0
UNTOLD = 0.02  # of the time of answered requests, between their phases
HIT_NS = 20_000  # of a response from the cache: from its arrival to its lookup, and from there to its end
GENEROSITY = 15
"""By how much the load is nicer than the server and the polite client: it stands for clients on other machines, and
would take whole cores."""


def write_models(folder: Path) -> Path:
    repository.write(folder)
    (folder / "sum" / "1").mkdir(parents=True)
    (folder / "sum" / "config.pbtxt").write_text(sums.config("onnxruntime", "oldest { max_candidate_sequences: 64 }"))
    sums.write_onnx(folder / "sum" / "1")
    return folder


def start(models: Path, folder: Path, options: list[str], patience: float) -> tuple[ServerProcess, str]:
    """The server of this source tree, on TCP and on a unix socket, and the latter's address."""
    port = free_port()
    unix = f"unix:{folder / 'inferd.sock'}"
    command = [sys.executable, "-m", "inferd", "serve", "--model-repository", str(models), "--grpc-port", str(port)]
    command += ["--grpc-address", "127.0.0.1", "--grpc-address", unix, "--model-control-mode", "explicit"]
    command += ["--load-model", "*", "--model-load-overrides=true", "--cache-config", f"local,size={8 * MIB}", *options]
    root = str(Path(__file__).parents[3])
    env = {"PYTHONPATH": root, "INFERD_DEBUG_COUNTERS": "1"}
    return ServerProcess(command, port, log=folder / "log", env=env, patience=patience), unix


def probe(address: str, root: Path | None) -> None:
    """The polite client: make a small request every 5 ms until a byte comes from standard input; print their times."""
    times, failures = [], []
    import numpy as np

    message = clients.request("shared", x=np.arange(64, dtype=np.uint8)[np.newaxis, :]).SerializeToString()
    encryption = Encryption(None)
    if root is not None:
        encryption.believe(root)
    with encryption.channel(address, clients.OPTIONS) as channel:
        call = channel.unary_unary(clients.SERVICE + "ModelInfer")
        call(message, wait_for_ready=True)
        while not select.select([sys.stdin], [], [], 0.005)[0]:
            begin = time.perf_counter()
            try:
                call(message, timeout=clients.PATIENCE)
            except grpc.RpcError as error:
                failures.append(f"{error.code().name}: {error.details()}"[:200])
            times.append((time.perf_counter() - begin) * 1e3)
    cuts = statistics.quantiles(times, n=1000)
    found = {"calls": len(times), "p50": cuts[499], "p99": cuts[989], "p999": cuts[998], "max": max(times)}
    print(json.dumps({**found, "failures": failures[:20]}))


def drive(
    server: ServerProcess, unix: str, encryption: Encryption, arguments: argparse.Namespace
) -> tuple[dict, dict, MemoryWatch]:
    """Run all clients against the server; return tallies, the polite client's times, and memory."""
    world = clients.World(server.address, unix, time.monotonic() + arguments.seconds, encryption)
    command = [sys.executable, "-m", "tests.storms.mixed", "--probe", server.address]
    command += [] if encryption.root is None else ["--root", str(encryption.root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as polite:
        try:
            os.nice(GENEROSITY)
            with MemoryWatch(server, 1.0) as memory:
                threads = [] if arguments.polite else hostile.start(world)
                asyncio.run(clients.run(world, arguments.seed, frozenset(arguments.only or ())))
        finally:
            said = polite.communicate("stop")[0]
    measured = json.loads(said)
    for thread in threads:
        thread.join(5)
    return dict(world.tallies), measured, memory


def wrong_books(address: str, encryption: Encryption) -> list[str]:
    """The models whose statistics do not add up, once all clients have ended."""
    with encryption.channel(address, clients.OPTIONS) as channel:
        call = channel.unary_unary(
            clients.SERVICE + "ModelStatistics",
            request_serializer=pb.ModelStatisticsRequest.SerializeToString,
            response_deserializer=pb.ModelStatisticsResponse.FromString,
        )
        found = []
        for model in call(pb.ModelStatisticsRequest(), timeout=clients.PATIENCE).model_stats:
            found += [f"the books of {model.name}: {text}" for text in unbalanced(model.inference_stats)]
        return found


def unbalanced(stats: pb.InferStatistics) -> Iterator[str]:
    """The faults, in sentences. Times of an ensemble's parallel steps count twice, so its sum may be larger."""
    phases = [getattr(stats, name) for name in ("queue", "compute_input", "compute_infer", "compute_output")]
    for name, phase in zip(("queue", "input", "infer", "output"), phases, strict=True):
        if phase.count + stats.cache_hit.count != stats.success.count:
            yield f"{stats.success.count} answered, {phase.count} with a time of {name}, {stats.cache_hit.count} hits"
    passed, told = stats.success.ns, sum(phase.ns for phase in phases) + stats.cache_hit.ns
    if passed - told > UNTOLD * passed + HIT_NS * stats.cache_hit.count:
        yield f"{told / 1e6:.3f} of {passed / 1e6:.3f} ms are told"


def faults(tallies: dict, polite: dict, grown: int | None, arguments: argparse.Namespace) -> list[str]:
    """The faults, in sentences."""
    found = []
    for kind, tally in tallies.items():
        found += [f"{kind}: {count} x {what}" for what, count in tally.wrong.most_common(10)]
        if tally.asked != tally.outcomes.total():
            found.append(f"{kind}: {tally.asked} requests have {tally.outcomes.total()} outcomes")
        if not tally.outcomes["OK"]:
            found.append(f"{kind}: nothing was answered")
    found += [f"polite: {failure}" for failure in dict.fromkeys(polite["failures"])]
    if not arguments.instrumented:
        if polite["p99"] > P99_LIMIT_MS:
            found.append(f"the polite client's p99 is {polite['p99']:.1f} ms, expected at most {P99_LIMIT_MS:g}")
        if grown is not None and grown > GROWTH_LIMIT:
            found.append(f"memory grew by {grown / MIB:.0f} MiB, expected at most {GROWTH_LIMIT / MIB:.0f}")
    return found


def run(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """Run one server from start to stop; return the faults."""
    patience = 600.0 if arguments.instrumented else 120.0
    encryption = Encryption(folder / "authority" if arguments.tls else None)
    options = [*(arguments.option or []), *encryption.options]
    server, unix = start(write_models(folder / "models"), folder, options, patience)
    try:
        tallies, polite, memory = drive(server, unix, encryption, arguments)
        wrong = [] if arguments.instrumented else wrong_books(server.address, encryption)
    finally:
        status = server.stop(patience)
        log = (folder / "log").read_text(errors="replace")
        if arguments.log:
            arguments.log.write_text(log)
    grown = growth(memory.samples)
    for kind, tally in tallies.items():
        print(f"{kind}: {tally.asked} requests, {dict(tally.outcomes)}")
    print(f"polite: {polite}")
    rss = [size // MIB for _, size in memory.samples]
    print(f"memory in MiB: {rss[:: max(1, len(rss) // 30)]}")
    print(f"growth: {'too short a run' if grown is None else f'{grown / MIB:.1f} MiB'}", flush=True)
    wrong += faults(tallies, polite, grown, arguments)
    if status != 0:
        wrong.append(f"the server ended with {status}:\n{server.log_end(40)}")
    live = LIVE_LINE.search(log)
    if live is None:
        wrong.append("the server did not print its live counters")
    else:
        wrong += [f"{count} live {name}" for name, count in json.loads(live[1]).items() if count]
    return wrong


def main() -> int:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", choices=[kind.__name__ for kind, _ in clients.KINDS])
    parser.add_argument("--polite", action="store_true", help="without the clients that hardly read")
    parser.add_argument("--instrumented", action="store_true", help="the server is slow: judge answers only")
    parser.add_argument("--option", action="append", help="a further option of the server, --option=--name=value")
    parser.add_argument("--log", type=Path, help="copy the server's log there")
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--probe", metavar="ADDRESS", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.probe:
        probe(arguments.probe, arguments.root)
        return 0
    with tempfile.TemporaryDirectory(prefix="inferd-mixed-") as name:
        wrong = run(arguments, Path(name))
    for sentence in dict.fromkeys(wrong):
        print(f"WRONG: {sentence}")
    return 1 if wrong else 0


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    sys.exit(main())
