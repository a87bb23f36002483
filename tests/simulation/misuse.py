"""What a model's code may ask of its batch, and may not: that is refused with a text, and the batch goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from inferd._native.execution.python_batch import Batch
from inferd._native.execution.view import View
from tests.simulation.beside import Lent

if TYPE_CHECKING:
    from random import Random

Deed = tuple[Callable[[], object], str]  # and what is said of it
OFTEN = 0.1  # of executions
MAX_RANK = 16


def misuse(batch: Batch, random: Random, y: np.ndarray, *, iterative: bool) -> str:
    """Do something wrong with a batch whose output `y` is of INT64; what is wrong about what is said of it."""
    deeds = _deeds(batch, random, y, iterative=iterative)
    deed, expected = random.choice(deeds)
    try:
        deed()
    except (ValueError, TypeError, BufferError) as error:
        said = str(error)
        return "" if expected in said else f"is told '{said}', and not '{expected}'"
    return f"is not told that {expected}"


def _deeds(batch: Batch, random: Random, y: np.ndarray, *, iterative: bool) -> list[Deed]:
    view = batch.input("x")
    assert view is not None
    count = batch.request_count
    wrong_index = random.choice((count, -1, count + 5))
    deep = y.reshape((1,) * (MAX_RANK + 1 - y.ndim) + y.shape)
    kind, name = random.choice(
        (("u8", "UINT64"), ("f4", "FP32"), ("?", "BOOL"), ("i2", "INT16"), ("c8", "another type"))
    )
    other = y.astype(kind)
    out = batch.set_output
    deeds: list[Deed] = [
        (lambda: batch.input("nothing"), "the model has no input 'nothing'"),
        (lambda: out("nothing", y), "the model has no output 'nothing'"),
        (lambda: batch.wants("x"), "the model has no output 'x'"),
        (lambda: batch.place("x"), "the model has no output 'x'"),
        (lambda: out("y", other), f"output 'y' must be INT64, got {name}"),
        (lambda: out("y", y.astype(">i8")), "output 'y' must be INT64, got another type"),
        (
            lambda: out("y", object()),
            "output 'y' must be an array with the buffer protocol or __dlpack__, got object",
        ),
        (lambda: out("y", deep), f"output 'y' has {MAX_RANK + 1} dimensions, at most {MAX_RANK} are served"),
        (lambda: out("y", Lent(deep)), f"output 'y' has {MAX_RANK + 1} dimensions, at most {MAX_RANK} are served"),
        (lambda: batch.set_bytes_output("y", [b""], (1,)), "output 'y' is not BYTES but INT64"),
        (lambda: batch.set_bytes_output("y", [1], (1,)), "output 'y' must have elements of bytes or str, got int"),
        (
            lambda: batch.reschedule(wrong_index),
            f"the batch has {count} requests, there is no request {wrong_index}",
        ),
        (view.strings, "a INT64 tensor has no strings"),
        (lambda: view.__dlpack__(max_version=(1, 0), dl_device=(2, 0)), "the tensor is in CPU memory"),
        (lambda: view.__dlpack__(max_version=(1, 0), copy=True), "the tensor is exchanged without a copy"),
        (Batch, "Batch cannot be created from Python"),
        (View, "View cannot be created from Python"),
    ]
    if name != "another type":
        deeds.append((lambda: out("y", Lent(other)), "output 'y' must be INT64, got a tensor of another type"))
    if y.shape[-1] > 1 and y.size:
        deeds.append((lambda: out("y", y[..., ::-1]), "not C-contiguous"))
        deeds.append((lambda: out("y", Lent(y[..., ::-1])), "output 'y' must be C-contiguous"))
    if not iterative:
        text = "only requests of a model with 'iterative_sequence' can be rescheduled"
        deeds.append((lambda: batch.reschedule(0), text))
    if memoryview(view).readonly:
        text = "the tensor's memory is shared and read-only, which a capsule before DLPack 1.0 cannot say"
        deeds.append((view.__dlpack__, text))
        deeds.append((lambda: view.__dlpack__(max_version=(0, 8)), text))
    return deeds


def look_in_other_ways(batch: Batch, x: np.ndarray, random: Random) -> str:
    """Look at the input as others do; what is wrong with what is seen, empty: nothing."""
    view = batch.input("x")
    assert view is not None
    if random.random() < 0.3:
        view.__dlpack__(max_version=(1, 0))  # for nobody
        if not memoryview(view).readonly:
            view.__dlpack__()
    if view.__dlpack_device__() != (1, 0):
        return f"x is on device {view.__dlpack_device__()}"
    seen: Any = np.from_dlpack(view) if random.random() < 0.5 else np.frombuffer(memoryview(view), np.int64)
    if not np.array_equal(seen.reshape(x.shape), x):
        return f"x is {seen.tolist()}, and was {x.tolist()}"
    return ""


def err_for_all(batch: Batch, random: Random, y: np.ndarray) -> str:
    """Answer what cannot be the answer of a batch; what its requests are told, empty: nothing was done."""
    what = random.choice(("fewer", "more", "none", "nothing"))
    if what == "nothing":
        return "did not produce output 'y'"
    rows = batch.rows
    wrong = {"fewer": y[:-1], "more": np.concatenate([y, y]), "none": y[0, 0]}[what]
    got = -1 if what == "none" else len(wrong)
    try:
        batch.set_output("y", np.ascontiguousarray(wrong) if what != "none" else np.array(wrong))
    except ValueError as error:
        expected = f"output 'y' must have the batch dimension {rows} first, got {got}"
        return expected if str(error) == expected else f"{expected}, and not {error}"
    return "a refusal"
