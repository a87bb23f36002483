"""inferd_client where it goes beyond tritonclient, and where connections end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import socket
import ssl
import subprocess
import sys
import threading
import weakref
from concurrent import futures
from pathlib import Path

import grpc
import ml_dtypes
import numpy as np
import pytest
import torch
import tritonclient.grpc
from hyperframe.frame import Frame

import inferd_client.grpc as grpcclient
import inferd_client.grpc.aio as aioclient
from bench.processes import free_port
from inferd_client import _connecting as links
from inferd_client._calling import retry_delay
from inferd_client.driver import Driver, Fixed
from inferd_client.pb import grpc_service_pb2 as pb
from inferd_client.utils import InferenceServerException, np_to_triton_dtype, shared_memory
from tests.conformance import doors
from tests.front.certificates import Authority

ROOT = Path(__file__).resolve().parents[2]
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def made(tensor, name="INPUT0", datatype="FP32"):
    return grpcclient.InferInput(name, list(tensor.shape), datatype).set_data_from_numpy(tensor)


def status(function, *arguments, **named):
    """The status of the failure of a call."""
    with pytest.raises(InferenceServerException) as raised:
        function(*arguments, **named)
    return raised.value.status()


# ---- what a process imports -----------------------------------------------------------------------------------------


def test_it_needs_no_server_and_imports_little():
    """Guards that the package is one by itself, and that nothing heavy is imported before it is needed."""
    code = (
        "import sys\n"
        "sys.modules['inferd'] = None\n"
        "import inferd_client.grpc, inferd_client.grpc.aio, inferd_client.utils.shared_memory\n"
        "print(sorted({'grpc', 'google', 'numpy', 'torch', 'rich', 'uvloop'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


NOT_AT_FIRST = {"asyncio", "dataclasses", "google", "grpc", "inspect", "json", "logging", "numpy", "ssl", "urllib"}


def test_importing_the_synchronous_client_is_light():
    """Guards the time of `import inferd_client.grpc`, by what it may not bring with it."""
    code = f"import sys, inferd_client.grpc; print(sorted({NOT_AT_FIRST!r} & (set(sys.modules) - before)))"
    command = [sys.executable, "-S", "-c", f"import sys; before = set(sys.modules); {code}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_without_the_native_part_it_says_so(tmp_path):
    """Guards that there is no silent slow path."""
    (tmp_path / "inferd_client").mkdir()
    (tmp_path / "inferd_client" / "__init__.py").write_text((ROOT / "inferd_client" / "__init__.py").read_text())
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import inferd_client"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "the native part of inferd_client cannot be imported" in done.stderr


# ---- tensors --------------------------------------------------------------------------------------------------------


def test_tensors_of_frameworks(server):
    """Guards set_data: arrays, torch and what speaks DLPack, contiguous or not, and their way back."""
    wanted = np.arange(40_000, dtype=np.float32).reshape(2, -1)
    givers = [wanted, torch.from_numpy(wanted.copy()), np.asfortranarray(wanted), torch.from_numpy(wanted.T.copy()).T]
    with grpcclient.InferenceServerClient(server.tcp) as client:
        for given in givers:
            taken = grpcclient.InferInput("INPUT0", [2, 20_000], "FP32").set_data(given)
            result = client.infer("fp32", [taken])
            assert (result.as_numpy("OUTPUT0") == wanted).all()
            assert torch.equal(result.as_torch("OUTPUT0"), torch.from_numpy(wanted))
        halves = torch.arange(6, dtype=torch.bfloat16).reshape(1, 6)
        result = client.infer("bf16", [grpcclient.InferInput("INPUT0", [1, 6], "BF16").set_data(halves)])
        assert torch.equal(result.as_torch("OUTPUT0"), halves)
        assert result.as_numpy("OUTPUT0").dtype == ml_dtypes.bfloat16


def test_set_data_refers_and_set_data_from_numpy_copies(server):
    """Guards when memory is looked at: the one says what it says now, the other what it says when it is sent."""
    tensor = np.zeros((1, 4), np.float32)
    refers = grpcclient.InferInput("INPUT0", [1, 4], "FP32").set_data(tensor)
    copies = made(tensor)
    tensor[:] = 1
    with grpcclient.InferenceServerClient(server.tcp) as client:
        assert client.infer("fp32", [refers]).as_numpy("OUTPUT0").sum() == 4
        assert client.infer("fp32", [copies]).as_numpy("OUTPUT0").sum() == 0


def test_arrays_in_the_other_byte_order(server):
    """Guards that their numbers are sent, not their bytes."""
    tensor = np.array([[1.5, -2, 3]], ">f4")
    given = grpcclient.InferInput("INPUT0", [1, 3], "FP32")
    with grpcclient.InferenceServerClient(server.tcp) as client:
        for each in (given.set_data_from_numpy(tensor), given.set_data(tensor)):
            assert (client.infer("fp32", [each]).as_numpy("OUTPUT0") == tensor).all()
        with grpcclient.InferenceServerClient(server.unix) as near, near.shared({"given": tensor}) as region:
            found = near.infer("fp32", [region.input("INPUT0", "given")]).as_numpy("OUTPUT0")
            assert (found == tensor).all()


def test_strings_of_any_type(server):
    """Guards that numpy's type for bytes is sent as bytes, not as its repr."""
    texts = np.array([[np.bytes_(b"\xff"), b"b", "c"]], object)
    with grpcclient.InferenceServerClient(server.tcp) as client:
        found = client.infer("text", [made(texts, datatype="BYTES")]).as_numpy("OUTPUT0")
    assert found.tolist() == [[b"\xff", b"b", b"c"]]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda module: module.InferenceServerClient("127.0.0.1:1", connections=0),
        lambda module: module.InferenceServerClient("127.0.0.1:1", connections=-1, load_balancing="round_robin"),
        lambda module: module.InferenceServerClient("models..test:8001"),
        lambda module: module.InferenceServerClient("127.0.0.1:1", ssl=True, private_key=__file__),
        lambda module: module.InferInput("x", [1], "FP32").set_shared_memory("region", 1 << 63),
        lambda module: made(np.array(["\ud800"], object), datatype="BYTES"),
    ],
)
@pytest.mark.parametrize("module", [grpcclient, aioclient])
def test_wrong_arguments_are_errors_of_the_client(module, wrong):
    """Guards that they are told at once, and not as errors of Python or numpy."""
    with pytest.raises(InferenceServerException):
        wrong(module)


