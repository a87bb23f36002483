"""Calls to other models: from execute, from threads, from coroutines, several at a time, answered in any order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inferd.backends.python.worker import protocol as p
from inferd_client.pb import grpc_service_pb2 as pb
from tests.backends.python.peer import Packet, Peer, Sent, worker

HEAD = """
    import asyncio, json, threading
    import numpy as np, triton_python_backend_utils as pb_utils
    FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
    def ask(value, **more):
        tensor = pb_utils.Tensor("A", np.asarray(value, np.float32))
        return pb_utils.InferenceRequest(model_name="other", inputs=[tensor], requested_output_names=["B"], **more)
    def result(response):
        if response.has_error():
            raise pb_utils.TritonModelException(response.error().message())
        return pb_utils.get_output_tensor_by_name(response, "B").as_numpy()
    def out(value):
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.asarray(value, np.float32))])
"""
ONE = np.array([[1]], np.float32)


class Call:
    """A BLS_REQUEST that arrived at the peer."""

    def __init__(self, peer: Peer, *, large: bool = False) -> None:
        self.peer = peer
        self.packet = peer.expect(peer.side if large else peer.calls, p.BLS_REQUEST)
        record = self.packet.record
        self.parent, self.timeout, size, _ = p.BLS_HEAD.unpack_from(record)
        self.message = pb.ModelInferRequest.FromString(record[p.BLS_HEAD.size :])
        assert len(record) == p.BLS_HEAD.size + size

    @property
    def value(self) -> np.ndarray:
        shape = tuple(self.message.inputs[0].shape)
        return np.frombuffer(self.message.raw_input_contents[0], np.float32).reshape(shape)

    def answer(self, array: np.ndarray, *, final: bool = True, arena: bool = False, **parameters: Any) -> None:
        message = pb.ModelInferResponse(model_name="other", model_version="1", id=self.message.id)
        output = message.outputs.add(name="B", datatype="FP32")
        output.shape.extend(array.shape)
        message.raw_output_contents.append(array.tobytes())
        for name, value in parameters.items():
            field = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}[type(value)]
            setattr(message.parameters[name], field, value)
        flags = (p.FINAL if final else 0) | (p.IN_ARENA if arena else 0)
        self.send(message.SerializeToString(), flags, offset=40 << 20 if arena else 0)

    def end(self) -> None:
        self.send(b"", p.FINAL | p.EMPTY)

    def fail(self, text: str, code: int) -> None:
        self.send(text.encode(), p.FINAL | p.FAILED, code=code)

    def send(self, record: bytes, flags: int, **head: int) -> None:
        self.peer.send(self.peer.calls, p.BLS_RESPONSE, record, flags=flags, number=self.packet.id, **head)


def test_what_a_call_carries(tmp_path: Path) -> None:
    source = f"""{HEAD}
    class TritonPythonModel:
        def execute(self, requests):
            more = dict(request_id="mine", correlation_id="talk", model_version=3, flags=3, timeout=99, priority=2,
                        parameters={{"a": 1, "b": "x", "c": True, "d": 0.5, "e": -7, "f": 2**63}})
            response = ask(np.ones((2, 3)), **more).exec()
            said = json.loads(response.parameters())
            assert said == {{"p": "q", "n": -3, "t": True, "d": 1.5}}, said
            return [out(result(response))]
    """
    with worker(tmp_path, source) as peer:
        peer.start(Sent({"IN": ONE}, number=0x10009, extra={"request_id": "theirs"}))
        call = Call(peer)
        message = call.message
        assert (call.parent, message.id, message.model_version) == (0x10009, "mine", "3")
        values = {name: value.WhichOneof("parameter_choice") for name, value in message.parameters.items()}
        assert values == {
            "a": "int64_param",
            "b": "string_param",
            "c": "bool_param",
            "d": "double_param",
            "e": "int64_param",
            "f": "uint64_param",
            "sequence_id": "string_param",
            "sequence_start": "bool_param",
            "sequence_end": "bool_param",
            "timeout": "int64_param",
            "priority": "int64_param",
        }
        assert message.parameters["e"].int64_param == -7
        assert message.parameters["f"].uint64_param == 2**63
        assert message.parameters["sequence_id"].string_param == "talk"
        assert (message.inputs[0].name, message.inputs[0].datatype) == ("A", "FP32")
        assert call.value.tolist() == [[1, 1, 1], [1, 1, 1]]
        call.answer(call.value + 1, p="q", n=-3, t=True, d=1.5)
        assert peer.done()[0].outputs["OUT"].tolist() == [[2, 2, 2], [2, 2, 2]]


def test_the_id_of_the_request_is_inherited(tmp_path: Path) -> None:
    source = f"""{HEAD}
    class TritonPythonModel:
        def execute(self, requests):
            return [out(result(ask(1).exec())) for _ in requests]
    """
    with worker(tmp_path, source) as peer:
        peer.start(Sent({"IN": ONE}, extra={"request_id": "theirs"}))
        call = Call(peer)
        assert call.message.id == "theirs"
        call.answer(ONE)
        peer.done()
        # Of several, nobody knows for which the call is made.
        peer.start(Sent({"IN": ONE}, extra={"request_id": "a"}), Sent({"IN": ONE}, extra={"request_id": "b"}))
        for _ in range(2):
            call = Call(peer)
            assert (call.message.id, call.parent) == ("", 0)
            call.answer(ONE)
        peer.done()


def test_large_inputs_and_outputs_go_through_the_arena(tmp_path: Path) -> None:
    source = f"""{HEAD}
    class TritonPythonModel:
        def execute(self, requests):
            response = ask(np.arange(100_000)).exec()
            return [out(result(response)[:5].copy())]
    """
    with worker(tmp_path, source) as peer:
        peer.start(Sent({"IN": ONE}))
        call = Call(peer, large=True)
        assert call.packet.flags & p.IN_ARENA
        call.answer(call.value + 1, arena=True)
        assert peer.done()[0].outputs["OUT"].tolist() == [1, 2, 3, 4, 5]
        released = peer.expect(peer.side, p.RELEASE)
        assert (released.id, released.offset) == (0, 40 << 20)


def test_a_large_call_for_which_there_is_no_memory_is_answered_with_an_error(tmp_path: Path) -> None:
    """However the model waits for it: it was not sent, and nothing else ends it."""
    source = f"""{HEAD}
    class TritonPythonModel:
        async def execute(self, requests):
            def large():
                return ask(np.arange(100_000))
            found = [large().exec(), *large().exec(decoupled=True), await large().async_exec()]
            found += [response async for response in await large().async_exec(decoupled=True)]
            return [pb_utils.InferenceResponse([], pb_utils.TritonError(str([r.error().message() for r in found])))]
    """
    with worker(tmp_path, source) as peer:
        peer.start(Sent({"IN": ONE}))
        for _ in range(4):
            asked = peer.expect(peer.side, p.ALLOCATE)
            peer.send(peer.side, p.ALLOCATED, number=asked.id, code=p.CODE_UNAVAILABLE)
        assert peer.done()[0].error.count("the limit of the model is reached") == 4


def test_what_is_said_of_a_large_call_does_not_overtake_it(tmp_path: Path) -> None:
    source = f"""{HEAD}
    class TritonPythonModel:
        def execute(self, requests):
            for response in ask(np.arange(100_000)).exec(decoupled=True):
                break
            return [out(1)]
    """
    with worker(tmp_path, source) as peer:
        peer.start(Sent({"IN": ONE}))
        call = Call(peer, large=True)
        call.answer(ONE, final=False)
        assert peer.expect(peer.side, p.BLS_CREDIT).id == call.packet.id
        assert peer.expect(peer.side, p.BLS_CANCEL).id == call.packet.id
        peer.done()


def test_threads_and_the_main_thread_call_at_once_again_and_again(tmp_path: Path) -> None:
    source = f"""{HEAD}
    class TritonPythonModel:
        def execute(self, requests):
            wrong = []
            together = threading.Barrier(6)
            def work(first):
                for i in range(first, first + 40):
                    together.wait()
                    if float(result(ask([i]).exec())[0]) != 2 * i:
                        wrong.append(i)
            threads = [threading.Thread(target=work, args=(100 * k,)) for k in range(1, 6)]
            for thread in threads: thread.start()
            work(0)
            for thread in threads: thread.join()
            return [out([len(wrong)])]
    """
    with worker(tmp_path, source) as peer:
        peer.start(Sent({"IN": ONE}))
        for i in range(40):
            calls = [Call(peer) for _ in range(6)]
            for call in calls if i % 2 else reversed(calls):
                call.answer(call.value * 2)
        assert peer.done()[0].outputs["OUT"].tolist() == [0]


def test_a_coroutine_can_await_several_calls_at_once(tmp_path: Path) -> None:
    source = f"""{HEAD}
    class TritonPythonModel:
        async def execute(self, requests):
            both = await asyncio.gather(ask([1]).async_exec(), ask([2]).async_exec())
            last = await ask([float(sum(result(r)[0] for r in both))]).async_exec()
            return [out(result(last))]
    """
    with worker(tmp_path, source) as peer:
        peer.start(Sent({"IN": ONE}, number=0x1000A))
        calls = [Call(peer), Call(peer)]
        assert [call.parent for call in calls] == [0x1000A] * 2
        for call in reversed(calls):
            call.answer(call.value * 10)
        call = Call(peer)
        assert call.value.tolist() == [30]
        call.answer(call.value)
        assert peer.done()[0].outputs["OUT"].tolist() == [30]


STREAM = f"""{HEAD}
    class TritonPythonModel:
        def execute(self, requests):
            responses = ask(1).exec(decoupled=True)
            first = [len(r.output_tensors()) for r in responses]
            again = [len(r.output_tensors()) for r in responses]
            assert first == again, (first, again)
            return [out(first)]
