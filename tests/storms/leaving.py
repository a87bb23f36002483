"""Clients that leave at every point, while models are reloaded, connections age, and the server stops.

    python -m tests.storms.leaving                    8 servers, 20 s each
    python -m tests.storms.leaving --seconds 5 --times 2 --seed 3
    python -m tests.storms.leaving --tls              TCP is encrypted, the unix socket is not
    tools/sanitize.sh tsan -m tests.storms.leaving --instrumented

A client sends calls of several kinds, whole or up to any byte. Then it closes, resets the connection, closes its end
and reads, stalls, or reads to the end. What must hold:

    lost, wrong   0   a patient client gets the answer to each call that the server began, with its own bytes; with TLS
                      the server says that it ends (close_notify)
    polite        0   no call of a grpcio client fails
    server            ends with status 0, leaves no native object, and logs no error of its own

The summary is printed as JSON; the exit status is 0 when all of it holds.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import random
import re
import socket
import ssl
import struct
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import hpack
import numpy as np

from inferd_client.pb import grpc_service_pb2 as pb
from tests.conformance import h2cases
from tests.front.encryption import Encryption
from tests.storms.mixed import clients
from tests.storms.mixed.__main__ import start, write_models
from tests.storms.soak import LIVE_LINE

OPTIONS = [
    "--grpc-max-connection-age=700",
    "--grpc-max-connection-age-grace=30000",
    "--grpc-send-timeout=2000",
    "--grpc-receive-timeout=2000",
    "--exit-timeout-secs=60",
]
THREADS = 12
LARGE = 2**31 - 1
PIECE = 16 << 10
FAULT = re.compile(r"^E\d{4} .*|.*(Traceback|internal error|is moved from state).*", re.MULTILINE)
PATH = clients.SERVICE


@dataclass
class Tally:
    """The outcomes of all calls."""

    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)
    stopping: bool = False
    over: bool = False


def ints(*values: int) -> np.ndarray:
    return np.array([values], np.int32)


def call(draw: random.Random, stream: int) -> tuple[bytes, bytes]:
    """The frames of a call, and bytes that a right answer to it contains."""
    nonce = draw.randrange(1 << 30)
    mark = nonce.to_bytes(4, "little")
    kind = draw.choice(("echo", "large", "slow", "chain", "many", "sum", "index", "watch"))
    path, expected = "ModelInfer", mark
    if kind in ("echo", "large", "slow"):
        size = draw.choice((64, 4096)) if kind != "large" else draw.choice((100_000, 1 << 20))
        body = np.frombuffer(mark * (size // 4), np.uint8)[np.newaxis, :]
        message = clients.request("slow" if kind == "slow" else "echo", x=body)
    elif kind == "chain":
        message, expected = clients.request("chain", x=ints(nonce)), (nonce + 1).to_bytes(4, "little")
    elif kind == "many":
        path, message = "ModelStreamInfer", clients.request("many", x=ints(draw.randrange(1, 40), nonce, 30_000))
    elif kind == "sum":
        path, message = "ModelStreamInfer", clients.request("pieces", x=np.full((2, 64), nonce, np.int32))
    elif kind == "index":
        path, message, expected = "RepositoryIndex", pb.RepositoryIndexRequest(), b"echo"
    else:
        path, message, expected = "ServerMetadata", pb.ServerMetadataRequest(), b"inferd"
    body = message.SerializeToString()
    body = b"\0" + len(body).to_bytes(4, "big") + body
    frames = h2cases.headers(stream, payload=h2cases.block(pseudo_path=PATH + path))
    for at in range(0, len(body), PIECE):
        last = at + PIECE >= len(body)
        frames += h2cases.frame(h2cases.DATA, h2cases.END_STREAM if last else 0, stream, body[at : at + PIECE])
    return frames, expected


@dataclass
class Reader:
    """Takes frames apart: the data and the status of each stream, and the last GOAWAY."""

    peer: socket.socket
    data: dict[int, bytearray] = field(default_factory=lambda: collections.defaultdict(bytearray))
    status: dict[int, int] = field(default_factory=dict)
    reset: set[int] = field(default_factory=set)
    last: int = LARGE
    rest: bytearray = field(default_factory=bytearray)
    decoder: hpack.Decoder = field(default_factory=hpack.Decoder)

    def take(self, received: bytes) -> None:
        self.rest += received
        while len(self.rest) >= 9:
            size = int.from_bytes(self.rest[:3], "big")
            if len(self.rest) < 9 + size:
                return
            kind, flags, stream = self.rest[3], self.rest[4], int.from_bytes(self.rest[5:9], "big") & LARGE
            self.frame(kind, flags, stream, bytes(self.rest[9 : 9 + size]))
            del self.rest[: 9 + size]

    def frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == h2cases.DATA:
            self.data[stream] += payload
        elif kind == h2cases.HEADERS:
            fields = dict(self.decoder.decode(payload))
            if "grpc-status" in fields:
                self.status[stream] = int(fields["grpc-status"])
        elif kind == h2cases.RST:
            self.reset.add(stream)
        elif kind == h2cases.GOAWAY:
            self.last = int.from_bytes(payload[:4], "big") & LARGE
        elif kind == h2cases.PING and not flags & h2cases.ACK:
            with contextlib.suppress(OSError):
                self.peer.sendall(h2cases.frame(h2cases.PING, h2cases.ACK, 0, payload))


def live(draw: random.Random, addresses: list[str], encryption: Encryption, tally: Tally) -> None:
    """One connection, from its first byte to its end."""
    peer = connect(draw, draw.choice(addresses), encryption)
    with peer:
        wide = draw.random() < 0.7
        sent = h2cases.PREFACE + (
            h2cases.settings((4, LARGE)) + h2cases.window(0, 1 << 30) if wide else h2cases.settings()
        )
        expected = {}
        for stream in range(1, 2 * draw.randrange(1, 9), 2):
            frames, expected[stream] = call(draw, stream)
            sent += frames
        end = draw.choice(("close", "reset", "half", "stall", "patient", "patient"))
        if end == "half" or (end != "patient" and draw.random() < 0.7):
            sent = sent[: draw.randrange(len(sent))] if draw.random() < 0.8 else sent
        reader = Reader(peer)
        try:
            send(draw, peer, sent)
            leave(draw, end, peer, reader, expected, tally)
        except ssl.SSLEOFError:
            if end == "patient" and wide:
                tally.wrong.append("the server ended the connection without close_notify")
        except OSError:
            pass
        if end == "patient" and wide:
            judge(reader, expected, tally)
        tally.outcomes[end] += 1


def connect(draw: random.Random, address: str, encryption: Encryption) -> socket.socket:
    family = socket.AF_UNIX if address.startswith("unix:") else socket.AF_INET
    peer = socket.socket(family)
    if draw.random() < 0.5:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    peer.settimeout(60)
    host, _, port = address.rpartition(":")
    peer.connect(address.removeprefix("unix:") if family == socket.AF_UNIX else (host, int(port)))
    return encryption.wrap(peer, host)


def send(draw: random.Random, peer: socket.socket, text: bytes) -> None:
    while text:
        size = draw.choice((1, 9, 100, 1 << 14, 1 << 17))
        peer.sendall(text[:size])
        text = text[size:]


def leave(
    draw: random.Random, end: str, peer: socket.socket, reader: Reader, expected: dict[int, bytes], tally: Tally
) -> None:
    if end == "reset":
        time.sleep(draw.choice((0, 0, 0.01)))
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    elif end == "stall":
        time.sleep(draw.choice((0.05, 1.0, 4.0)))
    elif end == "half":
        time.sleep(draw.choice((0, 0, 0.05)))
        socket.socket.shutdown(peer, socket.SHUT_WR)  # an SSLSocket's own method ends its TLS, too
        while received := peer.recv(1 << 16):
            reader.take(received)
    elif end == "patient":
        while not all(stream in reader.status or stream in reader.reset for stream in expected):
            received = peer.recv(draw.choice((1000, 1 << 14, 1 << 18)))
            if not received:
                return
            reader.take(received)


def judge(reader: Reader, expected: dict[int, bytes], tally: Tally) -> None:
    """Look for calls that were begun and lost, and for answers with another's bytes."""
    for stream, mark in expected.items():
        status = reader.status.get(stream)
        if status is None and stream not in reader.reset and stream <= reader.last:
            tally.wrong.append(f"stream {stream} of {list(expected)} has no answer; GOAWAY {reader.last}")
        elif status == 0 and mark not in reader.data[stream]:
            tally.wrong.append(f"the answer on stream {stream} lacks its bytes")
        name = f"status {status}" if status is not None else "reset" if stream in reader.reset else "refused"
        tally.outcomes[name] += 1


