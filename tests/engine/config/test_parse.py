"""Reading config.pbtxt: positions, unknown names, map keys given twice, files that are none."""

import os
from pathlib import Path

import pytest

from inferd.server.engine.pbtxt.parse import MAX_FILE_SIZE, parse_file
from inferd.server.engine.pbtxt.source import Source
from inferd.server.errors import ConfigError


def parse(tmp_path: Path, text: str | bytes):
    path = tmp_path / "config.pbtxt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return parse_file(path, tmp_path)


@pytest.mark.parametrize(
    ("text", "position", "fragments"),
    [
        ("max_batch: 3", "1:1", ["no field named 'max_batch'", "did you mean 'max_batch_size'?"]),
        ("# one\n\ninput {\n  dim: 3 }", "4:3", ["ModelInput has no field named 'dim'", "'dims'?"]),
        ("input { data_type: FP32 }", "1:20", ["no value named 'FP32'", "'TYPE_FP32'?"]),
        ("input { data_type: type_fp16 }", "1:20", ["no value named 'type_fp16'", "'TYPE_FP16'?"]),
        ("instance_group { kind: cpu }", "1:24", ["no value named 'cpu'", "'KIND_CPU'?"]),
        ("xyzzy: 3", "1:1", ["no field named 'xyzzy': it is one of name, platform"]),
        ("max_batch_size: 4\nmax_batch_size: 8", "2", ["max_batch_size"]),
        ("max_batch_size: 3000000000", "1:17", ["out of range"]),
        ("max_batch_size: four", "1:17", ["four"]),
        ("input {", "1", []),
        ("dynamic_batching { }\nsequence_batching { }", "2", ["sequence_batching", "dynamic_batching"]),
    ],
)
def test_errors_say_where_and_what_was_meant(tmp_path: Path, text: str, position: str, fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(tmp_path, text)
    assert str(raised.value).startswith(f"{tmp_path / 'config.pbtxt'}:{position}")
    for fragment in fragments:
        assert fragment in str(raised.value)


@pytest.mark.parametrize(
    ("text", "field", "lines"),
    [
        ('parameters { key: "a" value { } }\nparameters { key: "a" value { } }', "parameters 'a'", (2, 1)),
        ('parameters [\n{ key: "a" },\n{ value { string_value: "b" } key: \'a\' } ]', "parameters 'a'", (3, 2)),
        ('metric_tags { key: "t" value: "1" }\n\nmetric_tags < key: "t" value: "2" >', "metric_tags 't'", (3, 1)),
        ('parameters { key: "a" value { } }\nparameters { key: "\\x61" value { } }', "parameters 'a'", (2, 1)),
        ("dynamic_batching {\npriority_queue_policy { key: 1 }\npriority_queue_policy { key: 1 } }", "'1'", (3, 2)),
    ],
)
def test_a_map_key_given_twice_is_an_error(tmp_path: Path, text: str, field: str, lines: tuple[int, int]) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(tmp_path, text)
    error = str(raised.value)
    assert f":{lines[0]}: " in error
    assert f"{field} is given twice, first in line {lines[1]}" in error


def test_one_key_in_two_maps_is_fine(tmp_path: Path) -> None:
    text = 'parameters { key: "a" }\nmetric_tags { key: "a" value: "a" }'
    config, _ = parse(tmp_path, text)
    assert list(config.parameters) == list(config.metric_tags) == ["a"]


def test_every_field_has_its_line(tmp_path: Path) -> None:
    text = """name: "m" # comment { with "marks'
max_batch_size: 8
input [
  {
    name: "in" "put"
    dims: [ 1,
            -1, -2 ]
  },
  { name: 'it\\'s' dims: 3 dims: 4; }
]
input: < name: "c"
  reshape { shape: [ ] } >
parameters: {
  key: "k"
  value: {
    string_value: "v" } }
optimization { graph { level: 1 }
  priority: PRIORITY_MAX }
"""
    config, source = parse(tmp_path, text)
    assert [tensor.name for tensor in config.input] == ["input", "it's", "c"]
    assert source.lines == {
        ("name",): 1,
        ("max_batch_size",): 2,
        ("input",): 3,
        ("input", 0): 4,
        ("input", 0, "name"): 5,
        ("input", 0, "dims"): 6,
        ("input", 0, "dims", 0): 6,
        ("input", 0, "dims", 1): 7,
        ("input", 0, "dims", 2): 7,
        ("input", 1): 9,
        ("input", 1, "name"): 9,
        ("input", 1, "dims"): 9,
        ("input", 1, "dims", 0): 9,
        ("input", 1, "dims", 1): 9,
        ("input", 2): 11,
        ("input", 2, "name"): 11,
        ("input", 2, "reshape"): 12,
        ("input", 2, "reshape", "shape"): 12,
        ("parameters",): 13,
        ("parameters", "k"): 13,
        ("parameters", "k", "string_value"): 16,
        ("optimization",): 17,
        ("optimization", "graph"): 17,
        ("optimization", "graph", "level"): 17,
        ("optimization", "priority"): 18,
    }


def test_a_place_is_the_nearest_written_field() -> None:
    source = Source(Path("f"), 'name: "m"\ninput {\n}')
    assert source.at("input", 0, "dims") == "f:2"
    assert source.at("output") == "f"
    assert source.has("name") and not source.has("platform")


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.pbtxt:2: the text is not UTF-8"):
        parse(tmp_path, b'name: "m"\nplatform: "\xff"')


def test_a_huge_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="more than 1048576 bytes"):
        parse(tmp_path, b"#" * (MAX_FILE_SIZE + 1))


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
@pytest.mark.timeout(120)
def test_what_is_no_regular_file_is_not_read(tmp_path: Path, make) -> None:
    make(tmp_path / "config.pbtxt")
    with pytest.raises(ConfigError):
        parse_file(tmp_path / "config.pbtxt", tmp_path)
