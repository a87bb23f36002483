"""Tensors: names, types, and memory shared with numpy and torch, never copied where it need not be."""

from __future__ import annotations

import ctypes
import gc
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.backends.python.worker import device, strings, tensor
from inferd.backends.python.worker import utils as pb
from inferd.backends.python.worker.dlpack import Foreign, array_at, make_capsule


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_what_a_tensor_says() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    made = pb.Tensor("x", array)
    assert (made.name(), made.shape(), made.triton_dtype(), made.is_cpu()) == ("x", [2, 3], 7, True)
    assert made.as_numpy() is array
    assert made.__dlpack_device__() == (1, 0)


def test_an_array_that_is_not_contiguous_is_copied() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3).T
    assert pb.Tensor("x", array).as_numpy().flags.c_contiguous
    assert np.array_equal(pb.Tensor("x", array).as_numpy(), array)


def test_wrong_arguments_are_refused_with_what_was_expected() -> None:
    with pytest.raises(pb.TritonModelException, match=r"^Tensor name cannot be an empty string\.$"):
        pb.Tensor("", np.zeros(1))
    with pytest.raises(pb.TritonModelException, match=r"^NumPy dtype is not supported\. .*use np.object_ for strings"):
        pb.Tensor("x", np.array(["a"]))
    with pytest.raises(pb.TritonModelException, match=r"^NumPy dtype is not supported\."):
        pb.Tensor("x", np.zeros(1, np.complex64))
    with pytest.raises(TypeError, match="expects a numpy array, got NoneType"):
        pb.Tensor("", None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"expects Logger\.INFO, WARNING, ERROR or VERBOSE as its level, got 1"):
        pb.Logger.log("a", 1)
    with pytest.raises(TypeError, match="expects an int or str as its correlation_id, got None"):
        pb.InferenceRequest(model_name="m", correlation_id=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expects a numpy array, got list"):
        pb.Tensor("x", [1, 2])  # type: ignore[arg-type]
    with pytest.raises(pb.TritonModelException, match="DLPack does not have support for string tensors"):
        pb.Tensor("x", np.array([b"a"], object)).to_dlpack()


def test_a_received_tensor_is_read_in_place_and_may_be_written_to() -> None:
    buffer = bytearray(np.arange(4, dtype=np.float32).tobytes())
    made = tensor.received("x", 11, (2, 2), buffer, 0, 16)
    made.as_numpy()[0, 0] = 9
    assert np.frombuffer(buffer, np.float32)[0] == 9


def test_bytes_elements_of_every_kind() -> None:
    packed = pb.serialize_byte_tensor(np.array([b"a\0", "ü", 5, None], object))
    assert pb.deserialize_bytes_tensor(packed).tolist() == [b"a\0", "ü".encode(), b"5", b"None"]
    assert pb.serialize_byte_tensor(np.array([b"ab", b"c"])) == b"\2\0\0\0ab\1\0\0\0c"
    assert pb.serialize_byte_tensor(np.zeros(0, object)) == ()
    assert pb.serialize_byte_tensor(np.zeros(1)) is None
    for cut in (b"\1\0\0", b"\5\0\0\0abc"):
        with pytest.raises(pb.TritonModelException, match="Invalid bytes tensor data"):
            pb.deserialize_bytes_tensor(cut)


ELEMENTS = st.lists(st.binary(max_size=40), max_size=20)


@given(ELEMENTS)
def test_both_codecs_of_strings_agree(elements: list[bytes]) -> None:
    packed = strings.pack_slowly(elements)
    assert strings.pack(list(elements)) == packed
    assert strings.unpack(packed) == strings.unpack(bytearray(packed)) == strings.unpack_slowly(packed) == elements


@given(ELEMENTS.filter(len), st.integers(min_value=1, max_value=4))
def test_both_codecs_of_strings_refuse_what_is_cut_off(elements: list[bytes], cut: int) -> None:
    packed = strings.pack_slowly(elements)[:-cut]
    for unpack in (strings.unpack, strings.unpack_slowly):
        try:
            assert len(unpack(packed)) < len(elements)  # cut between two elements
        except pb.TritonModelException as error:
            assert "Invalid bytes tensor data" in str(error)


NUMBERS = [np.bool_, np.uint8, np.uint16, np.uint32, np.uint64, np.int8, np.int16, np.int32, np.int64, np.float16]
NUMBERS += [np.float32, np.float64]


def test_conversions_of_types() -> None:
    for number, numpy_type in enumerate(NUMBERS, 1):
        assert pb.triton_to_numpy_type(number) is numpy_type
        assert pb.numpy_to_triton_type(numpy_type) == number
    assert pb.numpy_to_triton_type(np.object_) == pb.numpy_to_triton_type(np.bytes_) == 13
    assert pb.triton_string_to_numpy("TYPE_FP32") is np.float32
    assert pb.triton_string_to_numpy("TYPE_STRING") is np.object_
    assert pb.triton_string_to_numpy("TYPE_BOOL") is bool
    assert pb.TRITON_STRING_TO_NUMPY["TYPE_INT64"] is np.int64
    assert pb.triton_to_numpy_type(99) is None
    assert pb.numpy_to_triton_type(np.complex64) is None
    with pytest.raises(KeyError):
        pb.triton_string_to_numpy("TYPE_COMPLEX")


def test_bfloat16_goes_both_ways_through_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.array([1.5, -2], ml_dtypes.bfloat16)
    made = pb.Tensor("x", array)
    assert made.triton_dtype() == 14
    assert bytes(tensor.wire_bytes(made)) == array.tobytes()
    received = tensor.received("x", 14, (2,), bytearray(array.tobytes()), 0, 4)
    assert received.as_numpy().tolist() == [1.5, -2]
    assert pb.triton_string_to_numpy("TYPE_BF16") is ml_dtypes.bfloat16


# ---------------------------------------------------------------------------------------------------------------------
# DLPack


@pytest.mark.parametrize("numpy_type", NUMBERS)
def test_numpy_reads_a_tensor_in_place(numpy_type: type) -> None:
    array = np.ones((2, 3), numpy_type)
    shared = np.from_dlpack(pb.Tensor("x", array))
    assert (address(shared), shared.dtype, shared.shape) == (address(array), array.dtype, (2, 3))


def test_a_tensor_reads_numpy_in_place() -> None:
    array = np.arange(6, dtype=np.int64).reshape(2, 3)
    made = pb.Tensor.from_dlpack("x", array)
    assert (made.triton_dtype(), made.shape()) == (9, [2, 3])
    assert address(made.as_numpy()) == address(array)
    with pytest.raises(pb.TritonModelException, match="DLPack tensor is not contiguous"):
        pb.Tensor.from_dlpack("x", array.T)


def test_the_memory_goes_back_when_nothing_refers_to_it() -> None:
    class Array(np.ndarray):
        pass

    array = np.zeros(8, np.float32).view(Array)
    gone = weakref.ref(array)
    made = pb.Tensor.from_dlpack("x", pb.Tensor("x", array).to_dlpack())
    view = made.as_numpy()[2:]
    del array, made
    gc.collect()
    assert gone() is not None
    del view
    gc.collect()
    assert gone() is None


def test_an_unused_capsule_gives_its_memory_back() -> None:
    array = np.zeros(8, np.float32)
    gone = weakref.ref(array)
    capsule = pb.Tensor("x", array).to_dlpack()
    del array
    assert gone() is not None
    del capsule
    assert gone() is None


def test_a_capsule_is_used_once() -> None:
    capsule = pb.Tensor("x", np.zeros(2)).to_dlpack()
    pb.Tensor.from_dlpack("y", capsule)
    with pytest.raises(pb.TritonModelException, match="a DLPack capsule is expected"):
        pb.Tensor.from_dlpack("y", capsule)


def test_an_array_that_must_not_be_written_to_is_copied() -> None:
    array = np.frombuffer(b"\0" * 8, np.int32)
    shared = np.from_dlpack(pb.Tensor("x", array))
    assert address(shared) != address(array)
    assert shared.tolist() == [0, 0]


def test_torch_shares_memory_both_ways() -> None:
    torch = pytest.importorskip("torch")
    array = np.ones((2, 3), np.float32)
    made = pb.Tensor("x", array)
    for shared in (torch.from_dlpack(made), torch.utils.dlpack.from_dlpack(made.to_dlpack())):
        shared[0, 0] += 1
    assert array[0, 0] == 3
    values = torch.arange(4)
    for made in (pb.Tensor.from_dlpack("y", values), pb.Tensor.from_dlpack("y", torch.utils.dlpack.to_dlpack(values))):
        assert address(made.as_numpy()) == values.data_ptr()
    half = torch.ones(3, dtype=torch.bfloat16)
    made = pb.Tensor.from_dlpack("z", half)
    assert made.triton_dtype() == 14
    again = torch.from_dlpack(made)
    assert (again.dtype, again.data_ptr()) == (torch.bfloat16, half.data_ptr())


def test_what_cannot_be_a_tensor() -> None:
    with pytest.raises(pb.TritonModelException, match="Provided tensor is not supported"):
        pb.Tensor.from_dlpack("x", [1])
    with pytest.raises(pb.TritonModelException, match="no datatype of the protocol"):
        pb.Tensor.from_dlpack("x", np.zeros(1, np.complex64))

    class OnAnotherDevice:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (10, 0)

        def __dlpack__(self, stream: object = None) -> object:
            raise AssertionError("it is not asked for")

    with pytest.raises(pb.TritonModelException, match="DLDevice type 10 is not support by Python backend"):
        pb.Tensor.from_dlpack("x", OnAnotherDevice())


class FakeDriver:
    """The driver of a GPU whose memory is the CPU's."""

    def __init__(self) -> None:
        self.pushed = 0

    def cuCtxPushCurrent_v2(self, context: object) -> int:  # noqa: N802
        self.pushed += 1
        return 0

    def cuCtxPopCurrent_v2(self, context: object) -> int:  # noqa: N802
        self.pushed -= 1
        return 0

    def cuMemcpyDtoH_v2(self, target: ctypes.c_void_p, source: ctypes.c_uint64, size: int) -> int:  # noqa: N802
        ctypes.memmove(target, source.value, size)
        return 0


def test_a_tensor_of_a_gpu_is_passed_on_in_place_and_copied_for_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(device, "_driver", driver)
    monkeypatch.setattr(device, "_contexts", {1: ctypes.c_void_p()})
    memory = np.arange(6, dtype=np.float32).reshape(2, 3)
    made = pb.Tensor.from_dlpack("x", make_capsule(memory, 11, (2, 1)))
    assert (made.is_cpu(), made.__dlpack_device__()) == (False, (2, 1))
    passed_on = Foreign(made.to_dlpack())
    assert (passed_on.address, passed_on.device, passed_on.shape) == (address(memory), (2, 1), (2, 3))
    copied = made.as_numpy()
    assert np.array_equal(copied, memory)
    assert address(copied) != address(memory)
    assert driver.pushed == 0


def test_an_owner_is_kept_by_memory_at_an_address() -> None:
    class Owner:
        pass

    owner, memory = Owner(), np.arange(4, dtype=np.uint8)
    gone = weakref.ref(owner)
    part = array_at(address(memory), 4, owner)[1:]
    del owner
    assert gone() is not None
    assert part.tolist() == [1, 2, 3]
    del part
    assert gone() is None