@pytest.mark.parametrize("wrong", [{"priority": -1}, {"timeout": 1 << 63}, {"parameters": {"key": 1 << 63}}])
def test_numbers_that_do_not_fit_are_errors_of_the_client(server, wrong):
    """Guards the same for the arguments of a request."""
    with (
        grpcclient.InferenceServerClient(server.tcp) as client,
        pytest.raises(InferenceServerException, match="does not fit"),
    ):
        client.infer("fp32", [made(np.ones((1, 3), np.float32))], **wrong)


def test_arrays_that_have_no_datatype_are_not_shared(server):
    """Guards that the client says so, before a request names a datatype that there is not."""
    with (
        grpcclient.InferenceServerClient(server.tcp) as client,
        pytest.raises(InferenceServerException, match="no datatype for complex64"),
    ):
        client.shared({"array": np.zeros(2, np.complex64)})


OWN_REGIONS = """
import numpy as np
from inferd_client.utils import serialize_byte_tensor, shared_memory as shm

first, second = (shm.create_shared_memory_region(name, "/inferd-own-regions", 16) for name in "ab")
shm.set_shared_memory_region(first, [serialize_byte_tensor(np.empty(0, object)), np.array([100, 0, 0, 0], np.uint8)])
errors = []
for wrong in (
    lambda: shm.get_contents_as_numpy(second, np.object_, [1]),
    lambda: shm.set_shared_memory_region(first, [np.zeros(4, np.uint8)], -4),
    lambda: shm.create_shared_memory_region("c", "/no/such/place", 16),
    lambda: [shm.destroy_shared_memory_region(each) for each in (first, second, second)],
):
    try:
        wrong()
    except shm.SharedMemoryException:
        errors.append(1)
print(len(errors))
"""


