"""Parameters of models for the server itself; Triton's config.pbtxt has no fields for them.

They stand in `parameters { key value { string_value } }`, among those of the backend, which does not get them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from inferd.backends.api import SequenceSpec
from inferd.server.engine.config.findings import Finding
from inferd_client.pb import model_config_pb2 as pb


def flag(text: str) -> bool:
    """true, false, 1 or 0 in any case.

    Raises:
        ValueError: it is something else.
    """
    try:
        return {"true": True, "1": True, "false": False, "0": False}[text.strip().lower()]
    except KeyError:
        raise ValueError("expected true or false") from None


def pairs(text: str) -> dict[str, str]:
    """ "NAME=VALUE, NAME=VALUE".

    Raises:
        ValueError: it has another form.
    """
    found = {}
    for each in text.split(","):
        name, equals, value = (part.strip() for part in each.partition("="))
        if not (name and equals and value) or name in found:
            raise ValueError("expected NAME=VALUE, ..., each name once")
        found[name] = value
    return found


def numbers_by_name(text: str) -> dict[str, float]:
    """`pairs` whose values are numbers.

    Raises:
        ValueError: it has another form.
    """
    try:
        return {name: float(value) for name, value in pairs(text).items()}
    except ValueError:
        raise ValueError("expected NAME=NUMBER, ..., each name once") from None


def labels(text: str) -> dict[str, int]:
    """`pairs` of a label, which begins with a letter, and a version.

    Raises:
        ValueError: it has another form.
    """
    try:
        found = {name: int(value) for name, value in pairs(text).items()}
    except ValueError:
        found = {}
    if not found or min(found.values()) < 1 or not all(map(_LABEL.fullmatch, found)):
        raise ValueError("expected LABEL=VERSION, ..., each label once, of letters, digits, '_', '.' and '-'")
    return found


def lengths(text: str) -> tuple[int, ...]:
    """Ascending whole numbers below 2^31, separated by commas.

    Raises:
        ValueError: it has another form.
    """
    try:
        found = tuple(int(each) for each in text.split(","))
    except ValueError:
        found = ()
    if not found or found[0] < 1 or found[-1] >= 1 << 31 or list(found) != sorted(set(found)):
        raise ValueError("expected ascending whole numbers such as 32,64,128")
    return found


def count(text: str) -> int:
    """A whole number from 0 to 2^31 - 1.

    Raises:
        ValueError: it is something else.
    """
    if not text.strip().isdecimal() or int(text) >= 1 << 31:
        raise ValueError("expected a whole number from 0 to 2147483647")
    return int(text)


def action(text: str) -> str:
    """REJECT or DELAY.

    Raises:
        ValueError: it is something else.
    """
    if text not in {"REJECT", "DELAY"}:
        raise ValueError("expected REJECT or DELAY")
    return text


_LABEL = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")

VERSION_LABELS = "version_labels"
"""The parameter with names of versions. It concerns the model as a whole."""

QUEUE_PREFIX = "queue_policy."
"""The prefix of parameters that replace default_queue_policy in models without dynamic_batching."""


ALL = (0,)
"""Every batch size."""


def batch_sizes(text: str) -> tuple[int, ...]:
    """`lengths`, or ALL for "all".

    Raises:
        ValueError: it has another form.
    """
    if text.strip() == "all":
        return ALL
    try:
        return lengths(text)
    except ValueError as error:
        raise ValueError(f"expected all, or {str(error).removeprefix('expected ')}") from None


@dataclass(frozen=True, slots=True)
class ModelParameter:
    """One parameter; `read` makes its value of a text, or raises ValueError with the expected form."""

    name: str
    default: Any
    meaning: str
    read: Callable[[str], Any] = flag


PARAMETERS = (
    ModelParameter(
        "adaptive_queue_delay",
        False,
        "an idle instance waits for more requests only while that pays, as estimated from the arrival of requests and "
        "the time of batches so far. `max_queue_delay_microseconds`, if it is not 0, limits the wait; see [adaptive "
        "delay](#adaptive-delay)",
    ),
    ModelParameter(
        "coalesce_requests",
        False,
        "execute identical requests that are in flight at the same time only once. Requests are identical if version, "
        "inputs, requested outputs and parameters are the same. Each keeps its own deadline and time in the queue; the "
        "execution has the best of their priorities, and is cancelled when all of them are",
    ),
    ModelParameter(
        "decoupled_model_infer",
        False,
        "allow ModelInfer for a decoupled model that gives one response; a second response makes the request fail",
    ),
    ModelParameter(
        "split_requests",
        False,
        "split a request with more rows than `max_batch_size` into several, at most 4096, for different batches and "
        "instances. It is one request in statistics, and the queue lets it in or refuses it as one: where one more "
        "request may wait, all of its parts may, beyond `max_queue_size`. Each part that waits counts for later "
        "requests",
    ),
    ModelParameter(
        "pad",
        MappingProxyType({}),
        "INPUT=VALUE, ...: these inputs may have different lengths within a batch. Their one variable dimension is "
        "padded with the value, to the smallest of `pad_buckets` that is long enough. Without `pad_buckets` it is "
        "padded to the longest in the batch, and requests share a batch if their lengths round up to the same power of "
        "two",
        numbers_by_name,
    ),
    ModelParameter("pad_buckets", (), "LENGTH, ...: the lengths to which dimensions are padded", lengths),
    ModelParameter(
        "unpad",
        MappingProxyType({}),
        "OUTPUT=INPUT, ...: the one variable dimension of the output is as long as that of the padded input, and is "
        "cut to the length that the request's input had",
        pairs,
    ),
    ModelParameter(
        "sequence_end_notice",
        False,
        "execute the model once more when a sequence ends without an END request: because it idled, a request of it "
        "was cancelled, its stream ended, or a new sequence started under its id. The inputs are zero, END is true",
    ),
    ModelParameter(
        "sequence_end_reason",
        "",
        "name of a further control input, INT32 with dims [1], with the reason for the end of the sequence: 0 no end, "
        "1 END from the client, 2 idle, 3 cancelled, 4 its stream ended, 5 replaced by a new sequence",
        str,
    ),
    ModelParameter(
        "sequence_ends_with_stream",
        False,
        "a sequence that starts on a ModelStreamInfer ends with that stream",
    ),
    ModelParameter(
        "sequence_drain_seconds",
        SequenceSpec().drain_seconds,
        "how long live sequences may continue after their version is replaced or unloaded; 0 ends them at once. See "
        "[repository.md](repository.md#sequences)",
        count,
    ),
    ModelParameter(
        "sequence_max_backlog",
        0,
        "sequences that may wait for a slot; a further START is refused with UNAVAILABLE; 0 for any number",
        count,
    ),
    ModelParameter(
        f"{QUEUE_PREFIX}max_queue_size",
        0,
        "requests that may wait for a model without `dynamic_batching`; further ones are refused; 0 for any number. "
        "With `sequence_batching`: requests in slots and in the backlog",
        count,
    ),
    ModelParameter(
        f"{QUEUE_PREFIX}default_timeout_microseconds",
        0,
        "how long requests may wait for a model without `dynamic_batching`; 0 for no limit. With "
        "`sequence_batching`: how long a sequence may wait for a slot",
        count,
    ),
    ModelParameter(
        f"{QUEUE_PREFIX}allow_timeout_override",
        False,
        "whether a request's parameter `timeout` may shorten that time",
    ),
    ModelParameter(
        f"{QUEUE_PREFIX}timeout_action",
        "REJECT",
        "what happens to a request whose time is over: `REJECT` it, or `DELAY` it behind the others",
        action,
    ),
    ModelParameter(
        "warmup_batch_sizes",
        (),
        "all, or SIZE, ...: before the model serves, each instance executes the samples of `model_warmup` twice at "
        "each of these batch sizes; without samples, zeros in the shapes of the inputs, padded inputs at each bucket",
        batch_sizes,
    ),
    ModelParameter(
        VERSION_LABELS,
        MappingProxyType({}),
        "LABEL=VERSION, ...: names that clients may give as the version, such as `stable=3, canary=4`; see [version "
        "labels](repository.md#version-labels)",
        labels,
    ),
)

_BY_NAME: Mapping[str, ModelParameter] = MappingProxyType({each.name: each for each in PARAMETERS})


_DEFAULTS: Mapping[str, Any] = MappingProxyType({each.name: each.default for each in PARAMETERS})


def of_server(config: pb.ModelConfig) -> Mapping[str, Any]:
    """The value of each of PARAMETERS, by name, in a configuration for which `wrong` has no finding."""
    if not config.parameters:
        return _DEFAULTS
    return {
        each.name: each.read(config.parameters[each.name].string_value)
        if each.name in config.parameters
        else each.default
        for each in PARAMETERS
    }


def version_labels(config: pb.ModelConfig) -> Mapping[str, int]:
    """The version that each label stands for, in a configuration for which `wrong` has no finding."""
    return of_server(config)[VERSION_LABELS] if VERSION_LABELS in config.parameters else {}


def of_backend(config: pb.ModelConfig) -> dict[str, str]:
    """The parameters that the backend gets: all but those of the server."""
    return {key: value.string_value for key, value in config.parameters.items() if key not in _BY_NAME}


def wrong(config: pb.ModelConfig) -> Iterator[Finding]:
    """One finding for each parameter whose text cannot be read."""
    for key, value in config.parameters.items():
        if key in _BY_NAME:
            try:
                _BY_NAME[key].read(value.string_value)
            except ValueError as error:
                path = ("parameters", key, "value", "string_value")
                yield Finding(path, f"parameter '{key}' is '{value.string_value}', {error},")
