"""Tensors in shared memory, with real servers: offsets, refusals, and other clients, which stay unharmed."""

from __future__ import annotations

import queue
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as triton_shm
from tritonclient.utils import serialize_byte_tensor

from inferd_client.pb import grpc_service_pb2 as pb
from tests.conformance.shared import Object, connected, register, serving, unregister

Code = grpc.StatusCode
PLACES = {
    "tcp, copied": ("native", "tcp", ("--allow-client-shm=true",)),
    "tcp, in place": ("native", "tcp", ("--allow-client-shm=true", "--client-shm-access=map")),
    "unix, in place": ("native", "unix", ()),
    "grpcio": ("grpcio", "tcp", ("--allow-client-shm=true",)),
}
SIZE = 1 << 16


@pytest.fixture(scope="module", params=PLACES)
def server(request, repository, tmp_path_factory):
    """A server that serves shared memory; `address` is where."""
    door, where, options = PLACES[request.param]
    with serving(door, repository, tmp_path_factory.mktemp("server"), *options) as server:
        server.address = getattr(server, where)
        yield server


@pytest.fixture
def stub(server):
    with connected(server.address) as stub:
        yield stub
        unregister(stub)


@pytest.fixture
def made():
    with Object(bytes(SIZE)) as made:
        yield made


@pytest.fixture
def region(stub, made):
    """The object, registered as "r"."""
    register(stub, "r", made, SIZE)
    return made


def place(tensor, region="r", size=None, offset=None):
    """Have a tensor of a request refer to a region."""
    if region is not None:
        tensor.parameters["shared_memory_region"].string_param = region
    if size is not None:
        tensor.parameters["shared_memory_byte_size"].int64_param = size
    if offset is not None:
        tensor.parameters["shared_memory_offset"].int64_param = offset


def asking(model="simple", shape=(1, 2), datatype="FP32", **placed):
    """A request with INPUT0 in a region."""
    request = pb.ModelInferRequest(model_name=model)
    tensor = request.inputs.add(name="INPUT0", datatype=datatype, shape=shape)
    place(tensor, **{"size": 8, **placed})
    return request


def answering(request, name="OUTPUT0", **placed):
    """The request with an output in a region, too."""
    place(request.outputs.add(name=name), **placed)
    return request


def refused(call, *arguments):
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments)
    return caught.value.code(), caught.value.details()


# ---- tritonclient ----


def test_tritonclient_with_inputs_and_outputs_in_regions(server):
    """Like Triton's example simple_grpc_shm_client.py, with a raw input and a raw output in addition."""
    numbers, whole = np.arange(4, dtype=np.float32)[None], np.arange(4, dtype=np.int32).reshape(1, 2, 2)
    source = triton_shm.create_shared_memory_region("input_data", "/inferd-test-input", 64)
    target = triton_shm.create_shared_memory_region("output_data", "/inferd-test-output", 64)
    try:
        with triton.InferenceServerClient(server.address) as client:
            triton_shm.set_shared_memory_region(source, [numbers], offset=5)
            client.register_system_shared_memory("input_data", "/inferd-test-input", 64)
            client.register_system_shared_memory("output_data", "/inferd-test-output", 64)
            inputs = [triton.InferInput("INPUT0", [1, 4], "FP32"), triton.InferInput("INPUT1", [1, 2, 2], "INT32")]
            inputs[0].set_shared_memory("input_data", 16, offset=5)
            inputs[1].set_data_from_numpy(whole)
            outputs = [triton.InferRequestedOutput("OUTPUT0"), triton.InferRequestedOutput("OUTPUT1")]
            outputs[0].set_shared_memory("output_data", 40, offset=3)
            result = client.infer("pair", inputs, outputs=outputs)
            np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), whole)
            answer = result.get_output("OUTPUT0")
            assert (answer.datatype, list(answer.shape), dict(answer.parameters)) == ("FP32", [1, 4], {})
            assert list(result.get_response().raw_output_contents) == [b"", whole.tobytes()]
            np.testing.assert_array_equal(
                triton_shm.get_contents_as_numpy(target, np.float32, [1, 4], offset=3), numbers
            )
            client.unregister_system_shared_memory()
    finally:
        triton_shm.destroy_shared_memory_region(source)
        triton_shm.destroy_shared_memory_region(target)