def test_errors_of_regions_and_two_handles_to_one():
    """Guards that errors are those of the module, one of them a string longer than its region; and that a second
    handle does not confuse the tracker of the process, which would print a traceback.
    """
    done = subprocess.run([sys.executable, "-c", OWN_REGIONS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("4", "")


@pytest.mark.parametrize("scheme", ["", "grpc://", "dns:///"])
def test_the_load_driver_takes_the_addresses_of_the_client(server, scheme):
    """Guards that its requests name the server, not the whole address, which a server may refuse."""
    whole = pb.ServerLiveRequest().SerializeToString()
    with Driver(scheme + server.tcp) as driver:
        report = driver.run(Fixed([whole]), requests=1, path="/inference.GRPCInferenceService/ServerLive")
    assert report.statuses == {0: 1}


def test_responses_are_views(server):
    """Guards that large responses are not copied, can be written to, and outlive the client."""
    tensor = np.arange(300_000, dtype=np.float32).reshape(1, -1)
    with grpcclient.InferenceServerClient(server.tcp) as client:
        result = client.infer("fp32", [made(tensor)])
    found, again = result.as_numpy("OUTPUT0"), result.as_numpy("OUTPUT0")
    assert np.shares_memory(found, again)
    del result
    found += 1
    assert (again == tensor + 1).all()


def said(datatype, shape, raw, **contents):
    """A response with these words about its output."""
    message = pb.ModelInferResponse(model_name="m", id="1")
    output = message.outputs.add(name="y", datatype=datatype, shape=shape)
    if raw is not None:
        message.raw_output_contents.append(raw)
    for name, values in contents.items():
        getattr(output.contents, name).extend(values)
    return message.SerializeToString()


@pytest.mark.parametrize(
    "response",
    [
        b"\xff\xff",
        said("FP32", [2, 2], b"1234"),
        said("FP32", [1], b"1234567"),
        said("FP32", [-1], b"1234"),
        said("NOPE", [1], b"1234"),
        said("BYTES", [1], b"\xff\xff\xff\xff"),
        said("BYTES", [2], b"\1\0\0\0a"),
        said("FP32", [1] * 65, b"1234"),
        said("FP32", [0, 1 << 62], b""),
        said("INT8", [1], None, int_contents=[300]),
    ],
)
def test_responses_that_do_not_fit_together_are_no_tensors(response):
    """Guards against a server that lies: an error of the client's own that says so, not one of numpy, nor a tensor."""
    with pytest.raises(InferenceServerException, match=r"INTERNAL.*the response cannot be read"):
        grpcclient.InferResult(response).as_numpy("y")


def test_broken_responses_are_tensors_or_errors():
    """Guards the same for responses with wrong bytes anywhere."""
    chance = random.Random(1)
    whole = said("FP32", [2, 2], b"0123456789abcdef")
    for _ in range(3000):
        broken = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            broken[chance.randrange(len(broken))] = chance.randrange(256)
        result = grpcclient.InferResult(bytes(broken[: chance.choice([None, chance.randrange(len(broken))])]))
        with contextlib.suppress(InferenceServerException):
            found = result.as_numpy("y")
            assert found is None or found.size * found.itemsize <= len(whole)


def test_outputs_of_all_sizes_are_what_was_sent():
    """Guards tensors that lie anywhere in a response: several of any datatypes, shapes and order, aligned or not."""
    chance = random.Random(2)
    datatypes = [np.int8, np.uint16, np.float32, np.float64, np.bool_]
    for _ in range(300):
        arrays = {}
        message = pb.ModelInferResponse(model_name="m" * chance.randint(1, 9))
        for i in range(chance.randint(1, 4)):
            shape = [chance.randint(0, 3) if chance.random() < 0.3 else chance.randint(1, 9) for _ in range(i)]
            array = np.frombuffer(chance.randbytes(8 * 9**3), np.uint8)[: int(np.prod(shape))]
            arrays[f"y{i}"] = array.astype(chance.choice(datatypes)).reshape(shape)
        for name, array in arrays.items():
            message.outputs.add(name=name, datatype=np_to_triton_dtype(array.dtype), shape=array.shape)
            message.raw_output_contents.append(array.tobytes())
        result = grpcclient.InferResult(message.SerializeToString())
        for name, array in arrays.items():
            if array.size:
                found = result.as_numpy(name)
                assert found.dtype == array.dtype
                assert found.flags.aligned
                np.testing.assert_array_equal(found, array)
        assert result.as_numpy("z") is None
        assert result.as_numpy("\udc80") is None


def test_wide_requests(server):
    """Guards requests of more pieces than one write takes: 40 tensors, each by reference."""
    large = [np.full((1, 5000), i, np.float32) for i in range(40)]
    with grpcclient.InferenceServerClient(server.tcp) as client:
        inputs = [made(each, f"INPUT{i}") for i, each in enumerate(large)]
        assert status(client.infer, "fp32", inputs) == "StatusCode.INVALID_ARGUMENT"
        assert (client.infer("fp32", inputs[:1]).as_numpy("OUTPUT0") == large[0]).all()


def test_shared_arrays(server):
    """Guards client.shared: tensors of requests and responses are in the region, and nothing of it is left."""
    given = np.arange(8, dtype=np.float32).reshape(2, 4)
    with grpcclient.InferenceServerClient(server.unix) as client:
        with client.shared({"INPUT0": given, "OUTPUT0": ((2, 4), "float32")}, name="inferd-shared-test") as region:
            for scale in (1, 3):
                region["INPUT0"][:] = given * scale
                client.infer("fp32", [region.input("INPUT0")], outputs=[region.output("OUTPUT0")])
                assert (region["OUTPUT0"] == given * scale).all()
            assert list(client.get_system_shared_memory_status().regions) == ["inferd-shared-test"]
        assert not client.get_system_shared_memory_status().regions
        assert not Path("/dev/shm/inferd-shared-test").exists()
        with pytest.raises(InferenceServerException, match="strings"):
            client.shared({"x": np.array([b"a"], dtype=object)})


def test_views_outlive_their_regions(server):
    """Guards against views of memory that is not there any more."""
    with grpcclient.InferenceServerClient(server.unix) as client, client.shared({"x": np.arange(5000)}) as region:
        kept = region["x"]
    handle = shared_memory.create_shared_memory_region("r", "/inferd-views-test", 80_000)
    shared_memory.set_shared_memory_region(handle, [np.arange(10_000)])
    views = [shared_memory.get_contents_as_numpy(handle, np.int64, [10_000]) for _ in range(2)]
    shared_memory.destroy_shared_memory_region(handle)
    gc.collect()
    assert (kept == np.arange(5000)).all()
    assert all((view == np.arange(10_000)).all() for view in views)
    with pytest.raises(shared_memory.SharedMemoryException, match="destroyed"):
        shared_memory.get_contents_as_numpy(handle, np.int64, [10_000])


# ---- connections ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["tcp", "unix"])
def test_ways_to_a_server(server, way):
    """Guards TCP and unix sockets, with several connections, by the names that gRPC has for them."""
    address = getattr(server, way)
    for url in (address, address.replace("unix:", "unix://") if way == "unix" else f"dns:///{address}"):
        with grpcclient.InferenceServerClient(url, connections=3) as client, futures.ThreadPoolExecutor(6) as pool:
            wait = [pool.submit(client.is_server_live) for _ in range(60)]
            assert all(each.result() for each in wait)


def test_tls(models, tmp_path):
    """Guards TLS: mutual, with a large tensor, in both clients; and a client that has no certificates."""
    authority = Authority(tmp_path / "tls")
    pair, own = authority.issue("server", "DNS:localhost", "IP:127.0.0.1"), authority.issue("client")
    arguments = ("--grpc-use-ssl", "--grpc-use-ssl-mutual", f"--grpc-server-cert={pair.certificate}",
                 f"--grpc-server-key={pair.key}", f"--grpc-root-cert={authority.root}")  # fmt: skip
    tensor = np.arange(500_000, dtype=np.float32).reshape(1, -1)
    said = {
        "ssl": True,
        "root_certificates": str(authority.root),
        "private_key": str(own.key),
        "certificate_chain": str(own.certificate),
    }
    with doors.running_server("native", models, *arguments) as process:
        with grpcclient.InferenceServerClient(process.address, **said) as client:
            for _ in range(3):
                assert (client.infer("fp32", [made(tensor)]).as_numpy("OUTPUT0") == tensor).all()

        async def loop():
            async with aioclient.InferenceServerClient(process.address, **said) as client:
                results = await asyncio.gather(*(client.infer("fp32", [made(tensor)]) for _ in range(5)))
                assert all((result.as_numpy("OUTPUT0") == tensor).all() for result in results)

        asyncio.run(loop())
        with grpcclient.InferenceServerClient(process.address, ssl=True) as client:
            assert status(client.is_server_live) == "StatusCode.UNAVAILABLE"


def test_roots_without_extensions_are_trusted(models, tmp_path, monkeypatch):
    """Guards that a root is taken as grpcio takes it, where new contexts are strict, as in Python 3.13."""
    make = ssl.create_default_context

    def strict(**given):
        context = make(**given)
        context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", strict)
    authority = Authority(tmp_path / "tls")
    pair = authority.issue("server", "DNS:localhost", "IP:127.0.0.1")
    arguments = ("--grpc-use-ssl", f"--grpc-server-cert={pair.certificate}", f"--grpc-server-key={pair.key}")
    said = {"ssl": True, "root_certificates": str(authority.root)}
    with (
        doors.running_server("native", models, *arguments) as process,
        tritonclient.grpc.InferenceServerClient(process.address, **said) as theirs,
        grpcclient.InferenceServerClient(process.address, **said) as client,
    ):
        assert theirs.is_server_live() and client.is_server_live()


def test_nobody_is_there():
    """Guards that a call fails at once, with who was asked, and that callbacks are told, too."""
    url = f"127.0.0.1:{free_port()}"
    with grpcclient.InferenceServerClient(url) as client:
        with pytest.raises(InferenceServerException, match=f"UNAVAILABLE.*failed to connect to {url}: .*refused"):
            client.is_server_live()
        told = futures.Future()
        client.async_infer("x", [], lambda result, error: told.set_result(error))
        assert told.result(30).status() == "StatusCode.UNAVAILABLE"
    with pytest.raises(InferenceServerException, match="expected HOST:PORT"):
        grpcclient.InferenceServerClient("nobody")


def made_to(silent) -> int:
    """How many connections were made to a socket that accepts none."""
    silent.settimeout(0)
    count = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            silent.accept()[0].close()
            count += 1
    return count


def test_calls_that_wait_for_a_connection_share_its_failure(monkeypatch):
    """Guards that a host which takes connections and says nothing is not tried again for each call that waits for it.

    The first call begins an attempt. The others come while it is under way, so that they share the second one.
    """
    monkeypatch.setattr("inferd_client._connecting.CONNECT_SECONDS", 0.5)
    with (
        socket.create_server(("127.0.0.1", 0), backlog=64) as silent,
        grpcclient.InferenceServerClient(f"127.0.0.1:{silent.getsockname()[1]}", ssl=True) as client,
    ):
        calls = [begun(client, "x", [])[1] for _ in range(10)]
        with futures.ThreadPoolExecutor(10) as pool:
            assert set(pool.map(status, [client.is_server_live] * 10)) == {"StatusCode.UNAVAILABLE"}
        assert {each.result(60)[1].status() for each in calls} == {"StatusCode.UNAVAILABLE"}
        assert made_to(silent) < 10


def test_coroutines_that_wait_for_a_connection_share_its_failure(monkeypatch):
    """Guards the same for the asynchronous client, whose calls all wait before the first attempt begins."""
    monkeypatch.setattr("inferd_client._loops.CONNECT_SECONDS", 0.5)

    async def attempt(client):
        with pytest.raises(InferenceServerException) as raised:
            await client.is_server_live()
        return raised.value.status()

    async def loop(port):
        async with aioclient.InferenceServerClient(f"127.0.0.1:{port}", ssl=True) as client:
            return await asyncio.gather(*(attempt(client) for _ in range(10)))

    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        assert set(asyncio.run(loop(silent.getsockname()[1]))) == {"StatusCode.UNAVAILABLE"}
        assert made_to(silent) < 10


def test_the_client_comes_back(models, tmp_path):
    """Guards that a client outlives its server."""
    port = str(free_port())
    command = (sys.executable, "-m", "inferd", "serve", "--model-repository", str(models), "--grpc-port", port)
    with grpcclient.InferenceServerClient(f"127.0.0.1:{port}") as client:
        for _ in range(2):
            with doors.running(*command):
                assert client.is_server_ready()
                assert client.infer("fp32", [made(np.ones((1, 2), np.float32))]).as_numpy("OUTPUT0").sum() == 2
            assert status(client.is_server_live) == "StatusCode.UNAVAILABLE"


def test_a_silent_server_is_found_out():
    """Guards keepalive: a peer that answers nothing ends the call, in both clients."""
    alive = grpcclient.KeepAliveOptions(keepalive_time_ms=100, keepalive_timeout_ms=100)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"127.0.0.1:{silent.getsockname()[1]}"
        with grpcclient.InferenceServerClient(url, keepalive_options=alive) as client:
            assert status(client.is_server_live) == "StatusCode.UNAVAILABLE"

        async def loop():
            async with aioclient.InferenceServerClient(url, keepalive_options=alive) as client:
                with pytest.raises(InferenceServerException, match="UNAVAILABLE"):
                    await client.is_server_live()
            async with aioclient.InferenceServerClient(url, keepalive_options=alive) as client:
                with pytest.raises(InferenceServerException, match="UNAVAILABLE"):
                    await anext(client.stream_infer(nothing()))

        async def nothing():
            await asyncio.Event().wait()
            yield {}

        asyncio.run(loop())


def test_a_client_of_coroutines_that_nobody_has_leaves_no_connection():
    """Guards that the loop, which polls the connections, does not keep them."""
    with socket.create_server(("127.0.0.1", 0)) as silent:

        async def loop():
            client = aioclient.InferenceServerClient(f"127.0.0.1:{silent.getsockname()[1]}")
            with pytest.raises(InferenceServerException, match="DEADLINE_EXCEEDED"):
                await client.is_server_live(client_timeout=0.2)
            del client
            reader, writer = await asyncio.open_connection(sock=silent.accept()[0])
            await asyncio.wait_for(reader.read(), 60)
            writer.close()

        asyncio.run(loop())


def test_loops_one_after_the_other(server):
    """Guards that a client's stream and calls are polled by the loop that is running."""
    client = aioclient.InferenceServerClient(server.tcp)
    tensor = np.ones((1, 4), np.float32)

    async def requests():
        yield {"model_name": "fp32", "inputs": [made(tensor)]}

    async def stream():
        return [result.as_numpy("OUTPUT0").sum() async for result, _ in client.stream_infer(requests())]

    for _ in range(2):
        assert asyncio.run(asyncio.wait_for(client.infer("fp32", [made(tensor)]), 60)).as_numpy("OUTPUT0").sum() == 4
        assert asyncio.run(asyncio.wait_for(stream(), 60)) == [4]


def test_a_server_that_takes_nothing_does_not_hold_up_a_deadline():
    """Guards deadlines where the request cannot be written."""
    large = [made(np.zeros((1, 5_000_000), np.float32))]
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        grpcclient.InferenceServerClient(f"127.0.0.1:{silent.getsockname()[1]}") as client,
    ):
        for _ in range(3):
            assert status(client.infer, "x", large, client_timeout=0.2) == "StatusCode.DEADLINE_EXCEEDED"


def test_how_long_threads_poll():
    """Guards against a negative time, which would have threads poll for ever."""
    with pytest.raises(InferenceServerException, match="busy_poll_us: expected 0 or more microseconds, got -1"):
        grpcclient.InferenceServerClient("localhost:1", channel_args=[("inferd.busy_poll_us", -1)])


def test_responses_too_large(server):
    """Guards the limit of received messages."""
    limit = [("grpc.max_receive_message_length", 1000)]
    with grpcclient.InferenceServerClient(server.tcp, channel_args=limit) as client:
        large = [made(np.zeros((1, 1000), np.float32))]
        assert status(client.infer, "fp32", large) == "StatusCode.RESOURCE_EXHAUSTED"
        assert client.is_server_live()


# ---- callbacks and threads -------------------------------------------------------------------------------------------


def test_a_callback_that_exits_ends_no_other_call(server, monkeypatch):
    """Guards that SystemExit in a callback leaves the thread that reads for the other calls, and for the stream."""
    shown = []
    monkeypatch.setattr(sys, "excepthook", lambda *raised: shown.append(raised[0]))
    tensor = made(np.ones((1, 3), np.float32))

    def exits(result, error):
        sys.exit(1)

    with grpcclient.InferenceServerClient(server.tcp) as client:
        client.async_infer("late", [tensor], exits)
        heard = [futures.Future() for _ in range(2)]
        client.async_infer("later", [tensor], lambda result, error: heard[0].set_result(error))
        assert heard[0].result(60) is None
        client.start_stream(exits)
        client.async_stream_infer("fp32", [tensor])
        client.async_stream_infer("fp32", [tensor])
        client.stop_stream()
    assert shown == [SystemExit] * 3


def test_a_stream_is_stopped_after_its_last_callback(server):
    """Guards that stop_stream returns only when the callback that hears of the end has returned."""
    told, go_on, heard = threading.Event(), threading.Event(), []

    def hears(result, error):
        told.set()
        go_on.wait(60)
        heard.append(error)

    with grpcclient.InferenceServerClient(server.tcp) as client, futures.ThreadPoolExecutor(1) as pool:
        client.start_stream(hears)
        client.async_stream_infer("later", [made(np.ones((1, 3), np.float32))])
        stopped = pool.submit(lambda: (client.stop_stream(cancel_requests=True), list(heard)))
        assert told.wait(60)
        with contextlib.suppress(futures.TimeoutError):  # it has time to return too early
            stopped.result(0.2)
        go_on.set()
        assert [error.status() for error in stopped.result(60)[1]] == ["StatusCode.CANCELLED"]


def test_without_another_thread_a_call_fails_and_is_told(monkeypatch):
    """Guards a limit on threads: the callback hears of it, and calls go on when there are threads again."""
    real = threading.Thread.start

    def start(thread):
        if thread.name == "inferd-client":
            raise RuntimeError("can't start new thread")
        real(thread)

    url = f"127.0.0.1:{free_port()}"
    with grpcclient.InferenceServerClient(url) as client:
        for limited, expected in ((True, "RESOURCE_EXHAUSTED"), (False, "UNAVAILABLE")):
            with monkeypatch.context() as patched:
                if limited:
                    patched.setattr(threading.Thread, "start", start)
                assert begun(client, "x", [])[1].result(60)[1].status() == f"StatusCode.{expected}"


# ---- every response is the right one, whatever happens ---------------------------------------------------------------


class Breaking:
    """A relay to a server that breaks connections when it is told to."""

    def __init__(self, address: str) -> None:
        host, port = address.split(":")
        self._to = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._to)
            self._open |= {near, far}
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=pair, daemon=True).start()

    def _copy(self, source, target):
        try:
            while data := source.recv(1 << 16):
                target.sendall(data)
        except OSError:
            pass
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def cut(self):
        """Break all connections."""
        opened, self._open = self._open, set()
        for each in opened:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._listener.close()
        self.cut()


