"""Guards that what the reader reads is what protobuf's own reads, and that it reads all ways of writing."""

import re

import pytest
from google.protobuf import text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.server.engine.pbtxt import reader
from inferd.server.engine.pbtxt.parse import parse_file
from inferd.server.errors import ConfigError
from inferd_client.pb import model_config_pb2 as pb

NUMBERS = {
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: st.integers(-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: st.integers(0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: st.integers(0, (1 << 64) - 1),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32, allow_nan=False),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(allow_nan=False),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
}
PLAIN = st.sampled_from(["", "a", "max_batch_size", "# no comment", "größer", "{ key: 1 }", " "])
ANY = PLAIN | st.text(max_size=8) | st.sampled_from(['"', "\\", "'", "\n", "\t"])
PIECE = re.compile(r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\s{}<>\[\]:;,"']+|\S""")


def is_map(field: FieldDescriptor) -> bool:
    return bool(field.message_type and field.message_type.GetOptions().map_entry)


def fill(draw, message, texts) -> None:
    """Some fields, with any values."""
    descriptor: Descriptor = message.DESCRIPTOR
    chosen = st.lists(st.sampled_from([*descriptor.fields]), max_size=4, unique_by=lambda each: each.name)
    for field in draw(chosen) if descriptor.fields else ():
        if is_map(field):
            fill_map(draw, getattr(message, field.name), field, texts)
        elif field.is_repeated:
            for _ in range(draw(st.integers(0, 2))):
                if field.message_type:
                    fill(draw, getattr(message, field.name).add(), texts)
                else:
                    getattr(message, field.name).append(draw(scalars(field, texts)))
        elif field.message_type:
            getattr(message, field.name).SetInParent()
            fill(draw, getattr(message, field.name), texts)
        else:
            setattr(message, field.name, draw(scalars(field, texts)))


def fill_map(draw, entries, field, texts) -> None:
    key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    for each in draw(st.lists(scalars(key, texts), max_size=2)):
        if value.message_type:
            fill(draw, entries[each], texts)
        else:
            entries[each] = draw(scalars(value, texts))


def scalars(field, texts):
    if field.enum_type:
        return st.sampled_from([each.number for each in field.enum_type.values])
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return texts if field.type == FieldDescriptor.TYPE_STRING else texts.map(str.encode)
    return NUMBERS[field.cpp_type]


@st.composite
def configs(draw, texts=ANY):
    config = pb.ModelConfig()
    fill(draw, config, texts)
    return config


def written(config, *, short: bool, in_one_line: bool) -> str:
    return text_format.MessageToString(
        config, use_short_repeated_primitives=short, as_one_line=in_one_line, as_utf8=True
    )


def read(text: str) -> tuple[bool, pb.ModelConfig]:
    config = pb.ModelConfig()
    return reader.merge(text, config), config


@settings(max_examples=40)
@given(configs(), st.booleans(), st.booleans())
def test_what_is_written_is_read(config, short, in_one_line):
    is_read, found = read(written(config, short=short, in_one_line=in_one_line))
    assert not is_read or found == config


@settings(max_examples=40)
@given(configs(), st.booleans(), st.data())
def test_what_is_nearly_a_configuration_is_read_as_text_format_does_or_left_to_it(config, short, data):
    """A token is left out, comes twice, or comes where another was."""
    pieces = PIECE.findall(written(config, short=short, in_one_line=False))
    for _ in range(data.draw(st.integers(0, 2))):
        if pieces:
            place, other = (data.draw(st.integers(0, len(pieces) - 1)) for _ in range(2))
            change = data.draw(st.sampled_from(["leave out", "twice", "another"]))
            pieces[place : place + 1] = {
                "leave out": [],
                "twice": [pieces[place]] * 2,
                "another": [pieces[other]],
            }[change]
    text = "\n".join(pieces)
    is_read, found = read(text)
    if is_read:
        assert found == text_format.Parse(text, pb.ModelConfig())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing\n",
        'name: "m" # "its" name\nplatform:"onnxruntime_onnx"\nmax_batch_size : 8',
        "input [ { name: 'x' data_type: TYPE_FP32 dims: [ 1, -1 ] }, { name: 'y', dims: 3; dims: [] } ]",
        "output: { name: 'y' label_filename: 'a # b' }",
        'parameters { key: "k" value { string_value: "v" } }\nparameters: { key: "l", value: { } }',
        'metric_tags [ { key: "a" value: "b" } ]',
        "dynamic_batching { }",
        "version_policy: { specific { versions: [ 1, 2 ] } }",
        "instance_group [ { count: 2 kind: KIND_CPU passive: true gpus: [ 0 ] } ]",
        "model_metrics { metric_control { histogram_options { buckets: [ 0.5, 1, 2e3, -4.25 ] } } }",
        'name: "a" "b"',
        r'name: "\x41"',
        "max_batch_size: 010",
        "max_batch_size: 0x10",
        "input < name: 'x' >",
        "input { data_type: 11 }",
        "instance_group { passive: 1 }",
        'parameters { value { } key: "k" }',
        'parameters { key: "k" }',
        "dynamic_batching { priority_queue_policy { key: 1 value { } } }",
    ],
)
def test_all_ways_of_writing_are_read(text):
    is_read, found = read(text)
    assert is_read
    assert found == text_format.Parse(text, pb.ModelConfig())


@pytest.mark.parametrize(
    "text",
    [
        "name: 'a' name: 'a'",
        "max_batch_size: 1.0",
        "max_batch_size 4",
        "max_batch_size: 99999999999999999999",
        "input < name: 'x' }",
        "input { dims: [ 1, ] }",
        "input { dims: [ 1 2 ] }",
        "input { name: 'x'",
        "input { name: 'x' } }",
        "dynamic_batching { } sequence_batching { }",
        'parameters { key: "k" value { } } parameters { key: "k" value { } }',
        "name: 'a';;",
        "unknown: 3",
    ],
)
def test_what_is_wrong_is_left_to_text_format(text, tmp_path):
    assert not read(text)[0]
    path = tmp_path / "config.pbtxt"
    path.write_text(text)
    try:
        expected = text_format.Parse(text, pb.ModelConfig())
    except text_format.ParseError:
        expected = None
    if expected is None or text.count('"k"') == 2:
        with pytest.raises(ConfigError, match=re.escape(str(path))):
            parse_file(path, tmp_path)
    else:
        assert parse_file(path, tmp_path)[0] == expected
