"""Several I/O threads: each connection is one thread's, and all are served right, also beside clients that leave."""

from __future__ import annotations

import random
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import inferd_client.grpc as grpcclient
from bench import messages
from bench.repository import Identity, write
from inferd_client.driver import Driver, Fixed
from tests.conformance import doors
from tests.conformance.raw import Client
from tests.front.encryption import Encryption

THREADS = 3
CLIENTS, CALLS = 6, 25
SIZES = (1, 1 << 10, 1 << 18)  # FP32 values: in one frame, and read to their place
INFER = "/inference.GRPCInferenceService/ModelInfer"
FRAME = 1 << 14
DEADLINE_EXCEEDED = 4
REQUESTS = 200  # one after the other
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


def connected(address, encryption):
    host, port = address.split(":")
    return Client(encryption.wrap(socket.create_connection((host, int(port)), timeout=60), host))


def leave_in_the_middle(address, encryption, stopping):
    message = struct.pack("!BI", 0, LARGE) + bytes(LARGE // 32)
    while not stopping.is_set():
        with connected(address, encryption) as client:
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


def sleeps_of_io_threads(pid):
    """How often each of them has gone to sleep."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        status = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
        if status["Name"] == "inferd-io":
            found[task.name] = int(status["voluntary_ctxt_switches"])
    return found


def test_a_request_that_stops_arriving_ends_beside_the_calls_of_another_thread(tmp_path):
    """Between two steps of a read another thread moves the server's time on: the new calls of the read are known
    nevertheless, and none stays for ever."""
    encryption = Encryption(tmp_path / "authority")
    models = write(tmp_path / "models", [Identity("identity", (("FP32", 1),))])
    request = Fixed([messages.identity(64).request])
    with (
        doors.running_server(
            "native", models, "--io-threads=2", "--grpc-receive-timeout=1000", *encryption.options
        ) as server,
        Driver(server.address, connections=4, context=encryption.context) as busy,
        ThreadPoolExecutor(1) as other,
    ):
        load = other.submit(busy.run, request, in_flight=16, seconds=3)
        streams = []
        while not load.done():
            client = connected(server.address, encryption)
            for _ in range(20):
                streams.append((client, client.headers(INFER)))
                client.data(streams[-1][1], struct.pack("!BI", 0, LARGE) + bytes(100))
        assert load.result().correct
        for client, stream in streams:
            assert client.answer(stream).status == DEADLINE_EXCEEDED
        for client, _ in streams:
            client.socket.close()


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
def test_each_thread_serves_its_connections(tmp_path, encrypted):
    """Tensors of many sizes come back whole on all connections at once, while other clients leave in mid-message."""
    encryption = Encryption(tmp_path / "authority" if encrypted else None)
    models = write(tmp_path / "models", [Identity("identity", (("FP32", 1),))])
    with doors.running_server("native", models, f"--io-threads={THREADS}", *encryption.options) as server:
        clients = [
            grpcclient.InferenceServerClient(server.address, creds=encryption.context, channel_args=[("own", number)])
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
        rude = threading.Thread(target=leave_in_the_middle, args=(server.address, encryption, stopping))
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


@pytest.mark.parametrize("busy_us", [0, 60_000_000], ids=["sleeps", "polls"])
def test_a_thread_that_polls_does_not_sleep_between_requests(tmp_path, busy_us):
    """With --io-busy-poll-us it polls until the next request comes; without, it sleeps. Both answer rightly."""
    models = write(tmp_path / "models", [Identity("identity", (("FP32", 1),))])
    exchange = messages.identity(64)
    with (
        doors.running_server("native", models, "--io-threads=1", f"--io-busy-poll-us={busy_us}") as server,
        grpcclient.InferenceServerClient(server.address, channel_args=[("inferd.busy_poll_us", busy_us)]) as client,
        Driver(server.address, busy_poll=bool(busy_us)) as driver,
    ):
        assert client.is_model_ready("identity")
        before = sleeps_of_io_threads(server.pid)
        report = driver.run(Fixed([exchange.request], [exchange.response]), requests=REQUESTS)
        after = sleeps_of_io_threads(server.pid)
    assert report.correct == REQUESTS
    slept = sum(after.values()) - sum(before.values())
    assert slept < REQUESTS // 2 if busy_us else slept > 0