@pytest.fixture
def breaking(server):
    relay = Breaking(server.tcp)
    yield relay
    relay.close()


ALLOWED = {"StatusCode.UNAVAILABLE", "StatusCode.CANCELLED", "StatusCode.DEADLINE_EXCEEDED"}


def tensor_of(number, chance):
    return np.full((1, chance.choice([1, 16, 3000, 60_000])), number, np.float32)


def test_threads_under_cancels_and_reconnects(breaking):
    """Guards that no response is another call's: threads that wait, callbacks, cancels, deadlines, lost connections."""
    right, wrong, failures = [0], [], set()

    def judge(number, tensor, result, error):
        if error is not None:
            failures.add(error.status())
        elif not np.array_equal(result.as_numpy("OUTPUT0"), tensor) or result.id != str(number):
            wrong.append(number)
        else:
            right[0] += 1

    def work(seed):
        chance = random.Random(seed)
        pending = []
        for i in range(150):
            number = seed * 1000 + i
            tensor = tensor_of(number, chance)
            call = {"request_id": str(number), "client_timeout": chance.choice([None, 20.0, 0.002])}
            kind = chance.random()
            if kind < 0.5:
                try:
                    result = client.infer("fp32", [made(tensor)], **call)
                except InferenceServerException as error:
                    judge(number, tensor, None, error)
                else:
                    judge(number, tensor, result, None)
                continue
            done = threading.Event()
            pending.append(done)

            def told(result, error, number=number, tensor=tensor, done=done):
                judge(number, tensor, result, error)
                done.set()

            context = client.async_infer("fp32", [made(tensor)], told, **call)
            if kind < 0.7:
                context.cancel()
            if kind > 0.985:
                breaking.cut()
        for each in pending:
            assert each.wait(60), "a call has no end"

    with grpcclient.InferenceServerClient(breaking.address, connections=2) as client:
        with futures.ThreadPoolExecutor(6) as pool:
            for each in [pool.submit(work, seed) for seed in range(6)]:
                each.result()
        assert client.infer("fp32", [made(np.ones((1, 3), np.float32))]).as_numpy("OUTPUT0").sum() == 3
    assert not wrong
    assert failures <= ALLOWED
    assert right[0] > 300


