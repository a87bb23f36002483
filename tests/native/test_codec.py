"""The codec against official protobuf, both ways.

INFERD_EFFORT=n makes the random parts n times as long and, above 1, different in every run.
"""

import math
import os
import random
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferd._native.protobuf import messages
from inferd_client.pb import grpc_service_pb2 as pb
from tests.native import strategies
from tests.native.official import DATATYPES, ROOT, check, content, contents, ours, parse, parse_cpp
from tests.native.protowire import FIXED32, FIXED64, VARINT, group, groups, number, packed, run, tag, varint

EFFORT = int(os.environ.get("INFERD_EFFORT", "1"))


def thorough(examples: int) -> settings:
    return settings(
        max_examples=examples * EFFORT if EFFORT > 1 else examples // 2,
        derandomize=EFFORT == 1,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def fp32_request() -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="identity", id="42")
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 16])
    request.outputs.add(name="OUTPUT0")
    request.raw_input_contents.append(np.arange(16, dtype="<f4").tobytes())
    return request


def typed_request() -> pb.ModelInferRequest:
    """One input of each datatype with typed contents, and every kind of parameter."""
    request = pb.ModelInferRequest(model_name="typed", model_version="3", id="größer")
    for datatype, (field, _) in DATATYPES.items():
        tensor = request.inputs.add(name=f"IN_{datatype}", datatype=datatype, shape=[3])
        name = pb.InferTensorContents.DESCRIPTOR.fields_by_number[field].name
        getattr(tensor.contents, name).extend([b"", b"a", b"bcd"] if field == 8 else [0, 1, 100])
        tensor.parameters["k"].double_param = 1.5
    request.parameters["bool"].bool_param = False
    request.parameters["int64"].int64_param = -1
    request.parameters["string"].string_param = "text"
    request.parameters["double"].double_param = math.pi
    request.parameters["uint64"].uint64_param = 2**64 - 1
    request.parameters["none"].SetInParent()
    request.outputs.add(name="OUT").parameters["classification"].int64_param = 3
    return request


SAMPLES = {"fp32": fp32_request().SerializeToString(), "typed": typed_request().SerializeToString()}

# Bytes that official protobuf refuses, wherever a field may stand.
BAD_FIELDS = {
    "truncated tag": b"\x8a",
    "truncated length": b"\x0a\x80",
    "truncated varint": b"\x48\x80",
    "truncated fixed32": b"\x4d\0\0\0",
    "truncated fixed64": b"\x49" + bytes(7),
    "trailing zero": number(9, 1) + b"\0",
    "field 0": b"\x02\0",
    "field 2^29": b"\x80\x80\x80\x80\x10\x00",
    "tag above 2^32": b"\x8a\x80\x80\x80\x20\x00",
    "wire type 6": b"\x0e",
    "wire type 7": b"\x0f",
    "end group alone": tag(9, 4),
    "end group of another": tag(9, 3) + tag(10, 4),
    "end group crossed": tag(9, 3) + tag(10, 3) + tag(9, 4) + tag(10, 4),
    "end group missing": tag(9, 3) + number(1, 1),
    "tag of 6 bytes": b"\x8a\x80\x80\x80\x80\x00\x00",
    "tag of 10 bytes": b"\x8a" + b"\x80" * 8 + b"\x00\x00",
    "length of 6 bytes": b"\x4a\x80\x80\x80\x80\x80\x00",
    "length of 10 bytes": b"\x4a" + b"\x80" * 9 + b"\x00",
    "length one past the end": b"\x4a\x02\x00",
    "length 2^31-1": b"\x4a" + varint(2**31 - 1),
    "length 2^31": b"\x4a" + varint(2**31),
    "length 2^32+1": b"\x4a" + varint(2**32 + 1) + b"\0",
    "length 2^64-1": b"\x4a" + varint(2**64 - 1),
    "varint of 11 bytes": b"\x48" + b"\x80" * 10 + b"\x00",
    "group in a group of wire type 6": tag(9, 3) + b"\x0e" + tag(9, 4),
    "length inside a group past its message": tag(9, 3) + b"\x4a\x40" + tag(9, 4),
}

