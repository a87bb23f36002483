"""What compression costs others: small requests beside a client that sends gzip, and bombs.

    python -m bench.compression

Small requests (one 64-byte tensor) are sent by the load driver at a fixed rate over 8 connections. The neighbour is a
process of its own that sends one tensor of 600 kB after the other, compressed once before, and takes gzip answers at
level medium. The comparisons are: no neighbour, and the same neighbour without compression. A bomb is one call: its
time runs from its last byte to the answer, its memory is the growth of the server's peak resident memory.
"""

from __future__ import annotations

import argparse
import gzip
import multiprocessing
import socket
import struct
import tempfile
import time
import zlib
from multiprocessing.synchronize import Event
from pathlib import Path

import h2.config
import h2.connection
import h2.events
import h2.settings

from bench import inferd
from bench.messages import identity
from bench.repository import Identity, write
from inferd_client.driver import INFER_PATH, Driver, Fixed

MIB = 1 << 20
RATE = 1000.0
PACK = {"gzip": gzip.compress, "deflate": zlib.compress}
MODEL = Identity("identity", (("FP32", 1),))


class Caller:
    """One HTTP/2 connection for one call after the other."""

    def __init__(self, address: str, encoding: str) -> None:
        host, port = address.rsplit(":", 1)
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self._h2.initiate_connection()
        self._h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 8 * MIB})
        self._h2.increment_flow_control_window(16 * MIB)
        self._encoding = encoding
        self._socket.sendall(self._h2.data_to_send())
        self._receive()  # the server's settings

    def _receive(self) -> list[h2.events.Event]:
        events = self._h2.receive_data(self._socket.recv(1 << 20))
        self._socket.sendall(self._h2.data_to_send())
        return events

    def call(self, message: bytes) -> tuple[int, float]:
        """(grpc-status, seconds from the last byte of the request to the end of the answer)."""
        stream = self._h2.get_next_available_stream_id()
        headers = [(":method", "POST"), (":scheme", "http"), (":path", INFER_PATH), (":authority", "bench")]
        headers += [("te", "trailers"), ("content-type", "application/grpc")]
        headers += [("grpc-encoding", self._encoding), ("grpc-accept-encoding", self._encoding)]
        self._h2.send_headers(stream, headers)
        data = struct.pack(">BI", self._encoding != "identity", len(message)) + message
        while data:
            size = min(len(data), self._h2.local_flow_control_window(stream), self._h2.max_outbound_frame_size)
            if size == 0:
                self._socket.sendall(self._h2.data_to_send())
                self._receive()
                continue
            self._h2.send_data(stream, data[:size], end_stream=size == len(data))
            data = data[size:]
        self._socket.sendall(self._h2.data_to_send())
        begin = time.perf_counter()
        return self._answer(stream), time.perf_counter() - begin

    def _answer(self, stream: int) -> int:
        status = -1
        while True:
            for event in self._receive():
                if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
                    status = int(dict(event.headers).get("grpc-status", status))
                elif isinstance(event, h2.events.DataReceived):
                    self._h2.acknowledge_received_data(event.flow_controlled_length, stream)
                elif isinstance(event, h2.events.StreamEnded) and event.stream_id == stream:
                    return status
            self._socket.sendall(self._h2.data_to_send())


def neighbour(address: str, encoding: str, stop: Event, calls: multiprocessing.Queue[float]) -> None:
    """Call with a 600 kB tensor until `stop` is set."""
    caller = Caller(address, encoding)
    message = identity(600_000).request
    message = PACK[encoding](message) if encoding in PACK else message
    count = 0
    begin = time.perf_counter()
    while not stop.is_set():
        status, _ = caller.call(message)
        if status != 0:
            raise RuntimeError(f"a call of the neighbour ended with status {status}")
        count += 1
    calls.put(count / (time.perf_counter() - begin))


def small_requests(address: str, seconds: float, beside: str = "") -> tuple[float, float, float]:
    """(p50, p99 of small requests in microseconds, calls per second of the neighbour)."""
    stop, calls = multiprocessing.Event(), multiprocessing.Queue()
    process = multiprocessing.Process(target=neighbour, args=(address, beside, stop, calls))
    if beside:
        process.start()
        time.sleep(0.5)
    small = identity(64)
    with Driver(address, connections=8) as driver:
        report = driver.run(Fixed([small.request]), in_flight=32, seconds=seconds, rate=RATE)
    if report.statuses != {0: report.answered}:
        raise RuntimeError(f"small requests failed: {report.statuses}")
    stop.set()
    return report.latency.p50, report.latency.p99, calls.get() if beside else 0.0


def bomb(encoding: str) -> bytes:
    """1 GiB of zeros in 1 MiB."""
    packer = zlib.compressobj(9, wbits=31 if encoding == "gzip" else 15)
    return b"".join(packer.compress(bytes(MIB)) for _ in range(1024)) + packer.flush()


def peak(pid: int) -> int:
    """The peak of resident memory in KiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def drop(address: str, pid: int, encoding: str) -> tuple[int, float, float]:
    """(status, milliseconds, MiB more at the peak) of a bomb."""
    caller, message = Caller(address, encoding), bomb(encoding)
    caller.call(PACK[encoding](identity(64).request))
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    before = peak(pid)
    status, seconds = caller.call(message)
    return status, seconds * 1e3, (peak(pid) - before) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        repository = write(Path(folder) / "models", [MODEL])
        level = "--grpc-infer-response-compression-level=medium"
        server = inferd.start(repository, Path(folder) / "log", options=[level])
        try:
            print("| bomb | status | ms | MiB more at the peak |\n|---|---|---|---|")
            for encoding in PACK:
                status, ms, more = drop(server.address, server.pid, encoding)
                print(f"| {encoding} | {status} | {ms:.1f} | {more:.1f} |")
            print("\n| neighbour | its calls/s | p50, us | p99, us |\n|---|---|---|---|")
            for beside in ("", "identity", "gzip") * arguments.rounds:
                p50, p99, calls = small_requests(server.address, arguments.seconds, beside)
                print(f"| {beside or 'nobody'} | {calls:.0f} | {p50:.0f} | {p99:.0f} |", flush=True)
        finally:
            server.stop()


if __name__ == "__main__":
    main()
