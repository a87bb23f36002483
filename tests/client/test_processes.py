"""inferd_client and the process: forks, the interpreter's end, signals."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import inferd_client.grpc as grpcclient
import inferd_client.grpc.aio as aioclient

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60


def made(value):
    return [grpcclient.InferInput("INPUT0", [1, 4], "FP32").set_data_from_numpy(np.full((1, 4), value, np.float32))]


def value_of(result):
    return result.as_numpy("OUTPUT0")[0, 0]


def forked(work):
    """Do it in a copy of this process. Returns the copy's number."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(PATIENCE)
            status = 0 if work() else 1
        finally:
            os._exit(status)
    return child


def test_a_fork_has_connections_of_its_own(server):
    """Guards that a child does not write to its parent's connection."""
    with grpcclient.InferenceServerClient(server.tcp) as client:
        client.infer("fp32", made(1))
        child = forked(lambda: value_of(client.infer("fp32", made(7))) == 7)
        found = [value_of(client.infer("fp32", made(i))) for i in range(50)]
        assert os.waitpid(child, 0)[1] == 0
        assert found == list(range(50))


def test_a_fork_has_streams_and_callbacks_of_its_own(server):
    """Guards that a child that cancels, ends and begins what its parent has begun leaves the parent's calls alone."""
    responses = queue.Queue()

    def told(result, error):
        responses.put(error or value_of(result))

    with grpcclient.InferenceServerClient(server.tcp) as client:
        client.start_stream(told)
        client.async_stream_infer("fp32", made(1))
        assert responses.get(timeout=PATIENCE) == 1
        waiting = client.async_infer("late", made(2), told)

        def child():
            waiting.cancel()
            own = queue.Queue()
            client.start_stream(lambda result, error: own.put(error or value_of(result)))
            client.async_stream_infer("fp32", made(7))
            right = own.get(timeout=PATIENCE) == 7
            client.stop_stream()
            client.close()
            return right

        assert os.waitpid(forked(child), 0)[1] == 0
        client.async_stream_infer("fp32", made(3))
        assert {responses.get(timeout=PATIENCE), responses.get(timeout=PATIENCE)} == {2, 3}


@pytest.mark.parametrize("uses", [True, False])
async def test_a_fork_has_a_loop_of_its_own(server, uses):
    """Guards that a child's loop does not take the connections away from the loop of its parent."""

    async def work():
        right = not uses or value_of(await client.infer("fp32", made(7))) == 7
        await client.close()
        return right

    async with aioclient.InferenceServerClient(server.tcp) as client:
        await client.infer("fp32", made(1))
        waiting = asyncio.ensure_future(client.infer("late", made(2)))
        await client.infer("fp32", made(3))
        child = forked(lambda: asyncio.run(work()))
        assert (await asyncio.to_thread(os.waitpid, child, 0))[1] == 0
        assert value_of(await asyncio.wait_for(waiting, PATIENCE)) == 2
        assert value_of(await asyncio.wait_for(client.infer("fp32", made(4)), PATIENCE)) == 4


async def test_a_fork_leaves_the_stream_of_its_parents_loop_alone(server):
    """Guards that a child that cancels a stream of coroutines does not end it for its parent."""
    more = asyncio.Event()

    async def requests():
        yield {"model_name": "fp32", "inputs": made(1)}
        await more.wait()
        yield {"model_name": "fp32", "inputs": made(2)}

    async with aioclient.InferenceServerClient(server.tcp) as client:
        responses = client.stream_infer(requests())
        assert value_of((await anext(responses))[0]) == 1
        child = forked(lambda: not responses.cancel())
        assert (await asyncio.to_thread(os.waitpid, child, 0))[1] == 0
        more.set()
        assert value_of((await asyncio.wait_for(anext(responses), PATIENCE))[0]) == 2


OPEN = {
    "stream": "client.start_stream(dict)",
    "call": "client.async_infer('x', [], dict); client.start_stream(dict)",
    "thread": "threading.Thread(target=client.is_server_live, daemon=True).start(); client.start_stream(dict)",
}


@pytest.mark.parametrize("what", OPEN)
def test_the_interpreter_ends_with_calls_open(what):
    """Guards against a client that waits, when the interpreter ends, for threads that run no more.

    Nothing but the module refers to the client, so that it is deleted then: `dict` is a callback that has no module.
    """
    with socket.create_server(("127.0.0.1", 0)) as silent:
        code = (
            "import threading\n"
            "import inferd_client.grpc as grpcclient\n"
            f"client = grpcclient.InferenceServerClient('127.0.0.1:{silent.getsockname()[1]}')\n"
            f"{OPEN[what]}\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE
        )
    assert (done.returncode, done.stderr) == (0, "")


class Interrupted(Exception):
    """Raised by the handler of a signal."""


def test_a_signal_comes_to_a_thread_that_reads_for_others(server):
    """Guards against signals that come between two polls of a busy connection, and are not looked for."""

    def handle(*_):
        raise Interrupted

    def busy():
        while not over.is_set():
            client.infer("fp32", made(1))

    def send():
        begun.wait(PATIENCE)
        os.kill(os.getpid(), signal.SIGUSR1)
        if not interrupted.wait(PATIENCE):
            client.close()  # so that this fails, and does not hang

    over = threading.Event()
    former = signal.signal(signal.SIGUSR1, handle)
    try:
        with grpcclient.InferenceServerClient(server.tcp) as client:
            client.infer("fp32", made(1))  # imports: an import that a signal breaks off keeps its lock
            others = [threading.Thread(target=busy, daemon=True) for _ in range(3)]
            for each in others:
                each.start()
            for _ in range(20):
                begun, interrupted = threading.Event(), threading.Event()
                sender = threading.Thread(target=send)
                sender.start()
                with pytest.raises(Interrupted):
                    begun.set()
                    while True:
                        client.infer("later", made(1))
                interrupted.set()
                sender.join()
            over.set()
            for each in others:
                each.join()
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # one may still be sent
        over.set()
        begun.set()
        interrupted.set()
        sender.join()
        signal.signal(signal.SIGUSR1, former)
