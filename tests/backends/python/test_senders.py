"""Response senders: decoupled models, late answers, and the rules that each breaks with an exception of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from inferd.backends.python.worker import protocol as p
from tests.backends.python.peer import Sent, worker

HEAD = """
    import threading, time, gc
    import numpy as np, triton_python_backend_utils as pb_utils
    FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
    def out(value):
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([[value]], np.float32))])
    def refused(call, *arguments, **keywords):
        try:
            call(*arguments, **keywords)
        except pb_utils.TritonModelException as error:
            print(str(error))
        else:
            print("nothing was refused")
"""
ONE = np.array([[1]], np.float32)


def test_a_decoupled_model_answers_as_often_as_it_likes(tmp_path: Path) -> None:
    source = f"""{HEAD}
    class TritonPythonModel:
        def execute(self, requests):
            for request in requests:
                sender = request.get_response_sender()
                assert sender is request.get_response_sender()
                sender.send(out(1))
                sender.send(out(2))
                sender.send(flags=FINAL)
                refused(sender.send, out(3))
    """
    with worker(tmp_path, source, decoupled=True) as peer:
        peer.start(Sent({"IN": ONE}, number=0x10001))
        answers = [peer.response() for _ in range(3)]
        assert [bool(packet.flags & p.FINAL) for packet, _ in answers] == [False, False, True]
        assert [answer.outputs["OUT"].item() for _, answer in answers if answer] == [1, 2]
        assert answers[2][1] is None
        assert [a.status for a in peer.done()] == [p.STATUS_OPEN]
        assert peer.finalize()[0].splitlines() == ["Unable to send response. Response sender has been closed."]


def test_a_slow_client_holds_the_model_up(tmp_path: Path) -> None:
    source = f"""{HEAD}
    class TritonPythonModel:
        sent = 0
        def execute(self, requests):
            sender = requests[0].get_response_sender()
            for i in range(6):
                sender.send(out(i), FINAL if i == 5 else 0)
                pb_utils.Logger.log_info(str(i))
    """
    with worker(tmp_path, source, decoupled=True, window=2) as peer:
        sent = Sent({"IN": ONE})
        peer.start(sent)
        seen = []
        for _ in range(4):  # two responses, and that each has been sent
            packet = peer.receive(peer.side)
            seen.append(packet.kind)
        assert seen == [p.RESPONSE, p.LOG, p.RESPONSE, p.LOG]
        asked = peer.receive(peer.side)  # for the right to send the third, instead of that
        assert (asked.kind, asked.id) == (p.CREDIT, sent.number)
        peer.send(peer.side, p.CREDIT, number=sent.number, offset=4)
        values = []
        for _ in range(4):
            _, answer = peer.response()
            assert answer is not None
            values.append(answer.outputs["OUT"].item())
        assert values == [2, 3, 4, 5]
        peer.done()


def test_requests_that_are_let_go_of_are_answered_with_an_error(tmp_path: Path) -> None:
    source = f"""{HEAD}
    class TritonPythonModel:
        def execute(self, requests):
            requests[0].get_response_sender().send(out(1))
    """
    with worker(tmp_path, source, decoupled=True) as peer:
        assert len(peer.execute(Sent({"IN": ONE}, number=0x10001), Sent({"IN": ONE}, number=0x10002))) == 2
        finals = {}
        while len(finals) < 2:
            packet, answer = peer.response()
            if packet.flags & p.FINAL:
                finals[packet.id] = answer
        for answer in finals.values():
            assert answer is not None
            assert "let go of the request without a final response" in answer.error


def test_an_exception_fails_what_has_not_been_answered(tmp_path: Path) -> None:
    source = f"""{HEAD}
    class TritonPythonModel:
        def execute(self, requests):
            self.second = requests[1].get_response_sender()
            requests[0].get_response_sender().send(out(1), FINAL)
            raise ValueError("in between")
    """
    with worker(tmp_path, source, decoupled=True) as peer:
        first, second = peer.execute(Sent({"IN": ONE}), Sent({"IN": ONE}))
        assert first.status == p.STATUS_OPEN
        assert second.status == p.STATUS_ERROR
        assert "a batch of 2 requests failed" in second.error


def test_an_exception_comes_behind_the_responses_that_were_sent(tmp_path: Path) -> None:
    """Not with the end of the batch, which has a socket of its own and may come before them."""
    source = f"""{HEAD}
    class TritonPythonModel:
        def execute(self, requests):
            requests[0].get_response_sender().send(out(1))
            raise ValueError("after one")
    """
    with worker(tmp_path, source, decoupled=True) as peer:
        assert [answer.status for answer in peer.execute(Sent({"IN": ONE}))] == [p.STATUS_OPEN]
        answers = [peer.response() for _ in range(2)]
        assert [bool(packet.flags & p.FINAL) for packet, _ in answers] == [False, True]
        assert answers[1][1] is not None
        assert "ValueError: after one" in answers[1][1].error


def test_a_decoupled_model_returns_none(tmp_path: Path) -> None:
    source = f"""{HEAD}
    class TritonPythonModel:
        def execute(self, requests):
            return [out(1) for _ in requests]
    """
    with worker(tmp_path, source, decoupled=True) as peer:
        (answer,) = peer.execute(Sent({"IN": ONE}))
        expected = "Python model 'm_0_0' is using the decoupled mode and the execute function must return None."
        assert answer.error.endswith(expected)


def test_the_rules_of_senders(tmp_path: Path) -> None:
    source = f"""{HEAD}
    class TritonPythonModel:
        def execute(self, requests):
            sender = requests[0].get_response_sender()
            refused(sender.send, out(1), flags=7)
            refused(sender.send)
            refused(sender.send, flags=FINAL)
            sender.send(out(1))
            refused(sender.send, out(2))
            sender.send(flags=FINAL)
            refused(sender.send, flags=FINAL)
            return [None]
    """
    with worker(tmp_path, source) as peer:
        assert [a.status for a in peer.execute(Sent({"IN": ONE}))] == [p.STATUS_OPEN]
        packet, answer = peer.response()
        assert answer is not None
        assert not packet.flags & p.FINAL
        assert peer.response()[0].flags == p.FINAL | p.EMPTY
        assert peer.finalize()[0].splitlines() == [
            "Unable to send response. Unsupported flag provided.",
            "Inference Response object must be provided when the response flags is set to zero.",
            "Unable to send response. Non-decoupled model cannot send complete final before sending a response.",
            "Unable to send response. Non-decoupled model cannot send more than one response.",
            "Unable to send response. Response sender has been closed.",
        ]


def test_a_model_answers_a_request_once(tmp_path: Path) -> None:
    source = f"""{HEAD}
    class TritonPythonModel:
        def execute(self, requests):
            requests[0].get_response_sender().send(out(1), FINAL)
            return [out(2), out(3)]
    """
    with worker(tmp_path, source) as peer:
        first, second = peer.execute(Sent({"IN": ONE}), Sent({"IN": ONE}))
        assert first.status == p.STATUS_OPEN
        assert "Non-decoupled model cannot send more than one response." in second.error


def test_none_without_a_sender_is_an_error(tmp_path: Path) -> None:
    source = f"""{HEAD}
    class TritonPythonModel:
        def execute(self, requests):
            return [None, out(1)]
    """
    with worker(tmp_path, source) as peer:
        first, second = peer.execute(Sent({"IN": ONE}), Sent({"IN": ONE}))
        assert "returned None for a request" in first.error
        assert second.outputs["OUT"].item() == 1


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_rescheduled_request_comes_back_without_an_error(tmp_path: Path, decoupled: bool) -> None:
    source = f"""{HEAD}
    class TritonPythonModel:
        def execute(self, requests):
            requests[0].set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            refused(requests[0].set_release_flags, 9)
            if {decoupled}:
                requests[0].get_response_sender().send(out(1))
            else:
                return [None]
    """
    with worker(tmp_path, source, decoupled=decoupled) as peer:
        peer.start(Sent({"IN": ONE}))
        if decoupled:
            assert not peer.response()[0].flags & p.FINAL
            # It waits until the server has that, and must have it before the request comes again.
            peer.expect(peer.side, p.FREE)
        assert [a.status for a in peer.done()] == [p.STATUS_RESCHEDULE]
        out, _ = peer.finalize()
        assert out == "Unable to set release flags. Unsupported flag 9 provided.\n"
        assert peer.side.recv(100) == b""  # no error for what was let go of: it comes again


def test_a_request_that_was_answered_does_not_come_again(tmp_path: Path) -> None:
    source = f"""{HEAD}
    class TritonPythonModel:
        def execute(self, requests):
            requests[0].get_response_sender().send(out(1), FINAL)
            requests[0].set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return [None]
    """
    with worker(tmp_path, source) as peer:
        peer.start(Sent({"IN": ONE}))
        assert peer.response()[0].flags & p.FINAL
        assert [a.status for a in peer.done()] == [p.STATUS_OPEN]


@pytest.mark.parametrize("last", ["'wrong'", "out(2)"])
def test_a_list_that_is_wrong_fails_every_request_whose_sender_was_taken(tmp_path: Path, last: str) -> None:
    """The second element is no response, or the sender of its request has answered: no response is sent."""
    source = f"""{HEAD}
    class TritonPythonModel:
        def execute(self, requests):
            senders = [request.get_response_sender() for request in requests]
            if {last} != 'wrong':
                senders[1].send(out(2), FINAL)
            return [out(1), {last}]
    """
    with worker(tmp_path, source) as peer:
        first, second = peer.execute(Sent({"IN": ONE}), Sent({"IN": ONE}))
        assert first.status == p.STATUS_ERROR
        assert second.status == (p.STATUS_ERROR if "wrong" in last else p.STATUS_OPEN)


ASYNC = f"""{HEAD}
    import asyncio
    class TritonPythonModel:
        async def execute(self, requests):
            value = float(requests[0].inputs()[0].as_numpy().item())
            if value < -1:
                raise asyncio.CancelledError("far below")
            if value < 0:
                raise ValueError("negative")
            if value > 1:
                self.waiting = asyncio.Event()
                await self.waiting.wait()
            elif hasattr(self, "waiting"):
                self.waiting.set()
            requests[0].get_response_sender().send(out(value), FINAL)