def test_tritonclient_with_strings_in_regions(server):
    words = np.array([[b"", b"two", "drei é".encode(), bytes(300)]], dtype=np.object_)
    encoded = serialize_byte_tensor(words).item()
    source = triton_shm.create_shared_memory_region("input_data", "/inferd-test-input", 4096)
    try:
        with triton.InferenceServerClient(server.address) as client:
            triton_shm.set_shared_memory_region(source, [serialize_byte_tensor(words)])
            client.register_system_shared_memory("strings", "/inferd-test-input", 4096)
            tensor = triton.InferInput("INPUT0", [1, 4], "BYTES")
            tensor.set_shared_memory("strings", len(encoded))
            output = triton.InferRequestedOutput("OUTPUT0")
            output.set_shared_memory("strings", 2048, offset=2048)
            result = client.infer("strings", [tensor], outputs=[output])
            assert list(result.get_output("OUTPUT0").shape) == [1, 4]
            found = triton_shm.get_contents_as_numpy(source, np.object_, [1, 4], offset=2048)
            np.testing.assert_array_equal(found, words)
            client.unregister_system_shared_memory("strings")
    finally:
        triton_shm.destroy_shared_memory_region(source)


def test_tensors_of_a_stream_may_lie_in_shared_memory(server, made):
    answers: queue.Queue = queue.Queue()
    with triton.InferenceServerClient(server.address) as client:
        client.register_system_shared_memory("r", made.key, SIZE)
        client.start_stream(lambda result, error: answers.put((result, error)))
        for row in range(4):
            made.write(np.float32([row, row + 1]).tobytes(), offset=row * 8)
            tensor = triton.InferInput("INPUT0", [1, 2], "FP32")
            tensor.set_shared_memory("r" if row != 2 else "other", 8, offset=row * 8)
            output = triton.InferRequestedOutput("OUTPUT0")
            output.set_shared_memory("r", 8, offset=1000 + row * 8)
            client.async_stream_infer("simple", [tensor], outputs=[output], request_id=str(row))
        for row in range(4):
            result, error = answers.get(timeout=60)
            if row == 2:
                assert "Unable to find shared memory region: 'other'" in error.message()
                continue
            assert error is None
            assert result.get_response().id == str(row)
            assert made.read(1000 + row * 8, 8) == np.float32([row, row + 1]).tobytes()
        client.stop_stream()
        client.unregister_system_shared_memory()


# ---- where ----


def test_raw_contents_belong_to_the_inputs_that_are_not_placed(stub, region):
    region.write(np.float32([1, 2, 3, 4]).tobytes())
    request = pb.ModelInferRequest(model_name="pair")
    place(request.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 4]), size=16)
    request.inputs.add(name="INPUT1", datatype="INT32", shape=[1, 2, 2])
    request.raw_input_contents.append(np.int32([5, 6, 7, 8]).tobytes())
    assert list(stub.ModelInfer(request).raw_output_contents) == [
        np.float32([1, 2, 3, 4]).tobytes(), np.int32([5, 6, 7, 8]).tobytes(),
    ]  # fmt: skip
    request.raw_input_contents[:] = [b"", request.raw_input_contents[0]]
    assert refused(stub.ModelInfer, request)[0] is Code.INVALID_ARGUMENT, "an empty entry is no place holder"


@pytest.mark.parametrize("to", [0, 4, 8000, 7996])
def test_an_output_may_overlap_the_input(stub, region, to):
    content = np.arange(2000, dtype=np.float32).tobytes()
    region.write(content)
    answer = stub.ModelInfer(answering(asking(shape=[1, 2000], size=8000), size=8000, offset=to))
    assert list(answer.raw_output_contents) == [b""]
    assert region.read(to, 8000) == content


