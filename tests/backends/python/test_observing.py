"""What models write to the log, measure, and are told about their configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inferd.backends.python.worker import protocol as p
from inferd.backends.python.worker import utils as pb
from tests.backends.python.peer import Peer, Sent, worker
from tests.backends.python.served import serving

ONE = np.array([[1]], np.float32)


def received(peer: Peer) -> list[Any]:
    """Everything on the side socket until the worker ended."""
    out: list[Any] = []
    while data := peer.side.recv(p.PACKET):
        kind, _, code, _, _, _ = p.HEAD.unpack_from(data)
        out.append((kind, code, data[p.HEAD.size :]))
    return out


def test_logging(tmp_path: Path) -> None:
    """Each line of the log arrives with its level, long ones are cut, and printed lines do not come to the log."""
    source = """
        import triton_python_backend_utils as pb_utils
        class TritonPythonModel:
            def execute(self, requests):
                log = pb_utils.Logger
                log.log("plain"); log.log("level", log.WARNING); log.log("named", level=log.LogLevel.ERROR)
                log.log_info("info"); log.log_warn("warn"); log.log_error("error"); log.log_verbose("hidden")
                log.log_info("ü" * 100_000)
                print("printed"); import sys; print("to stderr", file=sys.stderr)
                return [pb_utils.InferenceResponse() for _ in requests]
    """
    with worker(tmp_path, source) as peer:
        peer.execute(Sent({"IN": ONE}))
        assert peer.finalize() == ("printed\n", "to stderr\n")
        logged = [(code, text.decode("utf-8", "ignore")) for kind, code, text in received(peer) if kind == p.LOG]
        assert logged[:-1] == [
            (p.LOG_INFO, "plain"),
            (p.LOG_WARNING, "level"),
            (p.LOG_ERROR, "named"),
            (p.LOG_INFO, "info"),
            (p.LOG_WARNING, "warn"),
            (p.LOG_ERROR, "error"),
        ]
        assert 10_000 < len(logged[-1][1]) < 100_000


async def test_more_messages_than_the_server_writes_are_counted(tmp_path: Path, caplog: Any) -> None:
    """Each is logged, or told to be left out: a model that logs without end keeps the server from nothing else."""
    code = """
        import triton_python_backend_utils as pb_utils
        class TritonPythonModel:
            def initialize(self, args):
                for number in range(5_000):
                    pb_utils.Logger.log_info("message")
    """
    caplog.set_level("INFO", "inferd.python")
    async with serving(tmp_path, m=code):
        pass
    texts = [record.getMessage() for record in caplog.records]
    left_out = [int(text.split()[3]) for text in texts if "left out" in text]
    assert texts.count("m_0_0: message") + sum(left_out) == 5_000
    assert left_out


def test_metrics(tmp_path: Path) -> None:
    """A model's metrics are sent to the server, and wrong use of them is refused to the model."""
    source = """
        import triton_python_backend_utils as pb_utils
        def refused(call, *arguments):
            try:
                call(*arguments)
            except pb_utils.TritonModelException as error:
                print(error)
        class TritonPythonModel:
            def initialize(self, args):
                family = pb_utils.MetricFamily("requests", "how many", pb_utils.MetricFamily.COUNTER)
                self.counter = family.Metric(labels={"model": "m", "version": 1})
                self.counter.increment(2)
                refused(self.counter.increment, -1)
                refused(self.counter.set, 1)
                refused(self.counter.observe, 1)
                refused(family.Metric, [1])
                refused(family.Metric, None, [1.0])
                refused(pb_utils.MetricFamily, "no name", "", pb_utils.MetricFamily.GAUGE)
                gauge = pb_utils.MetricFamily("level", "how high", pb_utils.MetricFamily.GAUGE).Metric()
                gauge.set(1.5)
                gauge.increment(-1)
                histogram = pb_utils.MetricFamily("size", "how long", pb_utils.MetricFamily.HISTOGRAM)
                refused(histogram.Metric)
                refused(histogram.Metric, None, [2, 1])
                histogram.Metric(buckets=[1, 2.5]).observe(2)
            def execute(self, requests): pass
    """
    with worker(tmp_path, source) as peer:
        out, _ = peer.finalize()
        assert out.splitlines() == [
            "Failed to increment metric value: TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically "
            "by non-negative values.",
            "Failed to set metric value: TRITONSERVER_METRIC_KIND_COUNTER does not support Set",
            "Failed to observe metric value: TRITONSERVER_METRIC_KIND_COUNTER does not support Observe",
            "Failed to create metric. Labels must be a dictionary.",
            "Failed to create metric. Unexpected buckets found.",
            "Error when creating MetricFamily: 'no name' is no name of a metric",
            "Failed to create metric. Missing required buckets.",
            "Failed to create metric. Buckets must ascend.",
        ]
        changes = [json.loads(text) for kind, _, text in received(peer) if kind == p.METRIC]
        labels = {"model": "m", "version": "1"}
        assert changes[:3] == [
            {"op": "family", "family": "requests", "kind": "counter", "description": "how many"},
            {"op": "metric", "family": "requests", "kind": "counter", "labels": labels, "buckets": []},
            {"op": "increment", "family": "requests", "kind": "counter", "labels": labels, "value": 2},
        ]
        assert {"op": "set", "family": "level", "kind": "gauge", "labels": {}, "value": 1.5} in changes
        assert {"op": "observe", "family": "size", "kind": "histogram", "labels": {}, "value": 2} in changes
        # The gauge and the histogram were let go of, the metric before its family.
        ops = [change["op"] for change in changes if change.get("family") == "level"]
        assert ops == ["family", "metric", "set", "increment", "delete_metric", "delete_family"]