# Bytes that official protobuf accepts as unknown, wherever a field may stand.
GOOD_FIELDS = {
    "nothing": b"",
    "padded unknown tag": tag(9, VARINT, 5) + b"\x01",
    "field 2^29-1": number(2**29 - 1, 1),
    "varint of 10 bytes": b"\x48" + b"\xff" * 9 + b"\x7f",
    "group": group(9, number(1, 2), run(2, b"\xff"), group(9), tag(3, FIXED32) + bytes(4), tag(4, FIXED64) + bytes(8)),
    "known number as a group": group(1, run(1, b"x")),
    "invalid UTF-8 in an unknown field": run(9, b"\xc0\x80"),
    "length padded to 5 bytes": b"\x4a\x81\x80\x80\x80\x00x",
}

# Where a field may stand: in each message of a request, with the number of messages around it.
PLACES = {
    "request": (0, lambda body: body),
    "entry": (1, lambda body: run(4, body)),
    "value": (2, lambda body: run(4, run(2, body))),
    "input": (1, lambda body: run(5, body)),
    "input entry": (2, lambda body: run(5, run(4, body))),
    "input value": (3, lambda body: run(5, run(4, run(2, body)))),
    "contents": (2, lambda body: run(5, run(5, body))),
    "output": (1, lambda body: run(6, body)),
    "output entry": (2, lambda body: run(6, run(2, body))),
    "output value": (3, lambda body: run(6, run(2, run(2, body)))),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", BAD_FIELDS)
def test_malformed_field_is_refused_in_every_message(place, name):
    _, put = PLACES[place]
    assert not check(put(BAD_FIELDS[name]))
    assert not check(SAMPLES["fp32"] + put(BAD_FIELDS[name]))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", GOOD_FIELDS)
def test_unknown_field_is_passed_over_in_every_message(place, name):
    _, put = PLACES[place]
    data = put(GOOD_FIELDS[name])
    assert check(data)
    assert check(SAMPLES["fp32"] + data + SAMPLES["typed"])


@pytest.mark.parametrize("place", PLACES)
def test_depth_limit_counts_messages_entries_and_groups(place):
    depth, put = PLACES[place]
    assert check(put(groups(100 - depth)))
    assert not check(put(groups(101 - depth)))
    assert not check(put(groups(10_000)))
    assert check(put(group(9) * 300))  # side by side is not deep


@pytest.mark.parametrize(
    "data",
    [
        tag(1, VARINT) + b"\x05",
        tag(5, FIXED64) + bytes(8),
        tag(7, FIXED32) + bytes(4),
        run(5, tag(3, FIXED64) + bytes(8)),
        group(4, run(1, b"key")),
        run(5, group(5, packed(2, 1))),
        run(5, run(5, tag(6, VARINT) + b"\x01")),
        run(5, run(5, number(8, 1))),
        run(4, run(2, run(1, b"\x01"))),
    ],
)
def test_known_field_of_another_wire_type_is_unknown(data):
    assert check(data)


TEXT_FIELDS = {
    "model_name": lambda s: run(1, s),
    "model_version": lambda s: run(2, s),
    "id": lambda s: run(3, s),
    "parameter key": lambda s: run(4, run(1, s)),
    "string_param": lambda s: run(4, run(2, run(3, s))),
    "input name": lambda s: run(5, run(1, s)),
    "input datatype": lambda s: run(5, run(2, s)),
    "input parameter key": lambda s: run(5, run(4, run(1, s))),
    "input string_param": lambda s: run(5, run(4, run(2, run(3, s)))),
    "output name": lambda s: run(6, run(1, s)),
    "output parameter key": lambda s: run(6, run(2, run(1, s))),
}
BAD_TEXT = [
    b"\xc0\x80", b"\xc1\xbf", b"\xe0\x9f\xbf", b"\xed\xa0\x80", b"\xed\xbf\xbf", b"\xf0\x8f\xbf\xbf",
    b"\xf4\x90\x80\x80", b"\xf5\x80\x80\x80", b"\xf8\x88\x80\x80\x80", b"\xfe", b"\xff", b"\x80", b"\xbf",
    b"\xc2", b"\xe1\x80", b"\xf1\x80\x80", b"\xc2\x41", b"\xe1\x41\x80", b"\xe1\x80\x41", b"\xf1\x80\x80\x41",
    b"\xf1\x80\xc0\x80", b"\xc2\xc2",
]  # fmt: skip
GOOD_TEXT = [
    b"", b"\0", b"\x7f", b"\xc2\x80", b"\xdf\xbf", b"\xe0\xa0\x80", b"\xed\x9f\xbf", b"\xee\x80\x80", b"\xef\xbf\xbf",
    b"\xf0\x90\x80\x80", b"\xf4\x8f\xbf\xbf",
]  # fmt: skip


@pytest.mark.parametrize("field", TEXT_FIELDS)
def test_utf8_is_checked_in_every_string_field(field):
    put = TEXT_FIELDS[field]
    for before in (*range(19), 30):
        for after in (0, 1, 7, 8, 20):
            for text in BAD_TEXT:
                assert not check(put(b"a" * before + text + b"z" * after))
            for text in GOOD_TEXT:
                assert check(put(b"a" * before + text + b"z" * after))


@pytest.mark.parametrize("field", TEXT_FIELDS)
def test_invalid_utf8_in_an_overwritten_duplicate_is_refused(field):
    put = TEXT_FIELDS[field]
    assert not check(put(b"\xc0\x80") + put(b"good"))


def test_every_two_byte_text_is_judged_as_official_protobuf_does():
    for first in range(256):
        for second in range(0, 256, 1 if EFFORT > 1 else 3):
            check(run(1, bytes([first, second])))


def test_bytes_fields_take_anything():
    assert check(run(7, b"\xc0\x80") + run(5, run(5, run(8, b"\xff\xfe"))))


def only_input(data: bytes) -> messages.DecodedInput:
    assert check(data)
    (tensor,) = messages.decode(data).inputs
    return tensor


@pytest.mark.parametrize(
    ("encoded", "dim"),
    [
        (b"\xff" * 9 + b"\x7f", -1),
        (b"\xff" * 9 + b"\x01", -1),
        (b"\x80" * 9 + b"\x02", 0),
        (b"\xff\xff\xff\xff\x0f", 2**32 - 1),
        (varint(5, 10), 5),
    ],
)
def test_values_of_up_to_ten_bytes_keep_64_bits(encoded, dim):
    assert only_input(run(5, run(3, encoded))).shape == (dim,)
    assert only_input(run(5, tag(3, VARINT) + encoded)).shape == (dim,)
    assert check(run(5, run(5, run(3, encoded))))


@pytest.mark.parametrize("number_of", [1, 2, 4, 5])
@pytest.mark.parametrize("value", [0, 1, 2, 128, 2**32, 2**63, 2**64 - 1])
def test_numbers_of_parameters_are_read_as_protobuf_reads_them(number_of, value):
    assert check(run(4, run(2, number(number_of, value))))
    assert check(run(4, run(2, number(number_of, value, 10))))


@pytest.mark.parametrize("field", range(1, 8))
def test_packed_bodies_end_with_an_element(field):
    for size in range(20):
        complete = size % {6: 4, 7: 8}.get(field, 1) == 0
        assert check(run(5, run(5, run(field, bytes(size))))) == complete
    if field < 6:
        assert not check(run(5, run(5, run(field, b"\x01\x80"))))
        assert not check(run(5, run(5, run(field, bytes(9) + b"\x80"))))
        assert not check(run(5, run(5, run(field, b"\x80" * 10 + b"\x00"))))
    assert not check(run(5, run(3, b"\x80")) + b"\x01")


def test_packed_unpacked_and_split_contents_are_joined_in_order():
    tensor = run(5, packed(2, 1, 2), number(2, 3), packed(2), packed(2, -4)) + run(1, b"X") + run(5, number(2, 5))
    decoder = messages.Decoder()
    assert check(run(5, tensor), decoder)
    assert decoder.contents(0, "INT32") == np.array([1, 2, 3, -4, 5], "<i4").tobytes()
    assert decoder.contents(0, "INT8") == np.array([1, 2, 3, -4, 5], "<i1").tobytes()


@pytest.mark.parametrize("datatype", [d for d, (field, _) in DATATYPES.items() if field in (1, 2, 3, 4, 5)])
def test_integers_are_narrowed_to_their_low_bytes(datatype):
    field, dtype = DATATYPES[datatype]
    numbers = [0, 1, 127, 128, 255, 256, 2**15, 2**16 + 1, 2**31, 2**32 + 5, 2**40 + 7, 2**63, 2**64 - 1]
    decoder = messages.Decoder()
    assert check(run(5, run(5, packed(field, *numbers), *(number(field, n) for n in numbers))), decoder)
    expected = np.array(numbers * 2, np.uint64).astype(dtype)
    assert decoder.contents(0, datatype) == expected.tobytes()


def test_contents_of_every_datatype():
    request = typed_request()
    decoder = messages.Decoder()
    assert check(request.SerializeToString(), decoder)
    for index, (datatype, (field, _)) in enumerate(DATATYPES.items()):
        assert decoder.contents(index, datatype) == contents(request.inputs[index], datatype)
        for other, (other_field, _) in DATATYPES.items():
            if other_field != field:
                with pytest.raises(ValueError, match="are not"):
                    decoder.contents(index, other)
        for raw_only in ("FP16", "BF16", "INVALID", ""):
            with pytest.raises(ValueError, match="are not"):
                decoder.contents(index, raw_only)


def test_empty_contents_are_known_to_be_there():
    assert only_input(run(5, run(1, b"x"))).has_contents is False
    tensor = only_input(run(5, run(5)))
    assert (tensor.has_contents, tensor.contents_mask, tensor.contents_count) == (True, 0, 0)
    tensor = only_input(run(5, run(5, run(8))))
    assert (tensor.contents_mask, tensor.contents_count, tensor.contents_bytes) == (1 << 8, 1, 0)


def test_last_of_a_duplicate_scalar_wins_even_when_empty():
    assert check(run(1, b"a") + run(1) + run(2, b"1") + run(2, b"2") + run(5, run(1, b"a") + run(1, b"b")))
    assert messages.decode(run(1, b"a") + run(1)).model_name == ""


def test_duplicate_inputs_outputs_and_raw_are_appended():
    data = run(7, b"r0") + run(5, run(1, b"i")) + run(6, run(1, b"o")) + run(5, run(1, b"i")) + run(7) + run(6)
    assert check(data)
    request = messages.decode(data)
    assert [i.name for i in request.inputs] == ["i", "i"]
    assert [o.name for o in request.outputs] == ["o", ""]
    assert request.raw == (b"r0", b"")


VALUE = run(2, number(2, 7))


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([run(1, b"k") + VALUE], {"k": ("int64_param", 7)}),
        ([VALUE + run(1, b"k")], {"k": ("int64_param", 7)}),
        ([VALUE], {"": ("int64_param", 7)}),
        ([run(1, b"k")], {"k": ("", None)}),
        ([b""], {"": ("", None)}),
        ([run(1, b"j") + VALUE + run(1, b"k")], {"k": ("int64_param", 7)}),
        ([run(1, b"k") + VALUE + run(2)], {"k": ("int64_param", 7)}),
        ([run(1, b"k") + VALUE + run(2, run(3, b"x"))], {"k": ("string_param", "x")}),
        ([run(1, b"k") + run(2, run(3, b"x"), number(1, 2))], {"k": ("bool_param", True)}),
        ([run(1, b"k") + VALUE, run(1, b"k") + run(2)], {"k": ("", None)}),
        ([run(1, b"k") + VALUE, run(1, b"l") + VALUE, run(1, b"k") + run(2, number(5, 2**64 - 1))],
         {"k": ("uint64_param", 2**64 - 1), "l": ("int64_param", 7)}),
        # an unknown field in an entry: upb drops the entry, C++ keeps it, and so do we
        ([run(1, b"k") + number(3, 1) + VALUE], {"k": ("int64_param", 7)}),
        ([number(1, 1) + VALUE], {"": ("int64_param", 7)}),
        ([run(1, b"k") + run(2, number(2, 7), number(9, 1))], {"k": ("int64_param", 7)}),
    ],
)  # fmt: skip
def test_entries_of_a_map_may_be_in_parts_in_any_order_and_twice(entries, expected):
    data = b"".join(run(4, e) for e in entries)
    assert check(data)
    assert messages.decode(data).parameters == expected
    assert messages.decode(run(5, data)).inputs[0].parameters == expected
    assert messages.decode(run(6, *(run(2, e) for e in entries))).outputs[0].parameters == expected


