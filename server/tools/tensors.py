"""Tensors of the command line: arrays from files and words, and arrays as text."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from inferd.backends.installing import pip_install
from inferd.server.errors import Misused
from inferd_client.utils import triton_to_np_dtype

PICTURES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp"}
TEXT_SHOWN = 200


@contextmanager
def read_for(option: str) -> Iterator[None]:
    """Turn errors of reading within the block into mistakes of this option.

    Raises:
        Misused: something cannot be read, or has another form.
    """
    try:
        yield
    except (EOFError, OSError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise Misused(f"{option}: {error}") from None


@dataclass(frozen=True, slots=True)
class Wanted:
    """An input of a model.

    Attributes:
        shape: with the batch dimension; -1 for a free dimension.
        batches: whether the first dimension is the batch's.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    batches: bool


def shapes_of(given: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """The shapes of texts "NAME:1,2".

    Raises:
        Misused: a text has another form.
    """
    found = {}
    for each in given:
        name, colon, dims = each.rpartition(":")
        try:
            found[name] = tuple(int(size) for size in dims.split(",") if size)
        except ValueError:
            colon = ""
        if not colon or min(found[name], default=0) < 0:
            raise Misused(f"--shape: expected INPUT:SIZE,SIZE,..., got {each!r}")
    return found


def shape_of(wanted: Wanted, shapes: Mapping[str, tuple[int, ...]], rows: int) -> tuple[int, ...]:
    """The dimensions to send; given ones may lack the batch dimension, as in perf_analyzer.

    Raises:
        Misused: a free dimension is not given, or there are no rows.
    """
    if rows < 1:
        raise Misused(f"--batch-size: expected 1 or more, got {rows}")
    given = shapes.get(wanted.name)
    own = wanted.shape[1:] if wanted.batches else wanted.shape
    if given is not None:
        if wanted.batches and len(given) == len(wanted.shape):
            return given
        own = given
    if any(size < 0 for size in own):
        raise Misused(
            f"input '{wanted.name}' has the dimensions {list(own)}: say how large they are with --shape "
            f"{wanted.name}:{','.join('1' if size < 0 else str(size) for size in own)}"
        )
    return (rows, *own) if wanted.batches else tuple(own)


def made_up(
    wanted: Wanted, shape: tuple[int, ...], chance: np.random.Generator, zero: bool, letters: int, text: str = ""
) -> Any:
    """A tensor of random content, or of zeros; strings have `letters` letters, or are `text`."""
    count = int(np.prod(shape))
    if wanted.datatype == "BYTES":
        alphabet = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", "S1")
        words = [text.encode() if zero or text else b"".join(chance.choice(alphabet, letters)) for _ in range(count)]
        array = np.empty(count, np.object_)
        array[:] = words
        return array.reshape(shape)
    kind = np.dtype(triton_to_np_dtype(wanted.datatype))
    if zero:
        return np.zeros(shape, kind)
    if wanted.datatype == "BOOL":
        return chance.integers(0, 2, shape).astype(bool)
    if kind.kind in "iu":
        return chance.integers(0, min(np.iinfo(kind).max, 1000), shape).astype(kind)
    return chance.random(shape).astype(kind)


def read(wanted: Sequence[Wanted], given: Sequence[str]) -> dict[str, Any]:
    """The arrays of inputs that `--data` gives; see docs/commands.md.

    Raises:
        Misused: a value has another form.
    """
    known = {each.name: each for each in wanted}
    found: dict[str, Any] = {}
    for each in given:
        with read_for(f"--data {each}"):
            found.update(_given(known, each))
    for name in found:
        if name not in known:
            raise Misused(f"--data: the model has no input '{name}', but {', '.join(known)}")
    return {name: _fitting(known[name], _of_datatype(known[name], array)) for name, array in found.items()}


def _given(known: Mapping[str, Wanted], given: str) -> dict[str, Any]:
    """The arrays of one value of `--data`."""
    name, equals, value = given.partition("=")
    if equals and name in known:
        return {name: _one(known[name], value)}
    path = Path(given)
    if path.suffix == ".npz" and path.is_file():
        with np.load(path) as archive:
            return {key: archive[key] for key in archive.files}
    if path.suffix == ".json" and path.is_file():
        return _document(known, json.loads(path.read_text()), f"--data {given}")
    datatypes = {each.datatype for each in known.values()}
    if equals and name.isidentifier() and not path.exists() and "BYTES" not in datatypes:
        raise Misused(f"--data {given}: the model has no input '{name}', but {', '.join(known)}")
    if len(known) == 1:
        (only,) = known.values()
        return {only.name: _one(only, given)}
    raise Misused(f"--data {given!r}: expected INPUT=VALUE, a .npz or a .json; inputs are {', '.join(known)}")


def _document(known: Mapping[str, Wanted], said: Any, where: str) -> dict[str, Any]:
    """The arrays in JSON: a request of the v2 protocol, or an object of inputs."""
    if isinstance(said, dict) and isinstance(said.get("inputs"), list):
        found = {}
        for tensor in said["inputs"]:
            if not isinstance(tensor, dict) or not isinstance(tensor.get("data"), list):
                raise Misused(f"{where}: each of 'inputs' needs a name, and a list as its data")
            if tensor.get("name") not in known:
                raise Misused(f"{where}: the model has no input {tensor.get('name')!r}, but {', '.join(known)}")
            array = array_of(known[tensor["name"]].datatype, tensor["data"], tensor["name"])
            found[tensor["name"]] = array.reshape(tensor["shape"]) if "shape" in tensor else array
        return found
    if not isinstance(said, dict):
        raise Misused(f"{where}: expected an object with the inputs' names")
    for name in said:
        if name not in known:
            raise Misused(f"{where}: the model has no input {name!r}, but {', '.join(known)}")
    return {name: array_of(known[name].datatype, content, name) for name, content in said.items()}


def array_of(datatype: str, content: Any, name: str) -> Any:
    """Nested lists as an array.

    Raises:
        Misused: the values are not of this datatype.
    """
    try:
        if datatype == "BYTES":
            return np.vectorize(lambda each: str(each).encode(), otypes=[np.object_])(np.array(content, np.object_))
        return _converted(content, np.dtype(triton_to_np_dtype(datatype)))
    except (OverflowError, TypeError, ValueError) as error:
        raise Misused(f"the data of '{name}' are no {datatype}: {error}") from None


def _one(wanted: Wanted, value: str) -> Any:
    path = Path(value.removeprefix("@"))
    is_file = os.path.isfile(path)  # noqa: PTH113 - of Path, it raises an error for a text that is too long for a name
    if value.startswith("@") and not is_file:
        raise Misused(f"--data: there is no file {path}")
    if is_file and path.suffix == ".npy":
        return np.load(path)
    if is_file and path.suffix == ".json":
        return array_of(wanted.datatype, json.loads(path.read_text()), wanted.name)
    if is_file and wanted.datatype == "BYTES":
        content = path.read_bytes()
        return np.array([content.rstrip(b"\n") if path.suffix == ".txt" else content], np.object_)
    if is_file and path.suffix.lower() in PICTURES:
        return _picture(wanted, path)
    if is_file:
        return np.frombuffer(path.read_bytes(), triton_to_np_dtype(wanted.datatype))
    if wanted.datatype == "BYTES":
        return np.array([value.encode()], np.object_)
    try:
        return array_of(wanted.datatype, json.loads(value if value.startswith("[") else f"[{value}]"), wanted.name)
    except json.JSONDecodeError:
        raise Misused(f"--data {wanted.name}={value}: there is no such file, and these are no numbers") from None


def _picture(wanted: Wanted, path: Path) -> Any:
    """A picture in the input's size and order of dimensions; floats from 0 to 1."""
    try:
        from PIL import Image
    except ImportError:
        raise Misused(f"{path}: reading pictures needs Pillow: {pip_install('pillow')}") from None
    dims = [size for size in (wanted.shape[1:] if wanted.batches else wanted.shape) if size != 1]
    colours = 3 in dims
    sides = [size for size in dims if size != 3] if colours else dims
    if len(sides) != 2:
        raise Misused(
            f"--data {path}: input '{wanted.name}' {list(wanted.shape)} has no height and width for a picture"
        )
    picture = Image.open(path).convert("RGB" if colours else "L")
    if len(sides) == 2 and min(sides) > 0:
        picture = picture.resize((sides[1], sides[0]))
    array = np.asarray(picture)
    if colours and dims and dims[0] == 3:
        array = array.transpose(2, 0, 1)
    kind = np.dtype(triton_to_np_dtype(wanted.datatype))
    return (array / 255.0 if kind.kind == "f" else array).astype(kind)


def _of_datatype(wanted: Wanted, array: Any) -> Any:
    """The array with elements of the model's datatype."""
    strings = wanted.datatype == "BYTES"
    if array.dtype.kind not in ("OSU" if strings else "biufV"):
        raise Misused(f"the data of '{wanted.name}' are {array.dtype}, the model takes {wanted.datatype}")
    if strings:
        return array_of("BYTES", array, wanted.name) if array.dtype.kind == "U" else array.astype(np.object_)
    kind = np.dtype(triton_to_np_dtype(wanted.datatype))
    if array.dtype.kind == "V" and array.dtype.itemsize == kind.itemsize:
        return array.view(kind)  # bfloat16, which .npy files do not know
    try:
        return _converted(array, kind)
    except (OverflowError, ValueError) as error:
        raise Misused(f"the data of '{wanted.name}' are no {wanted.datatype}: {error}") from None


def _converted(content: Any, kind: np.dtype[Any]) -> Any:
    """The array, or the lists, with elements of this type.

    Raises:
        ValueError, OverflowError: whole numbers of this type cannot be the given numbers.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        found = np.array(content, kind)
    given = np.asarray(content)  # of large whole numbers in lists it has rounded ones
    if kind.kind in "biu" and given.dtype.kind in "biuf" and not np.array_equal(found, given):
        raise ValueError(f"{given[found != given].flat[0]} would become {found[found != given].flat[0]}")
    return found


def _fitting(wanted: Wanted, array: Any) -> Any:
    """The array in the shape that the model takes, if there is only one way to reshape it."""
    expected = wanted.shape
    if _fits(expected, array.shape):
        return array
    own = expected[1:] if wanted.batches else expected
    if wanted.batches and _fits(own, array.shape):
        return array[None]
    free = own.count(-1)
    size = int(np.prod([each for each in own if each > 0]))
    if free <= 1 and size and array.size % size == 0 and (free == 1 or array.size == size or wanted.batches):
        return array.reshape((*((-1,) if wanted.batches and not free else (1,) if wanted.batches else ()), *own))
    raise Misused(f"the data of '{wanted.name}' have the shape {list(array.shape)}, the model takes {list(expected)}")


def _fits(expected: Sequence[int], shape: Sequence[int]) -> bool:
    return len(expected) == len(shape) and all(e in (-1, s) for e, s in zip(expected, shape, strict=True))


def shown(array: Any) -> str:
    """The array as text for people."""
    if array.dtype == np.object_:
        texts = [each.decode("utf-8", "replace") for each in array.ravel()[:100]]
        texts = [text if len(text) <= TEXT_SHOWN else f"{text[:TEXT_SHOWN]}... ({len(text)})" for text in texts]
        return str(np.array(texts, object).reshape(array.shape) if len(texts) == array.size else texts)
    return str(np.array2string(array, threshold=100, precision=5, suppress_small=True))


def as_lists(array: Any) -> Any:
    """The array as nested lists for JSON."""
    if array.dtype == np.object_:
        return np.vectorize(lambda each: each.decode("utf-8", "replace"), otypes=[object])(array).tolist()
    return array.astype(np.float32).tolist() if array.dtype.kind == "V" else array.tolist()
