"""Guards the defaults of fields and parameters of config.pbtxt: the pages, the code, and a model that is loaded without
them have the same."""

import dataclasses
import re
from pathlib import Path

import pytest

from inferd.backends.api import BatchingSpec, InstanceSpec, ModelSpec, QueueSpec, SequenceSpec, Signature, TensorSpec
from inferd.server.engine.config.completion import fill_defaults
from inferd.server.engine.config.parameters import PARAMETERS, of_server
from inferd.server.settings import DEFAULTS
from inferd_client.pb import model_config_pb2 as pb

DOCS = Path(__file__).resolve().parents[3] / "docs"
CONFIGURATION = (DOCS / "configuration.md").read_text()
HEAD = 'backend: "fake" max_batch_size: 8\n'
SEQUENCES = "sequence_batching { }\n"
NUMBERS = {"one": 1, "two": 2}
BATCHING = Signature((TensorSpec("x", "FP32", (3,)),), (TensorSpec("y", "FP32", ()),), batches=True)


@pytest.fixture
def plain(prepared, io):
    """The specification of a model whose configuration has no more than it must."""
    return prepared(HEAD + io).spec


@pytest.fixture
def sequences(prepared, io):
    """The same with sequence_batching."""
    return prepared(HEAD + SEQUENCES + io).spec


OF_QUEUE = {
    "max_queue_size": "max_size",
    "default_timeout_microseconds": "timeout_us",
    "allow_timeout_override": "overridable",
}

OF_SEQUENCES = {
    "sequence_end_notice": "notices_end",
    "sequence_ends_with_stream": "ends_with_stream",
    "sequence_drain_seconds": "drain_seconds",
    "sequence_max_backlog": "max_backlog",
}

OF_MODEL = {
    "coalesce_requests": "coalesces",
    "decoupled_model_infer": "single_responses",
    "split_requests": "splits",
    "pad_buckets": "pad_buckets",
}


def test_parameters_have_the_defaults_of_their_page(plain, sequences, prepared, io):
    table = CONFIGURATION[CONFIGURATION.index("<!-- begin parameters") : CONFIGURATION.index("<!-- end parameters")]
    page = dict(re.findall(r"^\| `([\w.]+)` \| `([^`]*)` \| ", table, re.MULTILINE))
    (level,) = plain.queue.levels
    found = {parameter: getattr(plain, field) for parameter, field in OF_MODEL.items()}
    found |= {parameter: getattr(sequences.sequence, field) for parameter, field in OF_SEQUENCES.items()}
    found |= {f"queue_policy.{parameter}": getattr(level, field) for parameter, field in OF_QUEUE.items()}
    found["queue_policy.timeout_action"] = "DELAY" if level.yields else "REJECT"
    found["adaptive_queue_delay"] = prepared(HEAD + "dynamic_batching { }" + io).spec.batching.adaptive
    found["sequence_end_reason"] = "".join(each.tensor.name for each in sequences.supplied)
    found["warmup_batch_sizes"] = plain.warmup
    found["pad"] = {tensor.name: tensor.pad_value for tensor in plain.inputs if tensor.pad_value is not None}
    found["unpad"] = {tensor.name: tensor.cut_like for tensor in plain.outputs if tensor.cut_like}
    found["version_labels"] = dict(of_server(pb.ModelConfig())["version_labels"])
    assert list(page) == [each.name for each in PARAMETERS]
    assert found.keys() == page.keys()
    for each in PARAMETERS:
        assert (each.default, page[each.name]) == (found[each.name], as_written(found[each.name])), each.name


def as_written(value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def test_a_specification_without_a_field_is_that_of_a_configuration_without_it(plain, sequences, prepared, io):
    """What tests and backends make without a field is what a model has whose configuration does not name it."""
    given = {"name", "backend", "max_batch_size", "inputs", "outputs", "instances"}
    bare = ModelSpec("m", "fake")
    for field in dataclasses.fields(ModelSpec):
        if field.name not in given:
            assert getattr(plain, field.name) == getattr(bare, field.name), field.name
    assert plain.instances == (InstanceSpec("m_0"),)
    assert sequences.sequence == SequenceSpec()
    batches = prepared(HEAD + "dynamic_batching { }" + io).spec
    assert batches.batching == BatchingSpec((8,))
    assert batches.queue == QueueSpec()


def counts(backend: str) -> int:
    config = pb.ModelConfig(name="m", backend=backend)
    fill_defaults(config)
    return config.instance_group[0].count


def told(text: str, pattern: str, *values: object) -> None:
    """The page's words are these values; a number may be a word."""
    found = re.search(pattern, text)
    assert found, f"another text than {pattern}"
    assert [NUMBERS.get(each, each) for each in found.groups()] == list(values)


def test_fields_have_the_defaults_of_their_page(prepared, plain, sequences, io):
    table = CONFIGURATION[CONFIGURATION.index("| field | meaning and default |") :].partition("\n\n")[0]
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]*[Dd]efault(?!_model).*) \|$", table, re.MULTILINE)[1:])
    by_field = {re.search(r"`(\w+)`", names)[1]: text for names, text in rows.items()}
    config = pb.ModelConfig(name="m", backend="fake", max_batch_size=8)
    fill_defaults(config)
    others = ["name", "platform", "default_model_filename"]  # see tests/engine/config/test_defaults.py
    assert list(by_field) == [*others, "version_policy", "instance_group", "dynamic_batching"]
    told(by_field["version_policy"], "default the latest (one)", config.version_policy.latest.num_versions)
    instances = r"Default: (\w+) instance, (\w+) for onnxruntime on the CPU"
    told(by_field["instance_group"], instances, counts("fake"), counts("onnxruntime"))
    told(by_field["dynamic_batching"], "default: (no) delay", "no")
    assert prepared(HEAD + "dynamic_batching { }" + io).spec.batching.max_queue_delay_us == 0
    completed = prepared('backend: "fake"\n', BATCHING).spec.max_batch_size
    assert completed == DEFAULTS.default_max_batch_size
    told(CONFIGURATION, r"`max_batch_size: (\d+)` for a model all of whose tensors", f"{completed}")
    told(CONFIGURATION, r"default-max-batch-size=N` changes the (\d+)", f"{completed}")
    page = (DOCS / "sequences.md").read_text()
    idle = r"`max_sequence_idle_microseconds` \(default (\w+) second\)"
    told(page, idle, sequences.sequence.max_idle_us // 1_000_000)
    told(page, r"`(\w+)` \(the default\)", "direct" if sequences.sequence.direct else "oldest")
    kind = pb.ModelInstanceGroup.Kind.Name(pb.ModelInstanceGroup().kind)
    told((DOCS / "gpu.md").read_text(), r"`(\w+)`, the default, means a GPU", kind)