def test_room_beyond_the_output_is_left_alone(stub, region):
    region.write(b"\xff" * 200)
    stub.ModelInfer(answering(asking(), size=100, offset=100))
    assert region.read(100, 100) == b"\xff" * 100
    region.write(bytes(8))
    stub.ModelInfer(answering(asking(), size=100, offset=100))
    assert region.read(100, 100) == bytes(8) + b"\xff" * 92


def test_a_tensor_without_elements_may_lie_in_shared_memory(stub, region):
    answer = stub.ModelInfer(answering(asking(shape=[1, 0], size=0), size=0))
    assert (list(answer.outputs[0].shape), list(answer.raw_output_contents)) == ([1, 0], [b""])


def test_requests_of_many_clients_share_batches(server, stub):
    """Every answer is that of its own request, with regions and raw tensors in the same batches."""

    def work(number):
        with connected(server.address) as own, Object(bytes(8192)) as memory:
            name = f"region {number}"
            register(own, name, memory, 8192)
            for turn in range(40):
                content = np.full(64, number * 1000 + turn, np.float32).tobytes()
                if (number + turn) % 3 == 0:
                    request = pb.ModelInferRequest(model_name="simple", raw_input_contents=[content])
                    request.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 64])
                else:
                    memory.write(content, offset=number)
                    request = asking(shape=[1, 64], region=name, size=256, offset=number)
                if turn % 2:
                    answering(request, region=name, size=256, offset=4000)
                answer = own.ModelInfer(request).raw_output_contents[0]
                assert (memory.read(4000, 256) if turn % 2 else answer) == content
            unregister(own, name)

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))


# ---- what is refused ----

UNKNOWN = (Code.NOT_FOUND, "Unable to find shared memory region: 'nothing'")
REFUSED = {
    "unknown region": (asking(region="nothing"), *UNKNOWN),
    "unknown region of an output": (answering(asking(), region="nothing", size=8), *UNKNOWN),
    "no size": (asking(size=None), Code.INVALID_ARGUMENT,
        "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter for tensor 'INPUT0'"),
    "size without region": (asking(region=None), Code.INVALID_ARGUMENT,
        "'shared_memory_byte_size' can not be specified without 'shared_memory_region' parameter for tensor 'INPUT0'"),
    "offset without region": (asking(region=None, size=None, offset=0), Code.INVALID_ARGUMENT,
        "'shared_memory_offset' can not be specified without 'shared_memory_region' parameter for tensor 'INPUT0'"),
    "offset behind the end": (asking(offset=SIZE), Code.INVALID_ARGUMENT,
        "Invalid offset for shared memory region: 'r'"),
    "negative offset": (asking(offset=-8), Code.INVALID_ARGUMENT, "Invalid offset for shared memory region: 'r'"),
    "end behind the end": (asking(offset=SIZE - 4), Code.INVALID_ARGUMENT,
        "Invalid offset + byte size for shared memory region: 'r'"),
    "negative size": (asking(size=-8), Code.INVALID_ARGUMENT,
        "Invalid offset + byte size for shared memory region: 'r'"),
    "sum that overflows": (asking(size=-8, offset=8), Code.INVALID_ARGUMENT, "Integer overflow detected: byte_size"),
    "other bytes than the shape has": (asking(size=12), Code.INVALID_ARGUMENT,
        "[request id: <id_unknown>] input byte size mismatch for input 'INPUT0' for model 'simple'. Expected 8, got 12",
        ),
    "too small for the output": (answering(asking(), size=7, offset=16), Code.INTERNAL,
        "shared memory size specified with the request for output 'OUTPUT0' (7 bytes) should be at least 8 bytes to "
        "hold the results"),
    "output behind the end": (answering(asking(), size=8, offset=SIZE - 7), Code.INVALID_ARGUMENT,
        "Invalid offset + byte size for shared memory region: 'r'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_place_is_refused_and_the_region_still_serves(stub, region, case):
    request, code, text = REFUSED[case]
    found, details = refused(stub.ModelInfer, request)
    assert found is code
    assert details.startswith(text)
    stub.ModelInfer(asking())


@pytest.mark.parametrize(
    ("key", "kind", "value"),
    [("shared_memory_region", "int64_param", 1), ("shared_memory_byte_size", "uint64_param", 8),
     ("shared_memory_offset", "string_param", "0"), ("shared_memory_offset", "double_param", 0.0)],
)  # fmt: skip
def test_parameters_of_the_wrong_kind(stub, region, key, kind, value):
    request = answering(asking(offset=0), size=8, offset=8)
    for name in ("INPUT0", "OUTPUT0"):
        changed = pb.ModelInferRequest.FromString(request.SerializeToString())
        tensor = next(each for each in (*changed.inputs, *changed.outputs) if each.name == name)
        setattr(tensor.parameters[key], kind, value)
        expected = "string_param" if key.endswith("region") else "int64_param"
        assert refused(stub.ModelInfer, changed) == (
            Code.INVALID_ARGUMENT,
            f"invalid value type for '{key}' parameter for tensor '{name}', expected {expected}.",
        )


def test_contents_beside_a_region(stub, region):
    request = asking()
    request.inputs[0].contents.fp32_contents.extend([1, 2])
    assert refused(stub.ModelInfer, request) == (
        Code.INVALID_ARGUMENT,
        "unexpected 'content' provided when using shared memory for input tensor 'INPUT0' for model 'simple'",
    )


def test_classification_into_a_region(stub, region):
    request = answering(asking("scores", [1, 4], size=16), size=64)
    request.outputs[0].parameters["classification"].int64_param = 1
    assert refused(stub.ModelInfer, request) == (
        Code.INVALID_ARGUMENT, "output can't set both 'shared_memory_region' and 'classification'",
    )  # fmt: skip


@pytest.mark.parametrize("length", [b"\xff\xff\xff\xff", b"\x05\0\0\0"])
def test_strings_that_do_not_end_in_the_region(stub, region, length):
    region.write(length + b"text")
    code, text = refused(stub.ModelInfer, asking("strings", [1, 1], "BYTES"))
    assert code is Code.INVALID_ARGUMENT
    assert "incomplete string data for inference input 'INPUT0'" in text


def test_where_it_is_off_requests_are_refused(repository, tmp_path):
    with serving("native", repository, tmp_path) as closed, connected(closed.tcp) as stub:
        for request in (asking(), answering(pb.ModelInferRequest(model_name="simple"), size=8)):
            if not request.inputs:
                request.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 2])
                request.raw_input_contents.append(bytes(8))
            code, text = refused(stub.ModelInfer, request)
            assert code is Code.UNIMPLEMENTED
            assert text.startswith("Client shared memory is disabled. Start the server with '--allow-client-shm=true'")