async def test_coroutines_under_cancels_and_reconnects(breaking):
    """Guards the same for coroutines."""
    right, failures = 0, set()

    async def work(seed):
        nonlocal right
        chance = random.Random(seed)
        for i in range(60):
            number = seed * 1000 + i
            tensor = tensor_of(number, chance)
            task = asyncio.ensure_future(
                client.infer(
                    "fp32", [made(tensor)], request_id=str(number), client_timeout=chance.choice([20.0, 0.002])
                )
            )
            if chance.random() < 0.2:
                await asyncio.sleep(0)
                task.cancel()
            if chance.random() < 0.01:
                breaking.cut()
            try:
                result = await task
            except asyncio.CancelledError:
                continue
            except InferenceServerException as error:
                failures.add(error.status())
                continue
            assert np.array_equal(result.as_numpy("OUTPUT0"), tensor)
            assert result.id == str(number)
            right += 1

    async with aioclient.InferenceServerClient(breaking.address, connections=2) as client:
        await asyncio.gather(*(work(seed) for seed in range(16)))
        assert (await client.infer("fp32", [made(np.ones((1, 3), np.float32))])).as_numpy("OUTPUT0").sum() == 3
    assert failures <= ALLOWED
    assert right > 200


def test_calls_leave_nothing_behind(server):
    """Guards against calls that hold each other: without the cycle collector, tensors of past calls are gone."""

    class Tensor(np.ndarray):
        """An array whose end can be watched."""

    gone = []
    gc.disable()
    try:
        with grpcclient.InferenceServerClient(server.tcp) as client:
            for i in range(20):
                tensor = np.full((1, 20_000), i, np.float32).view(Tensor)
                gone.append(weakref.ref(tensor))
                taken = grpcclient.InferInput("INPUT0", [1, 20_000], "FP32").set_data(tensor)
                told = futures.Future()
                client.async_infer("fp32", [taken], lambda result, error, told=told: told.set_result(error))
                assert told.result(60) is None
                client.infer("fp32", [taken])
                assert status(client.infer, "absent", [taken]) == "StatusCode.NOT_FOUND"
                del tensor, taken, told
            client.is_server_live()
        assert sum(each() is not None for each in gone) <= 1
    finally:
        gc.enable()