def storm(seed: int, addresses: list[str], encryption: Encryption, tally: Tally) -> None:
    draw = random.Random(seed)
    while not tally.over:
        try:
            live(draw, addresses, encryption, tally)
        except (ConnectionError, FileNotFoundError, ssl.SSLError):
            if not tally.over:
                tally.outcomes["no connection"] += 1
        except Exception as error:
            tally.wrong.append(f"{type(error).__name__}: {error}")


def operate(address: str, encryption: Encryption, tally: Tally) -> None:
    """Reload models in use, again and again."""
    with encryption.channel(address) as channel:
        load = channel.unary_unary(PATH + "RepositoryModelLoad")
        while not tally.stopping:
            for model in ("echo", "chain", "many", "pieces"):
                with contextlib.suppress(grpc.RpcError):
                    load(pb.RepositoryModelLoadRequest(model_name=model).SerializeToString(), timeout=20)
                time.sleep(0.2)


def ask(address: str, encryption: Encryption, tally: Tally) -> None:
    """The polite client."""
    body = clients.request("shared", x=np.arange(64, dtype=np.uint8)[np.newaxis, :]).SerializeToString()
    with encryption.channel(address) as channel:
        infer = channel.unary_unary(PATH + "ModelInfer")
        while not tally.stopping:
            try:
                infer(body, timeout=60)
                tally.outcomes["polite"] += 1
            except grpc.RpcError as error:
                if not tally.stopping:
                    tally.wrong.append(f"polite: {error.code()}: {error.details()}")
            time.sleep(0.005)