def test_a_thousand_hostile_references(server, stub, region):
    """Each is refused with a status of the client's fault or answered rightly; nothing outside the region changes."""
    chance = random.Random(7)
    numbers = [0, 1, 7, 8, 9, SIZE - 8, SIZE - 7, SIZE, SIZE + 1, 2**31, 2**32, 2**62, 2**63 - 1, -1, -8, -(2**63)]
    with Object(b"\x5a" * SIZE) as other:
        register(stub, "short", other, 100, 50)
        answered = 0
        for turn in range(1000):
            if turn % 100 == 99:  # a right one between
                request = answering(asking(), size=8, offset=64)
            else:
                request = asking(
                    chance.choice(["simple", "strings", "whole"]),
                    chance.choice([[1, 2], [1, 0], [2, 1], [2**32, 2**32], [2**62, 4], [-1, 2], [1]]),
                    chance.choice(["FP32", "BYTES"]),
                    region=chance.choice(["r", "short", "", "nothing", None, "r" * 300]),
                    size=chance.choice([*numbers, None]),
                    offset=chance.choice([*numbers, None]),
                )
                if chance.random() < 0.5:
                    answering(
                        request, region=chance.choice(["r", "short", None]), size=chance.choice([*numbers, None]),
                        offset=chance.choice([*numbers, None]),
                    )  # fmt: skip
            try:
                stub.ModelInfer(request)
                answered += 1
            except grpc.RpcError as error:
                assert error.code() in (Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.INTERNAL), error
                if error.code() is Code.INTERNAL:
                    assert "should be at least" in error.details()
        assert answered >= 10
        assert other.read(0, 50) == b"\x5a" * 50
        assert other.read(150) == b"\x5a" * (SIZE - 150)
    assert region.path.stat().st_size == SIZE
    assert stub.ServerLive(pb.ServerLiveRequest()).live