# ---- retries --------------------------------------------------------------------------------------------------------


def field(number, content):
    return bytes([number << 3 | 2, len(content)]) + content


SHORT = field(1, b"\x10\x80\xe1\xeb\x17")  # google.protobuf.Duration of 50 000 000 nanoseconds
LONG = field(1, b"\x08\x90\x1c")  # and of 3,600 seconds
WRONG = [
    field(1, b"\x08" + b"\xff" * 9 + b"\x01"),  # -1 seconds
    field(1, b"\x10" + b"\xff" * 9 + b"\x01"),  # -1 nanoseconds
    field(1, b"\x08\x91\x1c"),  # longer than an hour
    field(1, b"\x08" + b"\xff" * 100 + b"\x01"),  # more bits than a number has
    field(1, field(1, b"x")),  # no number
    b"\x08\x05",  # no message
]


def retry_info(delay):
    return field(3, field(1, b"type.googleapis.com/google.rpc.RetryInfo") + field(2, delay))


class Busy(grpc.GenericRpcHandler):
    """A server that is busy at first, and says for how long."""

    def __init__(self, patience=3):
        self.asked = 0
        self.delay = SHORT
        self._patience = patience

    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(self._respond)

    def _respond(self, request, context):
        self.asked += 1
        if self.asked % self._patience:
            context.set_trailing_metadata([("grpc-status-details-bin", retry_info(self.delay))])
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "later")
        return pb.ServerLiveResponse(live=True).SerializeToString()


