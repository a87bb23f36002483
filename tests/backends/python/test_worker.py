"""A worker process and a server's end of the wire: what models see and what becomes of what they return."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from inferd.backends.python.worker import protocol as p
from inferd.backends.python.worker.shortage import SHORT
from tests.backends.python.peer import FLAGS, GRANT, Peer, Sent, worker

IDENTITY = """
    import triton_python_backend_utils as pb_utils
    class TritonPythonModel:
        def execute(self, requests):
            out = []
            for request in requests:
                array = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
                out.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]))
            return out
"""


def row(*values: float) -> np.ndarray:
    return np.array([values], np.float32)


def test_each_request_of_a_batch_gets_its_answer(tmp_path: Path) -> None:
    with worker(tmp_path, IDENTITY) as peer:
        answers = peer.execute(Sent({"IN": row(1, 2)}), Sent({"IN": row(3)}))
        assert [a.outputs["OUT"].tolist() for a in answers] == [[[1, 2]], [[3]]]
        assert not peer.kept
        peer.finalize()


def test_datatypes_go_through(tmp_path: Path) -> None:
    with worker(tmp_path, IDENTITY) as peer:
        for array in (
            np.array([[True, False]]),
            np.array([[-1, 2]], np.int8),
            np.array([[2**63]], np.uint64),
            np.array([[1.5]], np.float16),
            np.array([[b"", b"a\0b", "ü".encode()]], object),
            np.zeros((1, 0), np.float32),
        ):
            (answer,) = peer.execute(Sent({"IN": array}))
            assert answer.outputs["OUT"].dtype == array.dtype
            assert np.array_equal(answer.outputs["OUT"], array)


def test_large_tensors_lie_in_the_arena(tmp_path: Path) -> None:
    large = np.arange(100_000, dtype=np.float32).reshape(1, -1)
    with worker(tmp_path, IDENTITY) as peer:
        (answer,) = peer.execute(Sent({"IN": large}), arena=True, grant=1 << 20)
        assert answer.places == {"OUT": p.ARENA}
        assert np.array_equal(answer.outputs["OUT"], large)
        assert not peer.kept
        # without a grant it asks for memory
        (answer,) = peer.execute(Sent({"IN": large}), arena=True)
        assert np.array_equal(answer.outputs["OUT"], large)


def test_a_record_that_does_not_fit_into_a_packet(tmp_path: Path) -> None:
    sent = [Sent({"IN": np.full((1, 1000), i, np.float32)}) for i in range(40)]
    with worker(tmp_path, IDENTITY) as peer:
        answers = peer.execute(*sent)
        assert [a.outputs["OUT"][0, 999] for a in answers] == list(range(40))


def test_memory_that_the_model_holds_on_to_is_kept_until_it_lets_go(tmp_path: Path) -> None:
    source = """
        import triton_python_backend_utils as pb_utils
        class TritonPythonModel:
            held = None
            def execute(self, requests):
                before = self.held
                self.held = requests[0].inputs()[0].as_numpy()[:, 1:]
                out = self.held.copy() if before is None else before.copy()
                if requests[0].request_id() == "release":
                    self.held = None
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)])]
    """
    with worker(tmp_path, source) as peer:
        peer.execute(Sent({"IN": row(1, 2)}), arena=True)
        assert peer.kept
        (answer,) = peer.execute(Sent({"IN": row(8, 9)}, extra={"request_id": "release"}))
        assert answer.outputs["OUT"].tolist() == [[2]]
        released = peer.expect(peer.side, p.RELEASE)
        assert released.id == 7


def test_inputs_that_are_passed_on_are_not_copied(tmp_path: Path) -> None:
    large = np.arange(10_000, dtype=np.float32).reshape(1, -1)
    with worker(tmp_path, IDENTITY) as peer:
        first, second = peer.execute(Sent({"IN": large}), Sent({"IN": large + 1}), arena=True)
        assert np.array_equal(second.outputs["OUT"], large + 1)
        assert (first.offsets["OUT"], second.offsets["OUT"]) == tuple(peer.sent_at)


def test_inputs_that_are_passed_on_and_kept_are_copied(tmp_path: Path) -> None:
    source = """
        import triton_python_backend_utils as pb_utils
        class TritonPythonModel:
            def execute(self, requests):
                self.kept = requests[0].inputs()[0].as_numpy()
                parts = pb_utils.Tensor("OUT", self.kept[:, 8:]), pb_utils.Tensor("WHOLE", self.kept)
                return [pb_utils.InferenceResponse(parts)]
    """
    large = np.arange(10_000, dtype=np.float32).reshape(1, -1)
    with worker(tmp_path, source, outputs={"OUT": "FP32", "WHOLE": "FP32"}) as peer:
        (answer,) = peer.execute(Sent({"IN": large}), arena=True, grant=100_000)
        assert peer.kept
        assert np.array_equal(answer.outputs["WHOLE"], large)
        assert np.array_equal(answer.outputs["OUT"], large[:, 8:])
        assert min(answer.offsets.values()) >= GRANT


def refused(size: int) -> str:
    return f"no shared memory for {size} bytes: the limit of the model is reached"


def test_an_output_that_cannot_be_copied_fails_its_request_alone(tmp_path: Path) -> None:
    """The arena is full when the batch is done: the worker goes on, and the other requests have their answers."""
    source = """
        import triton_python_backend_utils as pb_utils
        class TritonPythonModel:
            def execute(self, requests):
                self.kept = [request.inputs()[0].as_numpy() for request in requests]
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]) for array in self.kept]
    """
    large = np.arange(10_000, dtype=np.float32).reshape(1, -1)
    with worker(tmp_path, source) as peer:
        peer.most = 39_999
        sent = [row(1, 2), large, row(3), large[:, :5000], row(4)]
        one, two, three, four, five = peer.execute(*(Sent({"IN": each}) for each in sent), arena=True)
        assert peer.kept
        assert (two.status, two.code, two.error) == (p.STATUS_ERROR, p.CODE_INTERNAL, refused(40_000))
        assert [each.outputs["OUT"].tolist() for each in (one, three, five)] == [[[1, 2]], [[3]], [[4]]]
        assert np.array_equal(four.outputs["OUT"], sent[3])
        peer.most = 40_000
        (answer,) = peer.execute(Sent({"IN": large}), arena=True)
        assert np.array_equal(answer.outputs["OUT"], large)


def test_a_record_that_there_is_no_memory_for_loses_its_largest_responses(tmp_path: Path) -> None:
    sent = [Sent({"IN": np.full((1, 200 + 20 * (i % 40)), i, np.float32)}) for i in range(80)]
    with worker(tmp_path, IDENTITY) as peer:
        peer.most = 0
        answers = peer.execute(*sent)
        sizes = [each.inputs["IN"].size for each in sent]
        least = min(size for size, answer in zip(sizes, answers, strict=True) if answer.error)
        assert all(size <= least for size, answer in zip(sizes, answers, strict=True) if not answer.error)
        assert 0 < sum(not answer.error for answer in answers) < len(answers)
        for each, answer in zip(sent, answers, strict=True):
            if answer.error:
                assert answer.error.startswith("no shared memory for ")
            else:
                assert np.array_equal(answer.outputs["OUT"], each.inputs["IN"])
        (answer,) = peer.execute(sent[0])
        assert np.array_equal(answer.outputs["OUT"], sent[0].inputs["IN"])


@pytest.mark.parametrize("count", [1500, 5000])
def test_a_record_of_errors_alone_is_as_short_as_it_must_be(tmp_path: Path, count: int) -> None:
    """Long texts that do not fit are replaced by a short one; where that does not fit either, the batch has failed."""
    with worker(tmp_path, IDENTITY) as peer:
        peer.most = 0
        peer.start(*(Sent({"IN": row(*range(12))}) for _ in range(count)))
        done = peer.expect(peer.work, p.DONE)
        if done.flags & p.FAILED:
            assert count == 5000
            assert done.text().startswith("no shared memory for ")
        else:
            assert count == 1500
            answers = peer.answers(done.record)
            assert len(answers) == count
            assert {answer.error for answer in answers if answer.status == p.STATUS_ERROR} == {SHORT}
        (answer,) = peer.execute(Sent({"IN": row(1)}))
        assert answer.outputs["OUT"].tolist() == [[1]]


def test_a_completed_configuration_that_there_is_no_memory_for_is_an_error(tmp_path: Path) -> None:
    source = """
        class TritonPythonModel:
            @staticmethod
            def auto_complete_config(config):
                for number in range(2000):
                    config.add_input({"name": f"a name with a number: {number}", "data_type": "TYPE_FP32", "dims": [1]})
                return config
            def execute(self, requests):
                return []
    """
    peer = Peer(tmp_path, source, {}, {}, mode="complete", config={"name": "m", "input": [], "output": []})
    peer.most = 0
    try:
        assert "no shared memory for " in peer.configure()["error"]
    finally:
        peer.close()


def test_everything_a_request_says(tmp_path: Path) -> None:
    source = """
        import json, numpy as np, triton_python_backend_utils as pb_utils
        class TritonPythonModel:
            def execute(self, requests):
                r = requests[0]
                said = [r.request_id(), r.correlation_id(), r.requested_output_names(), r.flags(), r.timeout(),
                        json.loads(r.parameters()), r.trace().get_context(), r.priority(), r.model_name(),
                        r.model_version(), r.is_cancelled(), [t.name() for t in r.inputs()]]
                text = np.array([json.dumps(said)], dtype=object)
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", text), pb_utils.Tensor("OTHER", text)])]
    """
    with worker(tmp_path, source, outputs={"OUT": "BYTES", "OTHER": "BYTES"}) as peer:
        (answer,) = peer.execute(Sent({"IN": row(1)}))
        said = json.loads(answer.outputs["OUT"][0])
        assert said == ["", 0, ["OUT", "OTHER"], 0, 0, {}, None, 0, "m", 1, False, ["IN"]]
        assert set(answer.outputs) == {"OUT", "OTHER"}
        extra = {
            "timeout": 12,
            "priority": 3,
            "correlation": "conversation",
            "wanted": ["OTHER"],
            "request_id": "id-1",
            "parameters": {"a": 1.5, "b": "x", "c": True},
            "trace": '{"traceparent": "00-1"}',
        }
        (answer,) = peer.execute(Sent({"IN": row(1)}, flags=3, extra=extra))
        assert set(answer.outputs) == {"OTHER"}  # what was not asked for is not sent
        said = json.loads(answer.outputs["OTHER"][0])
        expected = ["id-1", "conversation", ["OTHER"], 3, 12, {"a": 1.5, "b": "x", "c": True}]
        assert said == [*expected, '{"traceparent": "00-1"}', 3, "m", 1, False, ["IN"]]


def test_a_cancelled_request_says_so(tmp_path: Path) -> None:
    source = """
        import numpy as np, triton_python_backend_utils as pb_utils
        class TritonPythonModel:
            def execute(self, requests):
                said = np.array([[r.is_cancelled(), r.get_response_sender().is_cancelled()] for r in requests])
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", said)])] * len(requests)
    """
    with worker(tmp_path, source, outputs={"OUT": "BOOL"}) as peer:
        peer.arena[FLAGS + 5] = 1
        (answer, _) = peer.execute(Sent({"IN": row(1)}, number=0x10005), Sent({"IN": row(1)}, number=0x10006))
        assert answer.outputs["OUT"].tolist() == [[True, True], [False, False]]


def test_response_parameters_and_errors(tmp_path: Path) -> None:
    source = """
        import numpy as np, triton_python_backend_utils as pb_utils
        class TritonPythonModel:
            def execute(self, requests):
                values = {"b": True, "i": -5, "u": 2**63, "f": 0.25, "s": "text"}
                out = pb_utils.Tensor("OUT", np.ones((1, 1), np.float32))
                return [
                    pb_utils.InferenceResponse([out], parameters=values),
                    pb_utils.InferenceResponse(error=pb_utils.TritonError("gone", pb_utils.TritonError.NOT_FOUND)),
                    pb_utils.InferenceResponse([], pb_utils.TritonError("plain")),
                ]
    """
    with worker(tmp_path, source) as peer:
        first, second, third = peer.execute(*[Sent({"IN": row(1)}) for _ in range(3)])
        assert first.parameters == {"b": True, "i": -5, "u": 2**63, "f": 0.25, "s": "text"}
        assert first.outputs["OUT"].tolist() == [[1]]
        assert (second.status, second.code, second.error) == (p.STATUS_ERROR, p.CODE_NOT_FOUND, "gone")
        assert (third.status, third.code, third.error) == (p.STATUS_ERROR, p.CODE_INTERNAL, "plain")


FAILURES = {
    "an exception": (
        'raise ValueError("no luck")',
        "Failed to process the request(s) for model 'm_0_0', message: ValueError: no luck\n\n"
        "At:\n  {file}(5): execute\n",
    ),
    "a TritonModelException": (
        'raise pb_utils.TritonModelException("no luck")',
        "message: TritonModelException: no luck\n\nAt:\n  {file}(5): execute\n",
    ),
    "misuse": (
        'import numpy; pb_utils.Tensor("", numpy.zeros(1))',
        "message: TritonModelException: Tensor name cannot be an empty string.\n\nAt:\n  {file}(5): execute\n",
    ),
    "a missing package": (
        "import nosuch.part",
        f"if it is a package: {sys.executable} -m pip install nosuch\n\nAt:\n  {{file}}(5): execute\n",
    ),
    "a missing package of another name": (
        "raise ModuleNotFoundError(\"No module named 'cv2'\", name='cv2')",
        f"if it is a package: {sys.executable} -m pip install opencv-python-headless\n\nAt:\n  {{file}}(5): execute\n",
    ),
    "an exception whose text raises": (
        "raise type('Odd', (Exception,), {'__str__': lambda self: self.missing})",
        "message: Odd: (its text cannot be read: AttributeError)\n\nAt:\n  {file}(5): execute\n",
    ),
    "leaving": ("sys.exit(3)", "message: SystemExit: 3\n"),
    "too few": (
        "return []",
        "message: Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
        "InferenceRequest(s) size is:2, and InferenceResponse(s) size is:0\n",
    ),
    "no list": (
        "return tuple(requests)",
        "message: Expected a list in the execute return, found type '<class 'tuple'>'.",
    ),
    "no responses": (
        "return [1, 2]",
        "message: Expected an 'InferenceResponse' object in the execute function return list, found type "
        "'<class 'int'>'.",
    ),
    "a response to a rescheduled request": (
        "requests[0].set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE); "
        "return [pb_utils.InferenceResponse()] * 2",
        "message: Expected a None object in the execute function return list for reschduled request, found type "
        "'<class 'triton_python_backend_utils.InferenceResponse'>'.",
    ),
}


OURS = ("return", "requests[0].set")
"""What such statements begin with that do not raise: what is wrong is said in our words, to the whole batch."""


@pytest.mark.parametrize("kind", FAILURES)
def test_failures_of_execute(tmp_path: Path, kind: str) -> None:
    statement, expected = FAILURES[kind]
    source = f"""import sys
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        {statement}
"""
    with worker(tmp_path, source) as peer:
        answers = peer.execute(*(Sent({"IN": row(1)}) for _ in range(2 if statement.startswith(OURS) else 1)))
        for answer in answers:
            assert (answer.status, answer.code) == (p.STATUS_ERROR, p.CODE_INTERNAL)
            assert expected.format(file=tmp_path / "1" / "model.py") in answer.error
        assert not peer.kept
        log = peer.receive(peer.side)
        assert (log.kind, log.code) == (p.LOG, p.LOG_ERROR)
        assert log.text() == answers[0].error
        # and it goes on
        assert len(peer.execute(Sent({"IN": row(1)}), Sent({"IN": row(1)}))) == 2


def test_an_exception_in_a_batch_is_for_the_log(tmp_path: Path) -> None:
    """The text of the exception may repeat one request's content, which other clients must not see."""
    source = """
        class TritonPythonModel:
            def execute(self, requests):
                raise ValueError("cannot read 'secret'")
    """
    with worker(tmp_path, source) as peer:
        first, second = peer.execute(Sent({"IN": row(1)}), Sent({"IN": row(2)}))
        assert first.error == second.error
        assert "secret" not in first.error
        assert "model.py" not in first.error
        mark = first.error.rpartition("error ")[2]
        log = peer.receive(peer.side).text()
        assert log.startswith(f"error {mark}: ")
        assert "ValueError: cannot read 'secret'" in log