def run(seconds: float, seed: int, instrumented: bool, encrypted: bool) -> Tally:
    """One server, from its start to its end."""
    tally = Tally()
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        patience = 600.0 if instrumented else 120.0
        encryption = Encryption(folder / "authority" if encrypted else None)
        options = [*OPTIONS, *encryption.options]
        server, unix = start(write_models(folder / "models"), folder, options, patience)
        addresses = [server.address, unix]
        threads = [
            threading.Thread(target=storm, args=(seed * 100 + i, addresses, encryption, tally)) for i in range(THREADS)
        ]
        threads += [threading.Thread(target=work, args=(server.address, encryption, tally)) for work in (operate, ask)]
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        tally.stopping = True
        threading.Timer(0.05, lambda: setattr(tally, "over", True)).start()  # some more begin while it stops
        status = server.stop(patience)
        for thread in threads:
            thread.join()
        log = server.log.read_text(errors="replace")
        found = LIVE_LINE.search(log)
        if found is None or any(json.loads(found[1]).values()):
            tally.wrong.append(f"native objects: {found and found[1]}")
        tally.wrong += [f"log: {match[0][:300]}" for match in FAULT.finditer(log)][:10]
        if status != 0:
            tally.wrong.append(f"the server's status is {status}: {server.log_end()}")
    return tally


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--times", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--instrumented", action="store_true", help="the server is slow")
    parser.add_argument("--tls", action="store_true")
    arguments = parser.parse_args()
    outcomes: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    for seed in range(arguments.seed, arguments.seed + arguments.times):
        tally = run(arguments.seconds, seed, arguments.instrumented, arguments.tls)
        outcomes += tally.outcomes
        wrong += [f"seed {seed}: {text}" for text in tally.wrong]
    print(json.dumps({"outcomes": dict(sorted(outcomes.items())), "wrong": wrong[:50]}, indent=1))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