@pytest.fixture
def busy():
    handler = Busy()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers([handler])
    handler.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield handler
    server.stop(None)


def test_retries_wait_as_long_as_the_server_says(busy):
    """Guards RetryOptions: none without; with them as often as needed, but not past the deadline."""
    assert retry_delay(retry_info(SHORT)) == pytest.approx(0.05)
    assert retry_delay(retry_info(LONG)) == 3600
    assert [retry_delay(retry_info(delay)) for delay in WRONG] == [None] * len(WRONG)
    assert retry_delay(field(3, field(1, b"google.rpc.RetryInfo") + b"\x10\x05")) is None
    with grpcclient.InferenceServerClient(busy.address) as client:
        with pytest.raises(InferenceServerException, match="later") as raised:
            client.is_server_live()
        assert retry_delay(raised.value.debug_details()) == pytest.approx(0.05)
        assert busy.asked == 1
    busy.asked = 0
    with grpcclient.InferenceServerClient(busy.address, retries=grpcclient.RetryOptions(attempts=3)) as client:
        assert client.is_server_live()
        assert busy.asked == 3
        busy.delay = LONG
        assert status(client.is_server_live, client_timeout=60) == "StatusCode.RESOURCE_EXHAUSTED"
        assert busy.asked == 4
        busy.delay = SHORT

    async def loop():
        busy.asked = 0
        retries = aioclient.RetryOptions(attempts=3)
        async with aioclient.InferenceServerClient(busy.address, retries=retries) as client:
            assert await client.is_server_live()

    asyncio.run(loop())


def begun(client, *arguments):
    """A call that calls back: its context and the future of its end."""
    ended = futures.Future()
    context = client.async_infer(*arguments, lambda result, error: ended.set_result((result, error)))
    return context, ended


def test_calls_that_call_back_are_made_again(busy):
    """Guards RetryOptions for async_infer, and that a call that waits for its next attempt can be cancelled."""
    with grpcclient.InferenceServerClient(busy.address, retries=grpcclient.RetryOptions(attempts=3)) as client:
        for busy.delay in (SHORT, WRONG[0]):
            busy.asked = 0
            assert begun(client, "x", [])[1].result(60)[1] is None
            assert busy.asked == 3
    slow = grpcclient.RetryOptions(attempts=3, initial_backoff=1e15, max_backoff=1e15)
    with grpcclient.InferenceServerClient(f"127.0.0.1:{free_port()}", retries=slow) as client:
        calls = [begun(client, "x", []) for _ in range(3)]
        calls[1][0].cancel()
        assert calls[1][1].result(60)[1].status() == "StatusCode.CANCELLED"
        assert not calls[0][1].done()
    for _, ended in calls:
        assert ended.result(60)[1].status() == "StatusCode.CANCELLED"


def test_a_cancel_while_a_call_is_made_again(monkeypatch):
    """Guards that a cancel is not lost that comes while the next attempt waits for its connection."""
    connecting, go_on = threading.Event(), threading.Event()
    attempts = []

    def connect(*arguments):
        attempts.append(arguments)
        if len(attempts) == 1:
            raise ConnectionRefusedError
        connecting.set()
        go_on.wait(60)
        return links.connect(*arguments)

    monkeypatch.setattr("inferd_client._channel.connect", connect)
    retries = grpcclient.RetryOptions(initial_backoff=0.0)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        grpcclient.InferenceServerClient(f"127.0.0.1:{silent.getsockname()[1]}", retries=retries) as client,
    ):
        context, ended = begun(client, "x", [])
        assert connecting.wait(60)
        context.cancel()
        go_on.set()
        assert ended.result(60)[1].status() == "StatusCode.CANCELLED"


def whole_request(connection) -> bytes:
    """The bytes that a client sends until a request has ended; fewer, where its connection ends before."""
    received = b""
    while not any("END_STREAM" in frame.flags for frame in frames(received[len(PREFACE) :])):
        part = connection.recv(1 << 16)
        if not part:
            break
        received += part
    return received


def frames(data: bytes):
    """The frames in `data` that are complete."""
    while len(data) >= 9:
        frame, size = Frame.parse_frame_header(memoryview(data[:9]))
        if len(data) < 9 + size:
            return
        yield frame
        data = data[9 + size :]


@pytest.fixture
def stalled(monkeypatch):
    """A client whose connections are made when it is let go on, and never on the thread of the test."""
    connecting, go_on = threading.Event(), threading.Event()
    caller = threading.current_thread()

    def connect(*arguments):
        assert threading.current_thread() is not caller
        connecting.set()
        go_on.wait(60)
        return links.connect(*arguments)

    monkeypatch.setattr("inferd_client._channel.connect", connect)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        client = grpcclient.InferenceServerClient(f"127.0.0.1:{listener.getsockname()[1]}")
        yield client, connecting, go_on, listener
        go_on.set()
        client.close()


def test_a_connection_that_is_not_made_holds_up_no_deadline(stalled):
    """Guards that a call which calls back does not wait for its connection on the thread that makes it, and is told of
    its deadline, of a cancel and of the end of the client while that connection is made.
    """
    client, connecting, _, _ = stalled
    waiting = begun(client, "x", [])[1]
    assert connecting.wait(60)
    ended = futures.Future()
    client.async_infer("x", [], lambda result, error: ended.set_result(error), client_timeout=0.05)
    assert ended.result(60).status() == "StatusCode.DEADLINE_EXCEEDED"
    context, cancelled = begun(client, "x", [])
    context.cancel()
    assert cancelled.result(60)[1].status() == "StatusCode.CANCELLED"
    assert not waiting.done()
    client.close()
    assert waiting.result(60)[1].status() == "StatusCode.CANCELLED"


