"""Optimisation profiles as text: `x=1x3x224x224,8x3x224x224,64x3x224x224 s=1x1,2x2,8x8`.

For each input that varies, a profile has its least, best and greatest shape; for each shape tensor its least, best and
greatest values. If all three are the same, they are written once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from inferd.backends.api import BackendError
from inferd.backends.tensorrt.plan import Range

NUMBERS = re.compile(r"\d+(x\d+)*")


def parse_profile(text: str) -> dict[str, Range]:
    """The ranges of a profile, by input.

    Raises:
        BackendError: the text has another form, or the three are not in order.
    """
    found: dict[str, Range] = {}
    for each in text.split():
        name, equals, ranges = each.rpartition("=")
        parts = ranges.split(",")
        if (
            not equals
            or not name
            or name in found
            or len(parts) not in (1, 3)
            or not all(map(NUMBERS.fullmatch, parts))
        ):
            raise BackendError(
                f"profile '{text}': expected INPUT=LEAST,BEST,GREATEST for each input, such as x=1x16,8x16,64x16, got "
                f"'{each}'"
            )
        numbers = [tuple(int(number) for number in part.split("x")) for part in parts] * (3 if len(parts) == 1 else 1)
        if len({len(each) for each in numbers}) > 1 or not all(
            low <= best <= high for low, best, high in zip(*numbers, strict=True)
        ):
            raise BackendError(f"profile '{text}': the shapes of '{name}' must have one rank and ascend")
        found[name] = (numbers[0], numbers[1], numbers[2])
    return found


def usual_profile(inputs: Mapping[str, tuple[int, ...]], max_batch_size: int) -> dict[str, Range]:
    """A profile for batches of 1 to `max_batch_size` rows, best for the largest.

    Args:
        inputs: the shapes of the inputs that vary, and of shape tensors, by name.

    Raises:
        BackendError: more than the batch varies; the text shows the profile that is needed.
    """
    if max_batch_size < 1 or any(dims[:1] != (-1,) or -1 in dims[1:] for dims in inputs.values()):
        shapes = ", ".join(f"{name} {list(dims)}" for name, dims in inputs.items())
        raise BackendError(
            f"the shapes of the model's inputs vary, {shapes}: a profile must have their ranges, such as "
            f'"{" ".join(_example(name, dims) for name, dims in inputs.items())}"; a largest batch is enough if '
            "nothing but the first dimension varies"
        )
    return {
        name: ((1, *dims[1:]), (max_batch_size, *dims[1:]), (max_batch_size, *dims[1:]))
        for name, dims in inputs.items()
    }


def _example(name: str, dims: Sequence[int]) -> str:
    shapes = ("x".join(str(size if dim == -1 else dim) for dim in dims) for size in (1, 8, 64))
    return f"{name}={','.join(shapes)}"


def add_profiles(builder: Any, config: Any, network: Any, texts: Sequence[str], max_batch_size: int) -> None:
    """Give a builder's configuration the profiles that its network needs.

    Raises:
        BackendError: the profiles are missing, or do not fit the network.
    """
    varying = {tensor.name: tensor for tensor in _inputs(network) if tensor.is_shape_tensor or -1 in tensor.shape}
    if not varying:
        if texts:
            raise BackendError("no input of the model varies: leave the profiles out")
        return
    dims = {name: tuple(tensor.shape) for name, tensor in varying.items()}
    for profile in map(parse_profile, texts) if texts else (usual_profile(dims, max_batch_size),):
        if profile.keys() != varying.keys():
            raise BackendError(
                f"a profile must have the inputs that vary, {', '.join(varying)}; it has {', '.join(profile) or 'none'}"
            )
        made = builder.create_optimization_profile()
        for name, tensor in varying.items():
            _set(made, tensor, profile[name])
        if config.add_optimization_profile(made) < 0:
            raise BackendError(f"TensorRT does not take the profile {profile}")


def _inputs(network: Any) -> Iterator[Any]:
    return (network.get_input(index) for index in range(network.num_inputs))


def _set(profile: Any, tensor: Any, numbers: Range) -> None:
    dims = tuple(tensor.shape)
    if not tensor.is_shape_tensor and (
        len(numbers[0]) != len(dims)
        or any(dim not in (-1, given) for each in numbers for dim, given in zip(dims, each, strict=True))
    ):
        raise BackendError(f"input '{tensor.name}' has the shape {list(dims)}, which {list(numbers[0])} does not fit")
    try:
        (profile.set_shape_input if tensor.is_shape_tensor else profile.set_shape)(tensor.name, *numbers)
    except (ValueError, RuntimeError) as error:
        raise BackendError(f"TensorRT does not take {numbers} for input '{tensor.name}': {error}") from None