def test_a_model_without_execute(tmp_path: Path) -> None:
    with worker(tmp_path, "class TritonPythonModel: pass") as peer:
        (answer,) = peer.execute(Sent({"IN": row(1)}))
        assert f"Python model {tmp_path}/1/model.py does not implement `execute` method." in answer.error


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("x = 1", "has no attribute 'TritonPythonModel'"),
        ("class TritonPythonModel:\n    def initialize(self, args): raise OSError(2, 'no file')", "no file"),
        ("syntax error", "SyntaxError"),
        ("import sys; sys.exit(1)", "SystemExit: 1"),
    ],
)
def test_a_model_that_does_not_load(tmp_path: Path, source: str, expected: str) -> None:
    peer = Peer(tmp_path, source, {"IN": "FP32"}, {"OUT": "FP32"})
    try:
        said = peer.configure()
        assert expected in said["error"]
        assert peer.process.poll() is None  # until the server has read why
        peer.work.close()
        assert peer.process.wait(30) == 1
    finally:
        peer.close()


def test_the_life_of_a_model(tmp_path: Path) -> None:
    source = """
        import json, helper
        from . import helper as same
        import triton_python_backend_utils as pb_utils
        import c_python_backend_utils
        class TritonPythonModel:
            def initialize(self, args):
                print("initialize", json.dumps(args, sort_keys=True), helper is same, pb_utils.get_model_dir())
            def execute(self, requests):
                return [pb_utils.InferenceResponse() for _ in requests]
            def finalize(self):
                print("finalize")
                raise RuntimeError("at the end")
    """
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "helper.py").write_text("")
    with worker(tmp_path, source, file="other_name.py", args={"model_instance_kind": "CPU"}) as peer:
        peer.execute(Sent({"IN": row(1)}))
        out, _ = peer.finalize()
        args = json.dumps(peer.config["args"], sort_keys=True)
        assert out.splitlines() == [f"initialize {args} False {tmp_path}/1", "finalize"]
        assert "RuntimeError: at the end" in peer.receive(peer.side).text()


