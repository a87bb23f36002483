"""A client beside others who take what they can: it goes on as if it were alone, and loses nothing.

Each test attacks a real server and has polite clients beside the attack; the table in docs/operations.md, "Who goes
first", has a line for each. What the attack costs in time is measured by tests.storms.abuse.
"""

from __future__ import annotations

import gzip
import socket

import numpy as np
import pytest

from tests.conformance import doors, raw
from tests.conformance.client import request
from tests.framing import Answer, framed

MIB = 1 << 20
LIVE = "/inference.GRPCInferenceService/ServerLive"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
INFER = "/inference.GRPCInferenceService/ModelInfer"
IDENTITY = """
backend: "identity"
max_batch_size: 0
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
instance_group { kind: KIND_CPU count: 1 }
"""
SENDER = IDENTITY.replace("identity", "python").replace("count: 1", "count: 2")
SENDER += "model_transaction_policy { decoupled: true }"
SENDER_MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        # one response after the other, for as long as anybody waits for them
        for request in requests:
            sender = request.get_response_sender()
            count = int(request.inputs()[0].as_numpy()[0])
            while count and not sender.is_cancelled():
                count -= 1
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.zeros(65536, np.float32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
POLITE = "127.0.0.2"  # another client than those who come from 127.0.0.1


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("neighbours")
    for name, config in {"quick": IDENTITY, "sender": SENDER}.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
    (root / "sender" / "1" / "model.py").write_text(SENDER_MODEL)
    with doors.running_server("native", root, "--grpc-send-timeout=1000000") as process:
        yield process.address


def message(model: str = "quick", elements: int = 16) -> bytes:
    return request(model, np.zeros(elements, np.float32)).SerializeToString()


def send(client: raw.Client, stream: int, data: bytes) -> None:
    """Send the one message of a call, as flow control lets it."""
    for at in range(0, len(data), 16384):
        client.receive_until(lambda: client.h2.local_flow_control_window(stream) >= 16384)
        client.data(stream, data[at : at + 16384], end=at + 16384 >= len(data))


def ask(client: raw.Client, model: str = "quick", elements: int = 16, **headers: str) -> int:
    """Send a whole ModelInfer, however large; its stream."""
    stream = client.headers(INFER, **headers)
    send(client, stream, framed(message(model, elements)))
    return stream


@pytest.mark.parametrize("narrow", [False, True], ids=["windows used up", "no windows"])
def test_a_stream_that_is_not_read_holds_up_no_other_on_its_connection(server, narrow):
    """A proxy has many users on one connection. Two of them do not read 3 MiB each: the others' calls are answered
    all the same, with their small answers or large ones that they read."""
    with raw.Client(server, acknowledge_data=False) as proxy:
        proxy.h2.increment_flow_control_window(1 << 28)
        if narrow:
            proxy.h2.update_settings({4: 0})
        stalled = [ask(proxy, elements=3 * MIB // 4) for _ in range(2)]
        proxy.receive_until(lambda: all(proxy.answers[stream].headers for stream in stalled))
        polite = []
        for _ in range(20):
            polite.append(ask(proxy, grpc_timeout="20S"))
            if narrow:
                proxy.h2.increment_flow_control_window(4096, polite[-1])
        assert [proxy.answer(stream).status for stream in polite] == [0] * 20
        large = ask(proxy, elements=MIB // 4, grpc_timeout="20S")
        proxy.h2.increment_flow_control_window(2 * MIB, large)
        proxy.flush()
        assert proxy.answer(large).status == 0
        assert not any(proxy.answers[stream].ended for stream in stalled)
        for stream in stalled:
            proxy.h2.increment_flow_control_window(4 * MIB, stream)
        proxy.flush()
        assert [proxy.answer(stream).status for stream in stalled] == [0, 0], "they are kept for the one who is slow"


def test_a_connection_that_is_not_read_begins_no_further_calls(server):
    """What holds up all calls of a connection, its own window, does hold them up: the server would gather answers for
    nobody. Other connections notice nothing."""
    with raw.Client(server, acknowledge_data=False) as unread, raw.Client(server) as other:
        unread.h2.update_settings({4: 16 * MIB})
        stalled = [ask(unread, elements=3 * MIB // 4) for _ in range(2)]
        unread.receive_until(lambda: all(unread.answers[stream].headers for stream in stalled))
        waiting = ask(unread)
        assert [other.answer(ask(other)).status for _ in range(20)] == [0] * 20
        assert not unread.answers[waiting].headers
        unread.h2.increment_flow_control_window(1 << 28)
        unread.flush()
        assert [unread.answer(stream).status for stream in (*stalled, waiting)] == [0, 0, 0]


def answered(*clients: raw.Client) -> int:
    """How many calls of these clients the server has answered when it answers a PING of each, all sent at once."""
    for client in clients:
        client.h2.ping(b"question")
        client.flush()
    for client in clients:
        client.receive_until(lambda: client.pings)  # noqa: B023
        client.pings = 0
    return sum(answer.ended for client in clients for answer in client.answers.values())


def test_messages_that_inflate_to_much_hold_up_no_other_client(server):
    """Bombs of one client wait for threads that inflate; the small message of another is inflated before them."""
    bomb = gzip.compress(bytes(16 * MIB), 9)
    small = gzip.compress(message(elements=MIB // 16))
    with raw.Client(server) as attacker, raw.Client(server, source=POLITE) as polite:
        for _ in range(24):
            stream = attacker.headers(INFER, grpc_encoding="gzip")
            send(attacker, stream, framed(bomb, compressed=1))
        for _ in range(2):
            stream = polite.headers(INFER, grpc_encoding="gzip")
            send(polite, stream, framed(small, compressed=1))
            assert polite.answer(stream).status == 0
        assert answered(attacker) < 24, "all the bombs went first"
        attacker.receive_until(lambda: all(answer.ended for answer in attacker.answers.values()))
        assert {answer.status for answer in attacker.answers.values()} == {13}, "they are inflated, and are no requests"


def flooded(client: raw.Client, path: str, count: int) -> None:
    """Send many calls at once."""
    for _ in range(count):
        stream = client.h2.get_next_available_stream_id()
        fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "localhost", "te": "trailers"}
        client.h2.send_headers(stream, [*fields.items(), ("content-type", "application/grpc")])
        client.h2.send_data(stream, framed(b""), end_stream=True)
        client.answers[stream] = Answer()


def test_calls_that_python_handles_let_an_inference_of_their_connection_pass(server):
    """Many calls come in one piece, and a ModelInfer behind them: it does not wait until all handlers have run."""
    with raw.Client(server) as client:
        client.receive_until(lambda: client.h2.remote_settings.max_concurrent_streams < 10_000)
        flooded(client, LIVE, 900)
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MIB)
        inference = ask(client)
        client.receive_until(lambda: client.answers[inference].ended)
        before = sum(answer.ended for stream, answer in client.answers.items() if stream != inference)
        assert client.answers[inference].status == 0
        client.receive_until(lambda: all(answer.ended for answer in client.answers.values()))
        assert {answer.status for answer in client.answers.values()} == {0}
        assert before < 800, "the handlers of calls that came earlier ran first"


def test_a_client_with_few_calls_goes_before_one_with_thousands(server):
    """Handlers begin by the turns of clients, not in the order in which the calls have come."""
    attackers = [raw.Client(server) for _ in range(4)]
    with raw.Client(server, source=POLITE) as polite:
        polite.receive_until(lambda: polite.h2.remote_settings.max_concurrent_streams < 10_000)
        for attacker in attackers:
            attacker.receive_until(lambda: attacker.h2.remote_settings.max_concurrent_streams < 10_000)  # noqa: B023
            flooded(attacker, LIVE, 1000)
        floods = [attacker.h2.data_to_send() for attacker in attackers]
        for attacker, flood in zip(attackers, floods, strict=True):
            attacker.socket.sendall(flood)
        assert polite.call(LIVE).status == 0
        assert answered(*attackers) < 4000
        for attacker in attackers:
            attacker.receive_until(lambda: all(answer.ended for answer in attacker.answers.values()))  # noqa: B023
            assert {answer.status for answer in attacker.answers.values()} == {0}
            attacker.socket.close()


def test_a_call_that_waits_for_its_turn_ends_at_its_deadline(server):
    """No handler has begun the call, and its deadline is watched all the same."""
    with raw.Client(server) as client:
        client.receive_until(lambda: client.h2.remote_settings.max_concurrent_streams < 10_000)
        flooded(client, LIVE, 900)
        hasty = client.headers(LIVE, grpc_timeout="1m")
        client.data(hasty, framed(b""), end=True)
        assert client.answer(hasty).status in (0, 4)
        client.receive_until(lambda: all(answer.ended for answer in client.answers.values()))


def streamed(client: raw.Client, count: int) -> int:
    """Ask the decoupled model for so many responses of 256 KiB; the stream, which stays open."""
    stream = client.headers(STREAM)
    asked = request("sender", np.array([count], np.float32)).SerializeToString()
    client.data(stream, framed(asked), end=True)
    return stream


def test_streams_that_are_not_read_keep_no_instance_from_others(server):
    """Two clients do not read what both instances of a decoupled model send. While nobody else wants the instances,
    they may; when somebody does, the streams end, and the model is told that nobody waits for its responses."""
    with raw.Client(server, acknowledge_data=False) as unread, raw.Client(server, source=POLITE) as polite:
        unread.h2.increment_flow_control_window(MIB)
        stalled = [streamed(unread, 1_000_000) for _ in range(2)]
        unread.receive_until(lambda: all(unread.answers[stream].data for stream in stalled))
        for _ in range(2):
            assert polite.answer(streamed(polite, 1), timeout=50).status == 0
        unread.h2.increment_flow_control_window(1 << 28)
        for stream in stalled:
            unread.h2.increment_flow_control_window(1 << 28, stream)
        unread.flush()
        unread.receive_until(lambda: any(unread.answers[stream].ended for stream in stalled))
        ended = next(unread.answers[stream] for stream in stalled if unread.answers[stream].ended)
        assert (ended.status, "has not read its responses" in ended.details) == (8, True)
