"""A client beside others who take what they can: it goes on as if it were alone, and loses nothing.

Each test attacks a real server and has polite clients beside the attack; the table in docs/operations.md, "Who goes
first", has a line for each. What the attack costs in time is measured by bench.abuse.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.conformance import doors, raw
from tests.conformance.client import request
from tests.framing import framed

MIB = 1 << 20
INFER = "/inference.GRPCInferenceService/ModelInfer"
IDENTITY = """
backend: "identity"
max_batch_size: 0
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
instance_group { kind: KIND_CPU count: 1 }
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("neighbours")
    (root / "quick" / "1").mkdir(parents=True)
    (root / "quick" / "config.pbtxt").write_text(IDENTITY)
    with doors.running_server("native", root) as process:
        yield process.address


def message(model: str = "quick", elements: int = 16) -> bytes:
    return request(model, np.zeros(elements, np.float32)).SerializeToString()


def ask(client: raw.Client, model: str = "quick", elements: int = 16, **headers: str) -> int:
    """Send a whole ModelInfer, however large; its stream."""
    stream = client.headers(INFER, **headers)
    data = framed(message(model, elements))
    for at in range(0, len(data), 16384):
        client.receive_until(lambda: client.h2.local_flow_control_window(stream) >= 16384)
        client.data(stream, data[at : at + 16384], end=at + 16384 >= len(data))
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
