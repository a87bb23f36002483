"""What an operator has chosen for the server's threads holds: only those that wait for the front have other slices."""

from __future__ import annotations

import contextlib
import sys
import threading
from pathlib import Path

import pytest

import inferd_client.grpc as grpcclient
from bench.repository import Identity, write
from tests.conformance import doors
from tests.front.scheduled import BATCH, DEADLINE, OTHER, RESET_ON_FORK, Attributes, attributes_of, set_attributes
from tests.waiting import wait_until

MS = 1_000_000
SHORT = MS // 10
CHOSEN = {
    "other": Attributes(OTHER, 0, 8 * MS, 0),
    "batch": Attributes(BATCH, 0, 8 * MS, 0),
    "deadline": Attributes(DEADLINE, RESET_ON_FORK, 40 * MS, 100 * MS),
}
CLIENTS = 4


def can_be(chosen: Attributes) -> bool:
    """Whether this system, and this user, may have such threads."""
    found = []

    def work() -> None:
        with contextlib.suppress(OSError):
            set_attributes(chosen)
            found.append(attributes_of(0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found == [chosen]


def threads_of(pid: int) -> dict[int, tuple[str, Attributes]]:
    """Name and attributes of each thread, by its number."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it ends now
            found[int(task.name)] = (task / "comm").read_text().strip(), attributes_of(int(task.name))
    return found


@contextlib.contextmanager
def busy(address: str):
    """Clients whose calls go through the front, from the event loop and from I/O threads; each counts its own."""
    counts = [0] * CLIENTS
    stopping = threading.Event()

    def work(number: int) -> None:
        with grpcclient.InferenceServerClient(address, channel_args=[("own", number)]) as client:
            while not stopping.is_set():
                client.get_inference_statistics()
                counts[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield counts
    finally:
        stopping.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("kind", CHOSEN)
def test_threads_have_the_slices_of_the_operator_when_they_have_left_the_front(tmp_path, kind):
    """Beside the I/O threads, whose slices are always short. A thread that is started later inherits the operator's."""
    chosen = CHOSEN[kind]
    if not can_be(chosen):
        pytest.skip("threads cannot be scheduled so here")
    models = write(tmp_path / "models", [Identity("identity", (("FP32", 1),))])
    launcher = (sys.executable, "-m", "tests.front.scheduled", ",".join(map(str, chosen)))
    server = (sys.executable, "-m", "inferd", "serve", "--model-repository", str(models), "--grpc-port", "0")
    with doors.running(*launcher, *server, "--io-threads=2", "--model-control-mode=explicit") as process:

        def has_waited() -> bool:
            return attributes_of(process.pid).runtime == SHORT

        with busy(process.address) as counts:
            if kind == "deadline":  # no such thread may be seen with other attributes
                wait_until(lambda: has_waited() or min(counts) > 100)
            else:
                wait_until(has_waited, "the event loop has never waited for the front")
        with grpcclient.InferenceServerClient(process.address) as client:
            client.load_model("identity")
            assert attributes_of(process.pid) == chosen
            threads = threads_of(process.pid).values()
    others = [attributes for name, attributes in threads if name != "inferd-io"]
    if kind == "deadline":
        others.remove(chosen)
        assert {attributes.policy for attributes in others} == {OTHER}
    else:
        assert set(others) == {chosen}
    assert [attributes.runtime for name, attributes in threads if name == "inferd-io"] == [SHORT, SHORT]