@pytest.mark.parametrize(
    "data",
    [
        run(4, run(1, b"k"), number(3, 1), VALUE),
        run(4, number(1, 1), VALUE),
        run(5, run(4, run(1, b"k"), run(9, b"?"))),
        b"\x0a\x80\x80\x80\x80\x80\x00",
        b"\x0a\x80\x80\x80\x80\x00",
        b"\x4a" + b"\x80" * 9 + b"\x00",
    ],
)
def test_where_official_implementations_differ_we_follow_cpp(data):
    message = parse_cpp(data)
    assert ours(messages.Decoder(), data) == (content(message) if message else None)


def test_the_one_difference_from_cpp_is_a_tag_above_32_bits():
    """C++ drops the high bits; taking one field for another is no service to anybody."""
    data = b"\x8a\x80\x80\x80\x10\x01n"
    assert parse_cpp(data) == pb.ModelInferRequest(model_name="n")
    assert parse(data) is None
    assert ours(messages.Decoder(), data) is None


def test_the_last_parameter_of_a_key_counts():
    decoder = messages.Decoder()
    decoder.decode(
        b"".join(run(4, run(1, k), run(2, number(2, n))) for n, k in enumerate([b"a", b"b", b"a", b"", b"ac"]))
    )
    assert decoder.parameter("a") == ("int64_param", 2)
    assert decoder.parameter("b") == ("int64_param", 1)
    assert decoder.parameter("") == ("int64_param", 3)
    assert decoder.parameter("ab") is None
    decoder.decode(b"")
    assert decoder.parameter("") is None


