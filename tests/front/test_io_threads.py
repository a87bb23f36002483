"""Several I/O threads: each connection is one thread's, and all are served right, also beside clients that leave."""

from __future__ import annotations

import random
import socket
import ssl
import struct
import threading
from pathlib import Path

import numpy as np
import pytest

import inferd_client.grpc as grpcclient
from bench.repository import Identity, write
from tests.conformance import doors
from tests.conformance.raw import Client
from tests.front.certificates import Authority

THREADS = 3
CLIENTS, CALLS = 6, 25
SIZES = (1, 1 << 10, 1 << 18)  # FP32 values: in one frame, and read to their place
INFER = "/inference.GRPCInferenceService/ModelInfer"
FRAME = 1 << 14
LARGE = 1 << 20  # bytes of a message that never comes whole


def asked(values):
    return [grpcclient.InferInput("INPUT0", [1, len(values)], "FP32").set_data_from_numpy(values.reshape(1, -1))]


def call(client, seed):
    """Calls whose responses have the values of their requests."""
    chance = random.Random(seed)
    for number in range(CALLS):
        values = np.full(chance.choice(SIZES), seed * CALLS + number, np.float32)
        response = client.infer("identity", asked(values)).as_numpy("OUTPUT0")
        assert np.array_equal(response[0], values)


def leave_in_the_middle(address, context, stopping):
    host, port = address.split(":")
    message = struct.pack("!BI", 0, LARGE) + bytes(LARGE // 32)
    while not stopping.is_set():
        peer = socket.create_connection((host, int(port)), timeout=60)
        with Client(peer if context is None else context.wrap_socket(peer, server_hostname=host)) as client:
            client.headers(INFER)
            for at in range(0, len(message), FRAME):
                client.data(1, message[at : at + FRAME])


def slices_of_io_threads(pid):
    """How often each of them has been given a core."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        if (task / "comm").read_text().strip() == "inferd-io":
            found[task.name] = int((task / "schedstat").read_text().split()[2])
    return found


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
def test_each_thread_serves_its_connections(tmp_path, encrypted):
    """Tensors of many sizes come back whole on all connections at once, while other clients leave in mid-message."""
    options, context = [], None
    if encrypted:
        authority = Authority(tmp_path)
        pair = authority.issue("server", "DNS:localhost", "IP:127.0.0.1")
        options = ["--grpc-use-ssl", f"--grpc-server-cert={pair.certificate}", f"--grpc-server-key={pair.key}"]
        context = ssl.create_default_context(cafile=authority.root)
        context.set_alpn_protocols(["h2"])
    models = write(tmp_path / "models", [Identity("identity", (("FP32", 1),))])
    with doors.running_server("native", models, f"--io-threads={THREADS}", *options) as server:
        clients = [
            grpcclient.InferenceServerClient(server.address, creds=context, channel_args=[("own", number)])
            for number in range(CLIENTS)
        ]
        before = slices_of_io_threads(server.pid)
        assert len(before) == THREADS
        failures = []

        def work(client, seed):
            try:
                call(client, seed)
            except Exception as error:  # shown by the test
                failures.append(error)

        stopping = threading.Event()
        rude = threading.Thread(target=leave_in_the_middle, args=(server.address, context, stopping))
        threads = [threading.Thread(target=work, args=(client, seed)) for seed, client in enumerate(clients)]
        for thread in (rude, *threads):
            thread.start()
        for thread in threads:
            thread.join()
        stopping.set()
        rude.join()
        after = slices_of_io_threads(server.pid)
        for client in clients:
            client.close()
    assert not failures
    assert all(after[thread] > before[thread] for thread in before), "every thread has had connections"