# ---- memory that changes or goes away ----


def test_a_region_that_is_unregistered_while_it_is_used(server, stub, made):
    """The request that uses it is answered from the old memory; the name is free at once, and the memory goes after."""
    made.write(np.float32([42]).tobytes())
    register(stub, "r", made, 64)
    with made.path.open("rb") as old, Object(np.float32([7, 7]).tobytes()) as second:
        running = stub.ModelInfer.future(answering(asking("slow", [1, 1], size=4), size=4, offset=4))
        stub.ModelInfer(asking())  # on the same connection: the slow one has been bound before
        unregister(stub, "r")
        made.path.unlink()
        assert refused(stub.ModelInfer, asking())[0] is Code.NOT_FOUND
        register(stub, "r", second, 8)
        assert stub.ModelInfer(asking()).raw_output_contents[0] == second.read()
        running.result()
        assert old.read(8) == np.float32([42, 42]).tobytes()
        assert second.read() == np.float32([7, 7]).tobytes()
    while made.name in _maps(server):  # the answer is out before its request is freed
        pass


def _maps(server):
    return Path(f"/proc/{server.process.pid}/maps").read_text()


def test_objects_that_shrink_while_requests_run(server, stub):
    """The client that truncates gets INVALID_ARGUMENT; everybody else gets what they asked for."""
    size = 1 << 20
    content = np.random.default_rng(3).random(size // 4, np.float32).tobytes()
    stop, wrong = threading.Event(), []

    def others():
        with connected(server.address) as own, Object(content) as memory:
            register(own, "whole", memory, size)
            while not stop.is_set():
                answer = own.ModelInfer(asking(shape=[1, size // 4], region="whole", size=size))
                if answer.raw_output_contents[0] != content:
                    wrong.append("another client's answer")
            unregister(own, "whole")

    thread = threading.Thread(target=others)
    thread.start()
    shortened = 0
    try:
        for turn in range(25):
            with Object(content + bytes(size)) as memory:
                register(stub, "shrinks", memory, 2 * size)
                request = asking(shape=[1, size // 4], region="shrinks", size=size)
                if turn % 2:
                    answering(request, region="shrinks", size=size, offset=size)
                calls = [stub.ModelInfer.future(request) for _ in range(4)]
                with memory.path.open("r+b") as file:
                    file.truncate(turn * 1000)
                calls.append(stub.ModelInfer.future(request))
                for call in calls:
                    if call.exception() is not None:
                        assert call.code() is Code.INVALID_ARGUMENT
                        assert "'shrinks' has been shortened since it was registered" in call.details()
                        shortened += 1
                assert calls[-1].code() is Code.INVALID_ARGUMENT
                unregister(stub, "shrinks")
    finally:
        stop.set()
        thread.join()
    assert shortened >= 25
    assert wrong == []


def test_an_output_into_an_object_that_shrank(stub, region):
    with region.path.open("r+b") as file:
        file.truncate(100)
    code, text = refused(stub.ModelInfer, answering(asking(), size=8, offset=8192))
    assert code is Code.INVALID_ARGUMENT
    assert "'r' has been shortened" in text
    assert region.path.stat().st_size == 100, "the server does not make it longer"


def test_strings_that_change_while_they_are_checked(server, stub, region):
    """Lengths in a BYTES tensor are what they were when they were checked, however fast the client changes them."""
    good, bad = b"\x04\0\0\0text", b"\xf0\xff\0\0text"
    stop = threading.Event()

    def change():
        with region.path.open("r+b", buffering=0) as file:
            while not stop.is_set():
                for content in (good, bad):
                    file.seek(0)
                    file.write(content)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(300):
            try:
                assert stub.ModelInfer(asking("strings", [1, 1], "BYTES")).raw_output_contents[0] == good
            except grpc.RpcError as error:
                assert error.code() is Code.INVALID_ARGUMENT
    finally:
        stop.set()
        thread.join()
