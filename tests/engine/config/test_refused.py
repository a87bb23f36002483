"""Each refused field is refused by name, its default is not, and the documentation lists them all."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from inferd.server.engine.config.refused import CARRIED, REFUSED, uses
from inferd.server.errors import ConfigError
from inferd_client.pb import model_config_pb2 as pb

ROOT = Path(__file__).resolve().parents[3]
CONFIG: Descriptor = pb.ModelConfig.DESCRIPTOR

HEAD = 'backend: "fake"\nmax_batch_size: 8\n'

# A configuration may leave these to their value here: asking for nothing is no use of the field.
HARMLESS = [
    "response_cache { enable: false }",
    "model_transaction_policy { decoupled: false }",
    "model_transaction_policy { }",
    "dynamic_batching { preserve_ordering: false default_queue_policy { timeout_action: REJECT max_queue_size: 0 } }",
    "instance_group { passive: false rate_limiter { } }",
    "optimization { cuda { graphs: false } priority: PRIORITY_DEFAULT execution_accelerators { } }",
    "optimization { input_pinned_memory { enable: true } }",
    "model_operations { }",
]

FIELD = FieldDescriptor


def value_text(field: FieldDescriptor) -> str:
    """The field in text format with some value that is not its default."""
    if field.message_type:
        return f"{field.name} {{ }}"
    if field.type == FIELD.TYPE_ENUM:
        return f"{field.name}: {field.enum_type.values[1].name}"
    return {
        FIELD.TYPE_BOOL: f"{field.name}: true",
        FIELD.TYPE_STRING: f'{field.name}: "1"',
    }.get(field.type, f"{field.name}: 1")


def text_of(path: str) -> str:
    """A configuration that uses the field, each name on a line of its own."""
    *outer, last = path.split(".")
    message = CONFIG
    text = ""
    for name in outer:
        text += f"{name} {{\n"
        message = message.fields_by_name[name].message_type
    return text + value_text(message.fields_by_name[last]) + "\n}" * len(outer)


@pytest.mark.parametrize("field", REFUSED, ids=lambda field: field.path)
def test_a_refused_field_is_refused_by_name(prepared, io: str, field) -> None:
    with pytest.raises(ConfigError) as raised:
        prepared(f"{HEAD}{text_of(field.path)}\n{io}")
    line = 3 + field.path.count(".")
    assert f"config.pbtxt:{line}: {field.path} is not supported for model 'm': {field.why}; " in str(raised.value)


@pytest.mark.parametrize("text", HARMLESS)
def test_a_value_that_asks_for_nothing_is_accepted(prepared, io: str, text: str) -> None:
    prepared(HEAD + text + io)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("optimization { priority: PRIORITY_MAX }", "optimization.priority"),
        ("optimization { cuda { graphs: true } }", "optimization.cuda.graphs"),
        (
            'optimization { execution_accelerators { gpu_execution_accelerator { name: "tensorrt" } } }',
            "optimization.execution_accelerators.gpu_execution_accelerator",
        ),
        ("instance_group { secondary_devices { kind: KIND_NVDLA } }", "instance_group.secondary_devices"),
    ],
)
def test_a_hint_for_a_device_that_is_not_used_is_said_once(prepared, io: str, caplog, text: str, field: str) -> None:
    with caplog.at_level(logging.WARNING, "inferd.config"):
        prepared(HEAD + text + io)
    (record,) = caplog.records
    assert f"config.pbtxt:3: {field} of model 'm' has no effect: " in record.getMessage()


def test_eager_batching_is_accepted(prepared, io: str, caplog) -> None:
    with caplog.at_level(logging.WARNING, "inferd.config"):
        found = prepared(HEAD + "optimization { eager_batching: true }" + io)
    assert found.config.optimization.eager_batching
    assert "config.pbtxt:3: optimization.eager_batching of model 'm' has no effect" in caplog.text


def test_every_use_is_found() -> None:
    config = pb.ModelConfig(input=[{}, {"reshape": {}}, {"reshape": {"shape": [1]}}])
    assert list(uses(config, ("input", "reshape"))) == [("input", 1, "reshape"), ("input", 2, "reshape")]


# Top-level fields that code serves, for the proof that no field is forgotten.
SERVED = {
    "model_repository_agents",
    "backend",
    "runtime",
    "batch_input",
    "batch_output",
    "cc_model_filenames",
    "default_model_filename",
    "dynamic_batching",
    "input",
    "instance_group",
    "max_batch_size",
    "metric_tags",
    "model_metrics",
    "model_transaction_policy",
    "model_warmup",
    "name",
    "optimization",
    "output",
    "parameters",
    "platform",
    "response_cache",
    "sequence_batching",
    "version_policy",
}


def test_every_field_is_served_refused_or_carried() -> None:
    named = {field.path.split(".")[0] for field in (*REFUSED, *CARRIED)}
    assert {field.name for field in CONFIG.fields} == SERVED | named


def test_the_documentation_lists_them() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "generate_docs.py"), "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