def test_a_connection_that_is_made_after_the_end_of_the_client_is_closed(stalled):
    """Guards that neither the connection nor the call that waited for it outlives `close`."""
    client, connecting, go_on, listener = stalled
    with futures.ThreadPoolExecutor(1) as pool:
        call = pool.submit(status, client.is_server_live)
        assert connecting.wait(60)
        client.close()
        go_on.set()
        assert call.result(60) == "StatusCode.CANCELLED"
    near, _ = listener.accept()
    with near:
        near.settimeout(60)
        while near.recv(1 << 16):
            pass


@pytest.fixture
def dropping():
    """A server that breaks each connection when a request has come; how many have, and its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    dropped = []

    def run():
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                with near:
                    dropped.append(whole_request(near))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield dropped, f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def test_what_may_have_been_executed_is_not_repeated_in_sequences(dropping):
    """Guards that a lost connection does not have a sequence's request, or a load, executed twice."""
    dropped, url = dropping
    retries = grpcclient.RetryOptions(attempts=3, initial_backoff=0.01)

    def asked(function, *arguments, **named):
        dropped.clear()
        assert status(function, *arguments, **named) == "StatusCode.UNAVAILABLE"
        return len(dropped)

    with grpcclient.InferenceServerClient(url, retries=retries) as client:
        assert asked(client.infer, "x", []) == 3
        assert asked(client.infer, "x", [], sequence_id=7) == 1
        assert asked(client.infer, "x", [], sequence_start=True) == 1
        assert asked(client.load_model, "x") == 1
        assert asked(client.unload_model, "x") == 1
        for named, count in (({}, 3), ({"sequence_id": 7}, 1)):
            dropped.clear()
            ended = futures.Future()
            client.async_infer("x", [], lambda result, error, ended=ended: ended.set_result(error), **named)
            assert ended.result(60).status() == "StatusCode.UNAVAILABLE"
            assert len(dropped) == count

    def loop(**named):
        async def run():
            async with aioclient.InferenceServerClient(url, retries=retries) as client:
                await client.infer("x", [], **named)

        asyncio.run(run())

    assert asked(loop) == 3
    assert asked(loop, sequence_end=True) == 1


def test_a_deadline_holds_while_another_call_connects():
    """Guards that a call with a deadline does not wait for a connection that another call makes."""
    with futures.ThreadPoolExecutor(2) as pool:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            url = f"127.0.0.1:{silent.getsockname()[1]}"
            with grpcclient.InferenceServerClient(url, ssl=True) as client:
                other = pool.submit(client.is_server_live)
                assert status(client.is_server_live, client_timeout=0.1) == "StatusCode.DEADLINE_EXCEEDED"
                assert status(client.is_server_live, client_timeout=0.1) == "StatusCode.DEADLINE_EXCEEDED"
                assert not other.done()

            async def loop():
                async with aioclient.InferenceServerClient(url, ssl=True) as client:
                    other = asyncio.ensure_future(client.is_server_live())
                    await asyncio.sleep(0)
                    with pytest.raises(InferenceServerException, match="DEADLINE_EXCEEDED"):
                        await client.is_server_live(client_timeout=0.1)
                    assert not other.done()
                    other.cancel()

            asyncio.run(loop())
        assert isinstance(other.exception(60), InferenceServerException)


def test_keepalive_without_calls(server):
    """Guards that a connection that sends PINGs while it is idle is made, and answers calls."""
    alive = grpcclient.KeepAliveOptions(keepalive_time_ms=60_000, keepalive_permit_without_calls=True)
    with grpcclient.InferenceServerClient(server.tcp, keepalive_options=alive) as client:
        assert client.is_server_live(client_timeout=60)


def test_a_server_that_is_not_there_yet_is_waited_for():
    """Guards that retries make a connection again, too, in all three ways of calling."""
    port = free_port()
    retries = grpcclient.RetryOptions(attempts=1000, initial_backoff=0.01, max_backoff=0.01)
    client = grpcclient.InferenceServerClient(f"127.0.0.1:{port}", retries=retries)

    async def loop():
        async with aioclient.InferenceServerClient(f"127.0.0.1:{port}", retries=retries) as client:
            return await client.is_server_live()

    with client, futures.ThreadPoolExecutor(2) as pool:
        waited = [pool.submit(client.is_server_live), pool.submit(asyncio.run, loop()), begun(client, "x", [])[1]]
        assert not futures.wait(waited, timeout=0.1).done
        server = grpc.server(futures.ThreadPoolExecutor(1))
        server.add_generic_rpc_handlers([Busy(patience=1)])
        server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()
        try:
            assert [each.result(60) for each in waited[:2]] == [True, True]
            assert waited[2].result(60)[1] is None
        finally:
            server.stop(None)


def test_compressed_responses_are_read(busy):
    """Guards responses that a server compresses."""
    server = grpc.server(futures.ThreadPoolExecutor(1), compression=grpc.Compression.Gzip)
    handler = grpc.unary_unary_rpc_method_handler(
        lambda request, context: pb.ServerMetadataResponse(name="x" * 5000).SerializeToString()
    )
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("inference.GRPCInferenceService", {"ServerMetadata": handler})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with grpcclient.InferenceServerClient(f"127.0.0.1:{port}") as client:
            assert client.get_server_metadata().name == "x" * 5000
            assert status(client.is_server_live) == "StatusCode.UNIMPLEMENTED"
    finally:
        server.stop(None)