def test_configurations_are_searched() -> None:
    config = {"input": [{"name": "a", "dims": [1]}], "output": [{"name": "b"}]}
    assert pb.get_input_config_by_name(config, "a") == {"name": "a", "dims": [1]}
    assert pb.get_input_config_by_name(config, "b") is None
    assert pb.get_output_config_by_name(config, "b") == {"name": "b"}
    assert pb.get_output_config_by_name({}, "b") is None
    assert not pb.using_decoupled_model_transaction_policy(config)
    assert pb.using_decoupled_model_transaction_policy({"model_transaction_policy": {"decoupled": True}})


X = {"name": "x", "data_type": "TYPE_FP32", "dims": [-1, 3]}


@pytest.mark.parametrize(
    ("config", "call", "expected"),
    [
        ({"max_batch_size": 8}, lambda c: c.set_max_batch_size(4), "configuration specified max_batch_size 8, but in "),
        ({"sequence_batching": {}}, lambda c: c.set_dynamic_batching(), "scheduling_choice as 'sequence_batching'"),
        ({}, lambda c: c.add_input({"data_type": "TYPE_FP32", "dims": [1]}), "is missing 'name' property."),
        ({}, lambda c: c.add_input({"name": "x", "dims": [1]}), "input 'x' in auto-complete-config function for model "
         "'m' is missing 'data_type' property."),
        ({}, lambda c: c.add_output({"name": "x", "data_type": "TYPE_FP32"}), "is missing 'dims' property."),
        ({}, lambda c: c.add_output({**X, "optional": True}), "other than 'name', 'data_type' and 'dims'."),
        ({}, lambda c: c.add_input({**X, "shape": 1}), "other than 'name', 'data_type', 'dims' and 'optional'."),
        ({"input": [X]}, lambda c: c.add_input({**X, "data_type": "TYPE_INT8"}), "configuration expects datatype "
         "TYPE_FP32 for input 'x', model provides TYPE_INT8"),
        ({"output": [X]}, lambda c: c.add_output({**X, "dims": [3]}), "model 'm', tensor 'x': the model expects dims "
         "[3] but the model configuration specifies dims [-1, 3]"),
        ({"input": [{**X, "optional": True}]}, lambda c: c.add_input({**X, "optional": False}), "expects optional "
         "False but the model configuration specifies optional True"),
        ({}, lambda c: c.set_model_transaction_policy({"x": 1}), "contains property other than 'decoupled'."),
        ({"model_transaction_policy": {"decoupled": False}}, lambda c: c.set_model_transaction_policy({"decoupled": 1}),
         "which is already set to 'False'."),
    ],
)  # fmt: skip
def test_contradictions_to_a_configuration(config: dict[str, Any], call: Any, expected: str) -> None:
    with pytest.raises(ValueError) as raised:
        call(pb.ModelConfig({"name": "m", **config}))
    assert expected in str(raised.value)


def test_a_configuration_is_completed() -> None:
    config = pb.ModelConfig('{"name": "m", "max_batch_size": 2, "input": [{"name": "x", "dims": []}]}')
    config.set_max_batch_size(4)
    config.add_input({**X, "optional": True})
    config.add_input({**X, "name": "y"})
    config.add_output(X)
    config.set_dynamic_batching()
    config.set_model_transaction_policy({"decoupled": True})
    assert config.as_dict() == {
        "name": "m",
        "max_batch_size": 4,
        "input": [{**X, "optional": True}, {**X, "name": "y"}],
        "output": [X],
        "dynamic_batching": {},
        "model_transaction_policy": {"decoupled": True},
    }
