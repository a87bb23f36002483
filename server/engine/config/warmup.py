"""model_warmup: its rules, and the specification of the samples that instances execute before the version is ready."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from inferd.backends.api import WarmupInput, WarmupSpec
from inferd.server.engine.config.findings import Finding
from inferd.server.engine.config.parameters import ALL, of_server, wrong
from inferd.server.engine.config.tensors import NAME_OF, SIZE_OF
from inferd.server.engine.pbtxt.files import inside
from inferd.server.engine.pbtxt.source import FieldPath, Source
from inferd.server.errors import ConfigError
from inferd_client.pb import model_config_pb2 as pb

FOLDER = "warmup"  # of the model, for the files of samples
TWICE = 2  # some frameworks optimise in the second execution of a shape
MAX_EXECUTIONS = 10_000
"""The most executions of samples by an instance before it serves; a load waits for all of them."""


def wrong_warmup(config: pb.ModelConfig) -> Iterator[Finding]:
    """One finding for each rule that is broken."""
    known = {tensor.name: tensor for tensor in config.input}
    for index, sample in enumerate(config.model_warmup):
        path: FieldPath = ("model_warmup", index)
        if sample.batch_size > max(1, config.max_batch_size):
            text = f"warm-up sample '{sample.name}' has batch_size {sample.batch_size}"
            yield Finding((*path, "batch_size"), text, f"max_batch_size is {config.max_batch_size}")
        for name, data in sample.inputs.items():
            where = (*path, "inputs", name)
            if name not in known:
                yield Finding(where, f"warm-up sample '{sample.name}' has an input '{name}' that the model lacks")
            elif data.data_type != known[name].data_type:
                expected = pb.DataType.Name(known[name].data_type)
                yield Finding(where, f"input '{name}' of warm-up sample '{sample.name}' must be {expected}")
            if any(dim < 0 for dim in data.dims):
                text = f"input '{name}' of warm-up sample '{sample.name}' must have all dims given"
                yield Finding(where, text, f"got {list(data.dims)}")
            if data.WhichOneof("input_data_type") is None:
                text = (
                    f"input '{name}' of warm-up sample '{sample.name}' needs zero_data, random_data or input_data_file"
                )
                yield Finding(where, text)
    yield from _wrong_sizes(config)


def too_many_warmups(config: pb.ModelConfig) -> Iterator[Finding]:
    """A finding if the samples take more than MAX_EXECUTIONS executions; counted before any sample is made."""
    if not (config.model_warmup or config.parameters) or any(wrong(config)):
        return  # another rule reports what is wrong first
    own = of_server(config)
    lengths = [len(own["pad_buckets"]) for tensor in config.input if -1 in tensor.dims and not tensor.optional]
    samples = len(config.model_warmup) or math.prod(lengths)
    sizes = max(1, config.max_batch_size) if own["warmup_batch_sizes"] == ALL else len(own["warmup_batch_sizes"])
    total = sum(max(1, sample.count) for sample in config.model_warmup) + sizes * samples * TWICE
    if total > MAX_EXECUTIONS:
        path = ("model_warmup",) if config.model_warmup else ("parameters", "warmup_batch_sizes")
        yield Finding(path, f"an instance warms up with at most {MAX_EXECUTIONS} executions", f"got {total}")


def _wrong_sizes(config: pb.ModelConfig) -> Iterator[Finding]:
    own = of_server(config)
    path = ("parameters", "warmup_batch_sizes")
    sizes = own["warmup_batch_sizes"]
    if sizes and max(sizes) > max(1, config.max_batch_size):
        yield Finding(path, f"there is no batch of {max(sizes)}, max_batch_size is {config.max_batch_size}")
    if sizes and not config.model_warmup:
        for tensor in config.input:
            padded = tensor.name in own["pad"] and own["pad_buckets"]
            if -1 in tensor.dims and not tensor.optional and not padded:
                text = f"input '{tensor.name}' has a variable dimension without buckets"
                yield Finding(path, text, "write a sample in model_warmup, or pad_buckets")


def warmup_specs(config: pb.ModelConfig, model_dir: Path, source: Source) -> Iterator[WarmupSpec]:
    """The samples that each instance executes, of a configuration without findings of `wrong_warmup`.

    Raises:
        ConfigError: a file lies outside the model's folder, is missing, or has another size than its tensor.
    """
    samples = list(_samples(config, model_dir, source))
    for sample, inputs in samples:
        if sample.batch_size == 0 and config.max_batch_size > 0:
            continue  # as in Triton
        yield WarmupSpec(sample.name, max(1, sample.batch_size), inputs, max(1, sample.count))
    for size in _sizes(config):
        for name, inputs in [(sample.name, inputs) for sample, inputs in samples] or _zeros(config):
            yield WarmupSpec(f"{name}, batch of {size}", size, inputs, TWICE)


def _sizes(config: pb.ModelConfig) -> tuple[int, ...]:
    sizes: tuple[int, ...] = of_server(config)["warmup_batch_sizes"]
    return tuple(range(1, max(1, config.max_batch_size) + 1)) if sizes == ALL else sizes


def _samples(
    config: pb.ModelConfig, model_dir: Path, source: Source
) -> Iterator[tuple[pb.ModelWarmup, dict[str, WarmupInput]]]:
    for index, sample in enumerate(config.model_warmup):
        inputs = {}
        for name, data in sample.inputs.items():
            try:
                inputs[name] = _input(data, model_dir)
            except ConfigError as error:
                where = source.at("model_warmup", index, "inputs", name)
                raise ConfigError(f"{where}: input '{name}' of warm-up sample '{sample.name}': {error}") from None
        yield sample, inputs


def _zeros(config: pb.ModelConfig) -> Iterator[tuple[str, dict[str, WarmupInput]]]:
    own = of_server(config)
    inputs = [tensor for tensor in config.input if not tensor.optional]
    for lengths in product(*(own["pad_buckets"] if -1 in tensor.dims else (0,) for tensor in inputs)):
        name = " ".join(str(length) for length in lengths if length)
        yield (
            f"zeros of length {name}" if name else "zeros",
            {
                tensor.name: WarmupInput(
                    NAME_OF.get(tensor.data_type, ""), tuple(length if dim == -1 else dim for dim in tensor.dims)
                )
                for tensor, length in zip(inputs, lengths, strict=True)
            },
        )


def _input(data: pb.ModelWarmup.Input, model_dir: Path) -> WarmupInput:
    dims = tuple(data.dims)
    datatype = NAME_OF.get(data.data_type, "")
    if not data.input_data_file:
        return WarmupInput(datatype, dims, "random" if data.random_data else "zero")
    file = inside(model_dir / FOLDER, data.input_data_file, model_dir)
    if not file.is_file():
        raise ConfigError(f"there is no file {file}")
    expected = math.prod(dims) * SIZE_OF.get(datatype, 0)
    if expected and file.stat().st_size < expected:
        raise ConfigError(f"{file} must have {expected} bytes, got {file.stat().st_size}")
    if datatype == "BYTES":
        _check_strings(file, math.prod(dims))
    return WarmupInput(datatype, dims, "file", file)


def _check_strings(file: Path, count: int) -> None:
    """Refuse a file without `count` strings in the protocol's format.

    Raises:
        ConfigError: with the format: the file may be plain text.
    """
    data, position = file.read_bytes(), 0
    for index in range(count):
        size = int.from_bytes(data[position : position + 4], "little")
        if position + 4 + size > len(data):
            raise ConfigError(
                f"{file} must have {count} string{'s' * (count > 1)}, each its length in 4 bytes, little-endian, and "
                f"then its bytes: string {index} ends behind the file's {len(data)} bytes"
            )
        position += 4 + size
