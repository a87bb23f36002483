"""Guards what a batch makes of tensors: ragged inputs, what the model is told about them, padding, reshaping."""

import random

import numpy as np
import pytest

from inferd.server.errors import Status
from tests.engine.serving import infer_all, request, serving

DELAY = "dynamic_batching { max_queue_delay_microseconds: 1000000 }"


pytestmark = pytest.mark.usefixtures("native_counters")


def floats(*rows):
    return np.array(rows, dtype=np.float32)


class Seen:
    """Remembers the inputs of each batch, and answers y as the function says."""

    def __init__(self, answer, *names):
        self.answer, self.names, self.batches = answer, names, []

    def __call__(self, batch):
        inputs = {name: batch.input(name).numpy().copy() for name in self.names}
        self.batches.append(inputs)
        batch.set_output("y", self.answer(inputs))


# ---- ragged ---------------------------------------------------------------------------------------------------------

RAGGED = (
    f'backend: "puppet" max_batch_size: 3 {DELAY}'
    + """
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }
output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
instance_group { kind: KIND_CPU count: 1 }
batch_output { target_name: "y" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "x" }
"""
)
KINDS = {
    "BATCH_ELEMENT_COUNT": [2, 1, 3],
    "BATCH_ACCUMULATED_ELEMENT_COUNT": [2, 3, 6],
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": [0, 2, 3, 6],
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": [0, 0, 0],
    "BATCH_ITEM_SHAPE": [[2], [1], [3]],
    "BATCH_ITEM_SHAPE_FLATTEN": [2, 1, 3],
}


