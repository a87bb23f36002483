"""The wire contract: our descriptors against those that tritonclient installs, and the generated files."""

import pickle
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor
from tritonclient.grpc import model_config_pb2 as their_model_config
from tritonclient.grpc import service_pb2 as their_service

from inferd_client.pb import grpc_service_pb2, model_config_pb2, pool

ROOT = Path(__file__).resolve().parents[2]

# What ours has and theirs has not.
ADDED_FIELDS = {
    "inference.ModelMetadataResponse.properties",
    "inference.ModelStatistics.adaptive_delay",
    "inference.ModelStatistics.fail_reasons",
    "inference.ModelStatistics.queue_times",
}
ADDED_MESSAGES = {
    "inference.AdaptiveDelay",
    "inference.ModelMetadataResponse.PropertiesEntry",
    "inference.ModelStatistics.FailReasonsEntry",
    "inference.QueueTimeBucket",
}

PAIRS = [
    pytest.param(model_config_pb2.DESCRIPTOR, their_model_config.DESCRIPTOR, id="model_config"),
    pytest.param(grpc_service_pb2.DESCRIPTOR, their_service.DESCRIPTOR, id="grpc_service"),
]


def messages(parents: Iterable[Descriptor]) -> Iterator[Descriptor]:
    """The messages and all that are nested in them."""
    for message in parents:
        yield message
        yield from messages(message.nested_types)


def enums(file: FileDescriptor) -> Iterator[EnumDescriptor]:
    yield from file.enum_types_by_name.values()
    for message in messages(file.message_types_by_name.values()):
        yield from message.enum_types


def contract(field: FieldDescriptor) -> tuple[object, ...]:
    """Everything about a field that bytes, JSON or generated code depend on."""
    message, enum, oneof = field.message_type, field.enum_type, field.containing_oneof
    return (
        field.name,
        field.json_name,
        field.number,
        field.type,
        field.is_repeated,
        field.is_packed,
        field.has_presence,
        message.full_name if message else None,
        bool(message and message.GetOptions().map_entry),
        enum.full_name if enum else None,
        oneof.full_name if oneof else None,
    )


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_messages_and_fields_are_those_of_tritonclient(ours: FileDescriptor, theirs: FileDescriptor) -> None:
    mine = {m.full_name: m for m in messages(ours.message_types_by_name.values())}
    expected = {m.full_name: m for m in messages(theirs.message_types_by_name.values())}
    assert set(mine) - ADDED_MESSAGES == set(expected)
    for name, message in expected.items():
        fields = {f.name: contract(f) for f in mine[name].fields if f.full_name not in ADDED_FIELDS}
        assert fields == {f.name: contract(f) for f in message.fields}, name


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_enums_are_those_of_tritonclient(ours: FileDescriptor, theirs: FileDescriptor) -> None:
    def values(file: FileDescriptor) -> dict[str, list[tuple[str, int]]]:
        return {e.full_name: [(v.name, v.number) for v in e.values] for e in enums(file)}

    assert values(ours) == values(theirs)


def test_the_service_has_the_20_rpcs_of_tritonclient() -> None:
    def rpcs(file: FileDescriptor) -> dict[str, tuple[str, str, bool, bool]]:
        service = file.services_by_name["GRPCInferenceService"]
        return {
            m.full_name: (m.input_type.full_name, m.output_type.full_name, m.client_streaming, m.server_streaming)
            for m in service.methods
        }

    ours = rpcs(grpc_service_pb2.DESCRIPTOR)
    assert ours == rpcs(their_service.DESCRIPTOR)
    assert len(ours) == 20


def test_metadata_properties_are_kserves() -> None:
    field = grpc_service_pb2.ModelMetadataResponse.DESCRIPTOR.fields_by_name["properties"]
    assert field.number == 6
    assert field.message_type.GetOptions().map_entry


def test_the_other_dialect_reads_our_bytes() -> None:
    ours = grpc_service_pb2.ModelInferRequest(model_name="m", id="7", raw_input_contents=[b"abc"])
    ours.inputs.add(name="x", datatype="UINT8", shape=[3]).parameters["p"].int64_param = -1
    theirs = their_service.ModelInferRequest.FromString(ours.SerializeToString())
    assert str(theirs) == str(ours)
    assert theirs.SerializeToString(deterministic=True) == ours.SerializeToString(deterministic=True)


def test_messages_can_be_found_and_pickled() -> None:
    assert pool.FindServiceByName("inference.GRPCInferenceService").file is grpc_service_pb2.DESCRIPTOR
    request = grpc_service_pb2.ModelReadyRequest(name="m")
    assert type(request).__module__ == "inferd_client.pb.grpc_service_pb2"
    assert pickle.loads(pickle.dumps(request)) == request


@pytest.mark.parametrize(
    "imports",
    [
        "import tritonclient.grpc, inferd_client.pb.grpc_service_pb2",
        "import inferd_client.pb.grpc_service_pb2, tritonclient.grpc",
    ],
)
def test_both_dialects_live_in_one_process(imports: str) -> None:
    code = f"{imports}\nfrom inferd_client.pb import model_config_pb2 as m\nprint(m.ModelConfig(name='x'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == 'name: "x"'


def test_generated_files_are_up_to_date(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "tools" / "generate_pb.py"), str(tmp_path)], check=True)
    generated = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.py*"))
    assert generated == [
        f"inferd_client/pb/{name}_pb2.{kind}"
        for name in ("grpc_service", "load_report", "model_config")
        for kind in ("py", "pyi")
    ]
    for name in generated:
        committed = (ROOT / name).read_text()
        assert (tmp_path / name).read_text() == committed, f"{name} is stale: run python tools/generate_pb.py"