"""


def test_coroutines_of_a_decoupled_model_run_side_by_side(tmp_path: Path) -> None:
    with worker(tmp_path, ASYNC, decoupled=True) as peer:
        first, second = Sent({"IN": ONE * 2}), Sent({"IN": ONE})
        assert [a.status for a in peer.execute(first)] == [p.STATUS_OPEN]
        assert [a.status for a in peer.execute(second)] == [p.STATUS_OPEN]
        assert {peer.response()[0].id for _ in range(2)} == {first.number, second.number}


@pytest.mark.parametrize(("value", "error"), [(-1, "ValueError: negative"), (-2, "CancelledError")])
def test_a_coroutine_that_raises_fails_its_requests(tmp_path: Path, value: int, error: str) -> None:
    with worker(tmp_path, ASYNC, decoupled=True) as peer:
        peer.execute(Sent({"IN": ONE * value}))
        packet, answer = peer.response()
        assert packet.flags & p.FINAL
        assert answer is not None
        assert error in answer.error


def test_large_responses_of_senders_lie_in_memory_that_was_asked_for(tmp_path: Path) -> None:
    source = f"""{HEAD}
    class TritonPythonModel:
        def execute(self, requests):
            large = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.arange(100_000, dtype=np.float32))])
            requests[0].get_response_sender().send(large, FINAL)
    """
    with worker(tmp_path, source, decoupled=True) as peer:
        peer.start(Sent({"IN": ONE}))
        _, answer = peer.response()
        assert answer is not None
        assert answer.places == {"OUT": p.ARENA}
        assert np.array_equal(answer.outputs["OUT"], np.arange(100_000))


def test_without_memory_the_request_gets_an_error_and_the_model_is_told(tmp_path: Path) -> None:
    source = f"""{HEAD}
    class TritonPythonModel:
        def execute(self, requests):
            large = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.zeros(100_000, np.float32))])
            refused(requests[0].get_response_sender().send, large, FINAL)
    """
    with worker(tmp_path, source, decoupled=True) as peer:
        peer.start(Sent({"IN": ONE}))
        asked = peer.receive(peer.side)
        assert asked.kind == p.ALLOCATE
        assert asked.offset == 400_000
        peer.send(peer.side, p.ALLOCATED, number=asked.id, code=p.CODE_UNAVAILABLE)
        packet, answer = peer.response()
        assert packet.flags & p.FINAL
        assert answer is not None
        assert answer.error == "no shared memory for 400000 bytes: the limit of the model is reached"
        peer.done()
        assert peer.finalize()[0].strip() == answer.error


def test_a_response_behind_the_end_of_its_request_leaves_nothing(tmp_path: Path) -> None:
    """Another thread of the model may end the request while a response is being sent: here that comes in between."""
    source = f"""{HEAD}
    class Late(int):
        def __hash__(self):
            return 0
        def __eq__(self, other):
            self.asked = getattr(self, "asked", 0) + 1
            if self.asked == 3:
                self.sender.send(flags=FINAL)
            return False if other == FINAL else other == 0
    class TritonPythonModel:
        def execute(self, requests):
            late = Late(0)
            late.sender = requests[0].get_response_sender()
            late.sender.send(out(1), late)
            kept = sum(type(each).__name__ == "Credit" for each in gc.get_objects())
            pb_utils.Logger.log_info(str(kept))
    """
    with worker(tmp_path, source, decoupled=True) as peer:
        logged = []
        for generation in range(1, 20):
            peer.start(Sent({"IN": ONE}, number=generation << 16))
            packets = [peer.receive(peer.side) for _ in range(3)]
            assert [bool(packet.flags & p.FINAL) for packet in packets[:2]] == [True, False]
            logged.append(packets[2].record)
            peer.done()
        assert len(set(logged)) == 1


@pytest.mark.parametrize(
    ("outputs", "error"),
    [("wrong = pb_utils.InferenceResponse([], parameters={'text': chr(0xd800)})", "surrogates not allowed"),
     ("wrong = out(1); wrong.output_tensors()[0] = 'no tensor'", "'str' object has no attribute"),
     ("wrong = out(1); wrong.output_tensors().append('no tensor')", "'str' object has no attribute")],
    ids=["parameter", "only output", "one of the outputs"],
)  # fmt: skip
def test_a_response_that_cannot_be_written_is_an_error_to_its_client_and_to_the_model(
    tmp_path: Path, outputs: str, error: str
) -> None:
    """The request is not left without an answer, whether its response is small or not."""
    source = f"""{HEAD}
    class TritonPythonModel:
        def execute(self, requests):
            {outputs}
            try:
                requests[0].get_response_sender().send(wrong, FINAL)
            except (UnicodeEncodeError, AttributeError):
                print("refused")
    """
    with worker(tmp_path, source, decoupled=True) as peer:
        peer.start(Sent({"IN": ONE}))
        packet, answer = peer.response()
        assert packet.flags & p.FINAL
        assert answer is not None
        assert error in answer.error
        peer.done()
        assert peer.finalize()[0].strip() == "refused"