@pytest.mark.parametrize("datatype", ["TYPE_INT32", "TYPE_FP32"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_ragged_input_is_concatenated_and_described(tmp_path, kind, datatype):
    config = RAGGED + f'batch_input {{ kind: {kind} target_name: "about" data_type: {datatype} source_input: "x" }}'
    model = Seen(lambda inputs: inputs["x"] * 10, "x", "about")
    async with serving(tmp_path, model, m=config) as engine:
        answers = await infer_all(engine, *(request(x=row) for row in (floats([1, 2]), floats([3]), floats([4, 5, 6]))))
    [seen] = model.batches
    assert seen["x"].tolist() == [1, 2, 3, 4, 5, 6]
    assert seen["about"].tolist() == KINDS[kind]
    assert seen["about"].dtype == (np.int32 if datatype == "TYPE_INT32" else np.float32)
    assert [answer.array().tolist() for answer in answers] == [[[10, 20]], [[30]], [[40, 50, 60]]]


async def test_item_shapes_have_an_entry_for_each_row(tmp_path):
    config = RAGGED.replace("dims: [ -1 ] allow", "dims: [ -1, 2 ] allow").replace(
        "max_batch_size: 3", "max_batch_size: 4"
    )
    config += 'batch_input { kind: BATCH_ITEM_SHAPE target_name: "about" data_type: TYPE_INT32 source_input: "x" }'
    model = Seen(lambda inputs: inputs["x"], "x", "about")
    async with serving(tmp_path, model, m=config.replace("dims: [ -1 ] }", "dims: [ -1, 2 ] }")) as engine:
        first, second = np.zeros((3, 1, 2), np.float32), np.ones((1, 3, 2), np.float32)
        answers = await infer_all(engine, request(x=first), request(x=second))
    [seen] = model.batches
    assert seen["about"].tolist() == [[1, 2], [1, 2], [1, 2], [3, 2]]
    assert [answer.array().shape for answer in answers] == [(3, 1, 2), (1, 3, 2)]


@pytest.mark.parametrize("size", [0, 1, 3])
async def test_a_ragged_output_of_another_size_fails_the_batch(tmp_path, size):
    model = Seen(lambda inputs: np.resize(inputs["x"], size), "x")
    async with serving(tmp_path, model, m=RAGGED.replace("max_batch_size: 3", "max_batch_size: 1")) as engine:
        [answer] = await infer_all(engine, request(x=floats([1, 2])))
    assert answer.status == Status.INTERNAL
    assert "output 'y' must have as many elements as input 'x'" in answer.text


async def test_strings_of_ragged_requests_are_one_tensor_and_come_back_apart(tmp_path):
    def reverse(batch):
        view = batch.input("x")
        assert view.shape == (3,)
        batch.set_bytes_output("y", [element[::-1] for element in view.strings()], view.shape)

    config = RAGGED.replace("TYPE_FP32", "TYPE_STRING").replace("max_batch_size: 3", "max_batch_size: 2")
    async with serving(tmp_path, reverse, m=config) as engine:
        answers = await infer_all(
            engine,
            request(x=np.array([[b"ab", b"cde"]], dtype=object)),
            request(x=np.array([[b"fg"]], dtype=object)),
        )
    assert [answer.array().tolist() for answer in answers] == [[[b"ba", b"edc"]], [[b"gf"]]]


# ---- padding --------------------------------------------------------------------------------------------------------

PADDED = (
    f'backend: "puppet" max_batch_size: 8 {DELAY}'
    + """
input { name: "x" data_type: TYPE_FP32 dims: [ -1, 2 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ -1, 2 ] }
instance_group { kind: KIND_CPU count: 1 }
parameters { key: "pad" value { string_value: "x=-1" } }
parameters { key: "unpad" value { string_value: "y=x" } }
"""
)
BUCKETS = 'parameters { key: "pad_buckets" value { string_value: "4,8" } }'


def ramp(length, rows=1, start=0):
    return (start + np.arange(rows * length * 2)).reshape(rows, length, 2).astype(np.float32)


@pytest.mark.parametrize(("buckets", "padded"), [("", 4), (BUCKETS, 4)])
async def test_a_padded_input_is_filled_up_and_the_output_cut_back(tmp_path, buckets, padded):
    model = Seen(lambda inputs: inputs["x"] * 2, "x")
    arrays = [ramp(3, 2), ramp(4, 1, 100), ramp(3, 3, 200)]
    config = PADDED.replace("max_batch_size: 8", "max_batch_size: 6")
    async with serving(tmp_path, model, m=config + buckets) as engine:
        answers = await infer_all(engine, *(request(x=array) for array in arrays))
    [seen] = model.batches
    assert seen["x"].shape == (6, padded, 2)
    assert (seen["x"][:2, 3:] == -1).all()
    assert (seen["x"][3:, 3:] == -1).all()
    for array, answer in zip(arrays, answers, strict=True):
        np.testing.assert_array_equal(answer.array(), array * 2)


async def test_lengths_of_different_buckets_do_not_share_a_batch(tmp_path):
    model = Seen(lambda inputs: inputs["x"], "x")
    async with serving(tmp_path, model, m=PADDED + BUCKETS) as engine:
        await infer_all(engine, *(request(x=ramp(length)) for length in (1, 4, 5, 8, 9)))
    assert [seen["x"].shape[:2] for seen in model.batches] == [(2, 4), (2, 8), (1, 9)]


@pytest.mark.parametrize("datatype", ["BOOL", "UINT8", "INT64", "FP16", "FP64"])
async def test_the_padding_has_the_datatype_of_the_input(tmp_path, datatype):
    kind = {"BOOL": "?", "UINT8": "u1", "INT64": "i8", "FP16": "f2", "FP64": "f8"}[datatype]
    model = Seen(lambda inputs: inputs["x"], "x")
    config = PADDED.replace("TYPE_FP32", f"TYPE_{datatype}").replace("x=-1", "x=1").replace("size: 8", "size: 1")
    async with serving(tmp_path, model, m=config + BUCKETS) as engine:
        [answer] = await infer_all(engine, request(x=np.zeros((1, 2, 2), kind)))
    [seen] = model.batches
    assert seen["x"].tolist() == [[[0, 0], [0, 0], [1, 1], [1, 1]]]
    assert answer.array().shape == (1, 2, 2)


async def test_random_lengths_get_their_own_rows_back(tmp_path):
    rng = random.Random(3)
    model = Seen(lambda inputs: inputs["x"] + 1, "x")
    arrays = [ramp(rng.randrange(0, 20), rng.randrange(1, 4), 1000 * i) for i in range(200)]
    async with serving(tmp_path, model, m=PADDED.replace("1000000", "100") + BUCKETS) as engine:
        answers = await infer_all(engine, *(request(x=array) for array in arrays))
    for array, answer in zip(arrays, answers, strict=True):
        np.testing.assert_array_equal(answer.array(), array + 1)
    assert len(model.batches) < 200


# ---- reshaping ------------------------------------------------------------------------------------------------------

RESHAPED = """
backend: "puppet" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ 2, -1 ] reshape { shape: [ -1, 1, 2 ] } }
output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } }
instance_group { kind: KIND_CPU count: 1 }
dynamic_batching { }
"""


async def test_the_model_sees_the_reshaped_input_and_clients_the_reshaped_output(tmp_path):
    model = Seen(lambda inputs: inputs["x"].sum(axis=(1, 2, 3)), "x")
    async with serving(tmp_path, model, m=RESHAPED) as engine:
        [answer] = await infer_all(engine, request(x=ramp(2, 3).reshape(3, 2, 2)))
        wrong, *_ = await infer_all(engine, request(x=ramp(2, 3).reshape(3, 2, 2, 1)))
    [seen] = model.batches
    assert seen["x"].shape == (3, 2, 1, 2)
    assert answer.array().tolist() == [[6], [22], [38]]
    assert wrong.status == Status.INVALID_ARGUMENT
    assert "Expected [-1,2,-1], got [3,2,2,1]" in wrong.text


async def test_an_output_must_have_the_rank_of_the_model(tmp_path):
    model = Seen(lambda inputs: inputs["x"][:, 0, 0, :1], "x")
    async with serving(tmp_path, model, m=RESHAPED) as engine:
        [answer] = await infer_all(engine, request(x=ramp(1, 1).reshape(1, 2, 1)))
    assert "output 'y' must have 1 dimensions, got 2" in answer.text