"""


def test_a_decoupled_call_is_iterated_over(tmp_path: Path) -> None:
    with worker(tmp_path, STREAM) as peer:
        peer.start(Sent({"IN": ONE}))
        call = Call(peer)
        assert call.packet.flags & p.DECOUPLED
        for _ in range(3):
            call.answer(ONE, final=False)
        call.end()
        assert peer.done()[0].outputs["OUT"].tolist() == [1, 1, 1, 0]
        credit = [peer.expect(peer.calls, p.BLS_CREDIT) for _ in range(2)]
        assert all((packet.id, packet.offset) == (call.packet.id, 1) for packet in credit)


def test_a_decoupled_call_to_a_model_that_answers_once(tmp_path: Path) -> None:
    with worker(tmp_path, STREAM) as peer:
        peer.start(Sent({"IN": ONE}))
        Call(peer).answer(ONE)
        assert peer.done()[0].outputs["OUT"].tolist() == [1]


@pytest.mark.parametrize("begun", ["await ask(1).async_exec(decoupled=True)", "ask(1).exec(decoupled=True)"])
def test_coroutines_iterate_over_decoupled_calls(tmp_path: Path, begun: str) -> None:
    """However the call was made, somebody reads what the coroutine waits for."""
    source = f"""{HEAD}
    class TritonPythonModel:
        async def execute(self, requests):
            sender = requests[0].get_response_sender()
            responses = {begun}
            async for response in responses:
                if response.output_tensors():
                    sender.send(out(result(response)))
            for response in responses:  # once more, without waiting
                if response.output_tensors():
                    sender.send(out(result(response)))
            sender.send(flags=FINAL)
    """
    with worker(tmp_path, source, decoupled=True, window=100) as peer:
        peer.execute(Sent({"IN": ONE}))
        call = Call(peer)
        for i in range(3):
            call.answer(ONE * i, final=False)
        call.end()
        values = []
        while True:
            packet = peer.receive(peer.side)
            if packet.kind == p.RESPONSE:
                if packet.flags & p.EMPTY:
                    break
                values.append(peer.answers(packet.record)[0].outputs["OUT"].item())
        assert values == [0, 1, 2, 0, 1, 2]


def test_a_blocking_iteration_in_a_coroutine_does_not_stand_still(tmp_path: Path) -> None:
    source = f"""{HEAD}
    class TritonPythonModel:
        async def execute(self, requests):
            responses = await ask(1).async_exec(decoupled=True)
            values = [float(result(r)[0, 0]) for r in responses]
            return [out(values)]
    """
    with worker(tmp_path, source) as peer:
        peer.start(Sent({"IN": ONE}))
        call = Call(peer)
        call.answer(ONE, final=False)
        call.answer(ONE * 2)
        assert peer.done()[0].outputs["OUT"].tolist() == [1, 2]


def test_an_iteration_that_is_given_up_is_cancelled(tmp_path: Path) -> None:
    source = f"""{HEAD}
    class TritonPythonModel:
        def execute(self, requests):
            for response in ask(1).exec(decoupled=True):
                break
            return [out(1)]
    """
    with worker(tmp_path, source) as peer:
        peer.start(Sent({"IN": ONE}))
        call = Call(peer)
        call.answer(ONE, final=False)
        peer.expect(peer.calls, p.BLS_CREDIT)
        assert peer.expect(peer.calls, p.BLS_CANCEL).id == call.packet.id
        peer.done()
        call.end()  # nobody listens
        peer.start(Sent({"IN": ONE}))
        Call(peer).answer(ONE)
        peer.done()


def test_a_coroutine_that_is_cancelled_cancels_its_call(tmp_path: Path) -> None:
    source = f"""{HEAD}
    class TritonPythonModel:
        async def execute(self, requests):
            try:
                await asyncio.wait_for(ask(1).async_exec(), 0.01)
            except asyncio.TimeoutError:
                return [out(7)]
    """
    with worker(tmp_path, source) as peer:
        peer.start(Sent({"IN": ONE}))
        call = Call(peer)
        assert peer.expect(peer.calls, p.BLS_CANCEL).id == call.packet.id
        call.fail("cancelled", p.CODE_CANCELLED)
        assert peer.done()[0].outputs["OUT"].item() == 7


def test_no_calls_while_the_model_is_initialized(tmp_path: Path) -> None:
    source = f"""{HEAD}
    class TritonPythonModel:
        def initialize(self, args):
            ask(1).exec()
        def execute(self, requests): pass
    """
    peer = Peer(tmp_path, source, {"IN": "FP32"}, {"OUT": "FP32"})
    try:
        assert "TritonModelException: BLS is only supported during the 'execute' function." in peer.configure()["error"]
    finally:
        peer.close()


def test_wrong_requests_to_other_models(tmp_path: Path) -> None:
    source = f"""{HEAD}
    class TritonPythonModel:
        def execute(self, requests):
            said = []
            a = pb_utils.Tensor("A", np.ones(1))
            for arguments in (dict(inputs=[None], model_name="m"), dict(requested_output_names=[""], model_name="m"),
                              dict(correlation_id=1.5, model_name="m"), dict(parameters={{"x": [1]}}, model_name="m"),
                              dict(parameters={{1: 1}}, model_name="m"), dict(inputs=["a"], model_name="m"), dict()):
                try:
                    pb_utils.InferenceRequest(**arguments)
                except Exception as error:
                    said.append(f"{{type(error).__name__}}: {{error}}")
            try:
                ask(1).get_response_sender().send(out(1))
            except Exception as error:
                said.append(f"{{type(error).__name__}}: {{error}}")
            return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(said, object))])]
    """
    with worker(tmp_path, source, outputs={"OUT": "BYTES"}) as peer:
        said = [text.decode() for text in peer.execute(Sent({"IN": ONE}))[0].outputs["OUT"]]
        whose = "for request with id '' and model name 'm' should not be empty."
        assert said == [
            f"TritonModelException: Input tensor {whose}",
            f"TritonModelException: Requested output name {whose}",
            "TritonModelException: Correlation ID must be integer or string",
            "TritonModelException: Expect parameters values to have type bool/int/str, found type <class 'list'> of "
            "'x' (float is taken as well)",
            "TritonModelException: Expect parameters keys to have type str, found type <class 'int'>",
            "TypeError: a list of Tensor objects is expected, found str",
            "TypeError: InferenceRequest expects a model_name",
            "TritonModelException: Unable to send response. Response sender has no reference to the decoupled state of "
            "the model.",
        ]


def answer_to(peer: Peer, packet: Packet, **said: Any) -> None:
    peer.send(peer.side, p.ANSWER, json.dumps(said).encode(), number=packet.id)


def test_loading_and_unloading(tmp_path: Path) -> None:
    source = f"""{HEAD}
    class TritonPythonModel:
        def initialize(self, args):
            pb_utils.load_model("a", config="{{}}", files={{"file:1/model.onnx": b"content"}})
            print(pb_utils.is_model_ready("a", "2"))
            try:
                pb_utils.unload_model("a", unload_dependents=True)
            except pb_utils.TritonModelException as error:
                print(error)
            try:
                pb_utils.load_model("a", files=[1])
            except pb_utils.TritonModelException as error:
                print(error)
        def execute(self, requests): pass
    """
    peer = Peer(tmp_path, source, {}, {})
    try:
        peer.receive(peer.work)
        peer.send(peer.work, p.CONFIGURE, json.dumps(peer.config).encode())
        packet = peer.expect(peer.side, p.CALL)
        call, content = packet.call()
        files = {"file:1/model.onnx": len(content)}
        assert call == {"call": "load_model", "name": "a", "config": "{}", "files": files}
        assert content == b"content"
        answer_to(peer, packet, result=None)
        packet = peer.expect(peer.side, p.CALL)
        assert packet.call()[0] == {"call": "is_model_ready", "name": "a", "version": "2"}
        answer_to(peer, packet, result=True)
        packet = peer.expect(peer.side, p.CALL)
        assert packet.call()[0] == {"call": "unload_model", "name": "a", "unload_dependents": True}
        answer_to(peer, packet, error="explicit model load / unload is not allowed", code=p.CODE_UNAVAILABLE)
        assert "error" not in peer.expect(peer.work, p.READY).json()
        assert peer.finalize()[0].splitlines() == [
            "True",
            "Failed to unload model: explicit model load / unload is not allowed",
            "failed to load model 'a', files should be a dictionary of file paths and file contents",
        ]
    finally:
        peer.close()