def test_a_server_that_goes_away_takes_its_worker_along(tmp_path: Path) -> None:
    with worker(tmp_path, IDENTITY) as peer:
        peer.work.close()
        assert peer.process.wait(30) == 1


def test_is_ready_answers_true_only_when_the_model_says_so(tmp_path: Path) -> None:
    source = """
        import asyncio
        class TritonPythonModel:
            answers = iter([True, False, 3])
            async def is_ready(self):
                await asyncio.sleep(0)
                return next(self.answers)
    """
    peer = Peer(tmp_path, source, {}, {})
    try:
        assert peer.configure() == {"is_ready": True}
        health = []
        for number in range(1, 5):
            peer.send(peer.side, p.IS_READY, number=number)
            health.append(peer.expect(peer.side, p.HEALTH))
        assert [h.id for h in health] == [1, 2, 3, 4]
        assert [bool(h.flags & p.TRUE) for h in health] == [True, False, False, False]
        assert "is_ready() must return a boolean value" in health[2].text()
        assert "StopIteration" in health[3].text() or "RuntimeError" in health[3].text()
    finally:
        peer.close()


def test_completing_a_configuration(tmp_path: Path) -> None:
    source = """
        class TritonPythonModel:
            @staticmethod
            def auto_complete_config(config):
                config.set_max_batch_size(4)
                config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]})
                config.add_output({"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]})
                config.set_dynamic_batching()
                return config
            def initialize(self, args):
                raise AssertionError("it is not initialized for that")
    """
    peer = Peer(tmp_path, source, {}, {}, mode="complete", config={"name": "m", "max_batch_size": 0, "input": []})
    try:
        said = peer.configure()["config"]
        assert said["max_batch_size"] == 4
        assert said["input"] == [{"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]}]
        assert said["dynamic_batching"] == {}
    finally:
        peer.close()


def test_what_a_configuration_is_completed_with_is_checked(tmp_path: Path) -> None:
    source = """
        class TritonPythonModel:
            @staticmethod
            def auto_complete_config(config):
                return config.as_dict()
    """
    peer = Peer(tmp_path, source, {}, {}, mode="complete")
    try:
        assert "auto_complete_config function in model 'm_0_0' must return a valid" in peer.configure()["error"]
    finally:
        peer.close()


BARE = "import sys; sys.stdin.read()"
MOST = 8 << 20  # bytes that a worker may need beyond its interpreter before it is used


def test_a_worker_needs_little_memory_until_it_is_used(tmp_path: Path) -> None:
    source = """
        import triton_python_backend_utils as pb_utils
        class TritonPythonModel:
            def execute(self, requests): pass
    """
    bare = subprocess.Popen([sys.executable, "-c", BARE], stdin=subprocess.PIPE)
    try:
        with worker(tmp_path, source) as peer:
            own, interpreter = (psutil.Process(pid).memory_full_info().uss for pid in (peer.process.pid, bare.pid))
            assert own - interpreter < MOST
    finally:
        bare.communicate()


def test_numpy_is_imported_when_a_model_asks_for_an_array(tmp_path: Path) -> None:
    """Until then a worker costs hardly more memory than its interpreter."""
    source = """
    import sys
    class TritonPythonModel:
        def execute(self, requests):
            before = "numpy" in sys.modules
            requests[0].inputs()[0].as_numpy()
            raise RuntimeError(f"{before}, then {'numpy' in sys.modules}")
    """
    with worker(tmp_path, source) as peer:
        (answer,) = peer.execute(Sent({"IN": row(1)}))
        assert "False, then True" in answer.error