def test_parameters_belong_to_their_tensor():
    request = pb.ModelInferRequest()
    for i in range(3):
        tensor = request.inputs.add(name=f"i{i}", shape=range(i))
        for j in range(i):
            tensor.parameters[f"{i}{j}"].int64_param = j
        request.outputs.add().parameters[f"o{i}"].bool_param = True
    assert check(request.SerializeToString())


@pytest.mark.parametrize("sample", SAMPLES)
def test_every_truncation_of_a_sample(sample):
    data = SAMPLES[sample]
    accepted = sum(check(data[:size]) for size in range(len(data) + 1))
    assert 0 < accepted < len(data)


@pytest.mark.parametrize("sample", SAMPLES)
def test_bytes_behind_a_sample(sample):
    for tail in range(256):
        check(SAMPLES[sample] + bytes([tail]))


def test_more_than_65536_of_anything_that_is_kept_is_refused():
    most = 65536
    assert len(messages.decode(run(7) * most).raw) == most
    for data in (
        run(7) * (most + 1),
        run(6) * (most + 1),
        run(5) * (most + 1),
        run(4) * (most + 1),
        run(5, run(4) * (most + 1)),
        run(6, run(2) * (most // 2)) + run(5, run(4) * (most // 2 + 1)),
        run(5, run(3, bytes(most + 1))),
        run(5, number(3, 1) * (most + 1)),
    ):
        with pytest.raises(ValueError, match="more than 65536"):
            messages.decode(data)
    assert only_input(run(5, run(3, bytes(most)))).shape == (0,) * most
    # elements of contents are not kept, so they have no limit
    assert only_input(run(5, run(5, run(1, bytes(3 * most))))).contents_count == 3 * most


def test_a_decoder_after_a_refusal_is_as_new():
    decoder = messages.Decoder()
    nothing = messages.Decoder().content()
    large = run(7) * 5000 + run(5, run(3, bytes(5000)), run(4) * 5000) + run(1, b"name")
    for data in (*SAMPLES.values(), large):
        decoder.decode(data)
        assert ours(decoder, data + b"\0") is None
        assert decoder.content() == nothing
        assert check(SAMPLES["fp32"], decoder)


@given(st.lists(strategies.requests, min_size=1, max_size=3), st.integers(0, 3))
@thorough(300)
def test_any_well_formed_request(requests, cut):
    decoder = messages.Decoder()
    for data in requests:
        assert check(data, decoder)
        if not check(data[: len(data) - cut], decoder):
            assert decoder.content() == messages.Decoder().content()


@given(st.data())
@thorough(300)
def test_what_official_protobuf_writes(data):
    """Requests as clients make them, typed contents included."""
    request = pb.ModelInferRequest(model_name=data.draw(strategies.names), id=data.draw(strategies.names))
    for _ in range(data.draw(st.integers(0, 3))):
        datatype = data.draw(st.sampled_from(list(DATATYPES)))
        field, dtype = DATATYPES[datatype]
        tensor = request.inputs.add(name=data.draw(strategies.names), datatype=datatype)
        tensor.shape.extend(data.draw(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4)))
        if data.draw(st.booleans()):
            request.raw_input_contents.append(data.draw(st.binary(max_size=64)))
            continue
        name = pb.InferTensorContents.DESCRIPTOR.fields_by_number[field].name
        if dtype is None:
            element = st.binary(max_size=20)
        elif dtype.kind == "f":
            element = st.floats(width=8 * dtype.itemsize)
        elif dtype.kind == "b":
            element = st.booleans()
        else:
            element = st.integers(int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
        getattr(tensor.contents, name).extend(data.draw(st.lists(element, max_size=30)))
    encoded = request.SerializeToString()
    assert check(encoded)
    decoder = messages.Decoder()
    assert ours(decoder, encoded) == content(request)


def mutations(rng: random.Random, data: bytes) -> bytes:
    """A few random edits of the kinds that break a parser."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(6):
            case 0 if at < len(out):
                out[at] = rng.randrange(256)
            case 1 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 2:
                out[at:at] = rng.choice([b"\0", b"\x80", b"\xff", b"\x7f", b"\x0b", b"\x0c", rng.randbytes(3)])
            case 3:
                del out[at : at + rng.randint(1, 4)]
            case 4:
                source = rng.randrange(len(out) + 1)
                out[at:at] = out[source : source + rng.randint(1, 30)]
            case 5:
                del out[at:]
    return bytes(out)


def test_a_mutated_message_is_accepted_exactly_when_protobuf_accepts_it():
    rng = random.Random(20_261_121 if EFFORT == 1 else None)
    decoder = messages.Decoder()
    pool = [*SAMPLES.values(), *(put(f) for _, put in PLACES.values() for f in GOOD_FIELDS.values())]
    accepted = 0
    rounds = 300_000 * EFFORT if EFFORT > 1 else 100_000
    for _ in range(rounds):
        data = mutations(rng, rng.choice(pool))
        if check(data, decoder):
            accepted += 1
            if len(data) < 400:  # what was accepted is mutated further
                pool[rng.randrange(len(pool))] = data
    assert 0.05 * rounds < accepted < 0.95 * rounds


def test_seeds_and_past_findings_of_the_fuzzer():
    seeds = sorted((ROOT / "tests" / "fuzz" / "corpus" / "codec").iterdir())
    assert len(seeds) > 50
    for seed in seeds:
        check(seed.read_bytes())


# ---------------------------------------------------------------------------------------------------------------------
# Encoding

parameter_values = st.one_of(
    st.just(("", None)),
    st.tuples(st.just("bool_param"), st.booleans()),
    st.tuples(st.just("int64_param"), st.integers(-(2**63), 2**63 - 1)),
    st.tuples(st.just("string_param"), strategies.names),
    st.tuples(st.just("double_param"), st.floats(allow_nan=False)),
    st.tuples(st.just("uint64_param"), st.integers(0, 2**64 - 1)),
)
response_outputs = st.lists(
    st.tuples(
        strategies.names,
        st.sampled_from([*DATATYPES, "FP16", "BF16"]),
        st.lists(st.integers(-1, 300) | st.integers(-(2**63), 2**63 - 1), max_size=6),
    ),
    max_size=4,
)


@given(
    strategies.names,
    strategies.names,
    strategies.names,
    st.dictionaries(strategies.names, parameter_values, max_size=4),
    response_outputs,
    st.lists(st.binary(max_size=400), max_size=4),
)
@thorough(700)
def test_official_protobuf_reads_and_writes_our_responses(model_name, version, id_, parameters, outputs, raw):
    encoded = messages.encode_response(model_name, version, id_, parameters, outputs, raw)

    expected = pb.ModelInferResponse(model_name=model_name, model_version=version, id=id_, raw_output_contents=raw)
    for key, (kind, value) in parameters.items():
        expected.parameters[key].SetInParent()
        if kind:
            setattr(expected.parameters[key], kind, value)
    for name, datatype, shape in outputs:
        expected.outputs.add(name=name, datatype=datatype, shape=shape)

    assert pb.ModelInferResponse.FromString(encoded) == expected
    written = expected.SerializeToString()
    # the order of a map's entries is nobody's promise
    assert written == encoded if len(parameters) < 2 else len(written) == len(encoded)


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16383, 16384, 2_097_151, 2_097_152])
def test_raw_contents_have_the_right_length_for_every_size_of_it(size):
    encoded = messages.encode_response("m", "", "", {}, [], [bytes(size), b"end"])
    assert list(pb.ModelInferResponse.FromString(encoded).raw_output_contents) == [bytes(size), b"end"]


def test_text_at_the_size_of_each_length():
    for size in (0, 1, 7, 8, 15, 16, 17, 127, 128, 129, 16384):
        name = "n" * size
        assert messages.decode(pb.ModelInferRequest(model_name=name).SerializeToString()).model_name == name
        assert pb.ModelInferResponse.FromString(messages.encode_response(name, "", "", {}, [], [])).model_name == name


def test_arguments_of_another_type_are_refused():
    with pytest.raises(TypeError):
        messages.decode(bytearray(b""))
    with pytest.raises(TypeError):
        messages.decode(None)
    with pytest.raises(IndexError):
        messages.Decoder().contents(0, "FP32")


def test_the_oracle_reads_little_endian_doubles():
    data = run(4, run(1, b"d"), run(2, tag(4, FIXED64) + struct.pack("<d", -0.0)))
    assert check(data)
    assert math.copysign(1, messages.decode(data).parameters["d"][1]) == -1
    assert parse(data) is not None
