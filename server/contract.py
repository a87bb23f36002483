"""The command `inferd check-backend`: checks a backend against its contract, with models that use it."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import struct
import sys
import tempfile
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from math import isclose, isnan
from pathlib import Path

from inferd._native.memory.resource import live_counters
from inferd.backends.api import Backend, BackendError, ModelSource, ModelSpec, TensorSpec
from inferd.server.composition.engine import make_engine, make_loader
from inferd.server.engine.engine import Engine
from inferd.server.errors import ConfigError
from inferd.server.settings import Settings
from inferd_client.pb import grpc_service_pb2 as pb

ASKED = 48  # requests to a model at once
VARIABLE = (1, 2, 3)  # sizes of a variable dimension
FORMATS = {
    "BOOL": "?",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
    "BF16": "H",
}
"""How `struct` writes an element; BF16 as its bits."""
HOUSE = Path(__file__).parents[1]  # the frames of errors in these files are the server's, not a backend's
TOLERANCE = {"FP16": 1e-2, "BF16": None, "FP32": 1e-4, "FP64": 1e-9}
"""How much a response may differ between batches; None: responses are not compared."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule of the contract, and how the backend breaks it or why it was not checked; both empty if the rule holds."""

    rule: str
    broken: str = ""
    skipped: str = ""


class _Failures(logging.Handler):
    """Keeps the place in the backend that raised the last logged error; findings have the error's text already.

    Args:
        folder: of the backends; None if they are installed.
    """

    def __init__(self, folder: Path | None) -> None:
        super().__init__()
        self._folder = folder.absolute() if folder else None
        self._last = ""

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        if record.exc_info and record.exc_info[1] is not None:
            self._last = self.place(record.exc_info[1])
        elif record.levelno == logging.WARNING:
            print(record.getMessage(), file=sys.stderr)

    def take(self) -> str:
        """The place of the last error, as the end of a sentence; empty if the log told none since the last call."""
        last, self._last = self._last, ""
        return last

    def place(self, error: BaseException) -> str:
        """The last line of the backend in a traceback, as the end of a sentence; empty if there is none."""
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if self._is_its(Path(frame.filename))]
        return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""

    def _is_its(self, file: Path) -> bool:
        if self._folder is not None:
            return file.is_relative_to(self._folder)
        return file.is_absolute() and not file.is_relative_to(HOUSE)  # a .pyx has a relative path


def run_check_backend(settings: Settings) -> int:
    """Print a line for each rule and model. Returns the exit status of the command.

    Raises:
        ConfigError: the repository has no model.
    """
    failures, log = _Failures(settings.backend_directory), logging.getLogger("inferd")
    log.addHandler(failures)
    level, log.propagate = log.level, False
    log.setLevel(logging.DEBUG)  # tells where an execution failed
    try:
        failed, backends = asyncio.run(_run(settings, failures))
        gc.collect()
        left = {name: count for name, count in live_counters().items() if count}
        del backends  # what they keep has been counted
    finally:
        log.removeHandler(failures)
        log.setLevel(level)
        log.propagate = True
    kept = ", ".join(f"{count} {name}" for name, count in left.items())
    failed |= _tell("", Finding("nothing is left when the models are gone", kept and f"the backend keeps {kept}"))
    return 1 if failed else 0


async def _run(settings: Settings, failures: _Failures) -> tuple[bool, object]:
    """Whether a rule is broken, and an object that keeps the backends."""
    loader = make_loader(settings)
    engine = make_engine(settings, loader)
    failed = False
    try:
        for problem in await engine.start():
            failed |= _tell("", Finding("models load", f"{problem}{failures.take()}"))
        loaded = engine.loaded()
        if not loaded and not failed:
            raise ConfigError("check-backend: the repository has no model: give one with a model of the backend")
        for version in loaded:
            if version.spec.ensemble is not None:
                continue
            failed |= _tell(version.spec.name, _without_a_file(loader.backend, version.spec, failures))
            async for finding in _answers(engine, version.spec, failures):
                failed |= _tell(version.spec.name, finding)
    finally:
        await engine.close()
    return failed, loader


def _tell(model: str, finding: Finding) -> bool:
    about = f"{model}: " if model else ""
    outcome = finding.broken or finding.skipped or "ok"
    print(f"{about}{finding.rule}: {outcome}", flush=True)  # a backend may end the process
    return bool(finding.broken)


def _without_a_file(find: Callable[[str], Backend], spec: ModelSpec, failures: _Failures) -> Finding:
    """The backend may refuse a version without a file, but only with a BackendError."""
    rule = "a missing model file is a BackendError"
    with tempfile.TemporaryDirectory() as folder:
        version = Path(folder) / spec.name / "1"
        version.mkdir(parents=True)
        try:
            find(spec.backend).load(ModelSource(replace(spec), 1, version)).close()
        except BackendError as error:
            return Finding(rule, "" if str(error) else f"its text is empty{failures.place(error)}")
        except Exception as error:
            return Finding(rule, f"{type(error).__name__}: {error}{failures.place(error)}")
    return Finding(rule)


async def _answers(engine: Engine, spec: ModelSpec, failures: _Failures) -> AsyncIterator[Finding]:
    """Send requests one by one, and then all at once, in batches of any size and on all instances."""
    if spec.sequence is not None or spec.decoupled:
        kind = "has sequences" if spec.sequence is not None else "is decoupled"
        yield Finding("requests are answered", skipped=f"not checked: the model {kind}")
        return
    chance = random.Random(7)
    messages = [_request(spec, chance) for _ in range(ASKED)]
    alone = []
    for message in messages:
        answer = await _ask(engine, message)
        if isinstance(answer, str):  # further requests would only fail in the same way
            told = f"a request with {_shown(message)} failed: {answer}{failures.take()}"
            yield Finding("requests are answered", told)
            return
        alone.append(answer)
    yield Finding("requests are answered")
    again = [await _ask(engine, message) for message in messages[:4]]
    yield Finding("a response is the same the next time", _difference(alone[:4], again))
    together = await asyncio.gather(*(_ask(engine, message) for message in messages))
    yield Finding("a response is the same in a batch of others, and on any instance", _difference(alone, together))


def _request(spec: ModelSpec, chance: random.Random) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=spec.name)
    rows = [chance.randint(1, min(4, spec.max_batch_size))] if spec.max_batch_size else []
    size = chance.choice(VARIABLE)
    for tensor in spec.inputs:
        if tensor.optional and chance.randint(0, 1):
            continue
        shape = [*rows, *(size if dim < 0 else dim for dim in tensor.dims)]
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
        message.raw_input_contents.append(_content(tensor, shape, chance))
    return message


def _shown(message: pb.ModelInferRequest) -> str:
    return ", ".join(f"{each.name} {each.datatype} {list(each.shape)}" for each in message.inputs) or "no input"


def _content(tensor: TensorSpec, shape: Sequence[int], chance: random.Random) -> bytes:
    count = 1
    for dim in shape:
        count *= dim
    if tensor.datatype == "BYTES":
        words = [str(chance.randint(0, 999)).encode() for _ in range(count)]
        return b"".join(struct.pack("<I", len(word)) + word for word in words)
    if tensor.datatype == "BOOL":
        return bytes(chance.randint(0, 1) for _ in range(count))
    if tensor.datatype == "BF16":
        return struct.pack(f"<{count}H", *(chance.choice((0, 0x3F80, 0x4000)) for _ in range(count)))
    return struct.pack(f"<{count}{FORMATS[tensor.datatype]}", *(chance.randint(0, 100) for _ in range(count)))


async def _ask(engine: Engine, message: pb.ModelInferRequest) -> pb.ModelInferResponse | str:
    """The response, or the text of an error."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[pb.ModelInferResponse | str] = loop.create_future()

    def deliver(status: int, text: str, response: bytes | None) -> None:
        found = pb.ModelInferResponse.FromString(response) if not status and response is not None else None
        loop.call_soon_threadsafe(done.set_result, text or f"status {status}" if found is None else found)

    engine.infer.submit(message.SerializeToString(), deliver)
    return await done


def _difference(first: Sequence[pb.ModelInferResponse | str], second: Sequence[pb.ModelInferResponse | str]) -> str:
    for one, other in zip(first, second, strict=True):
        if isinstance(one, str) or isinstance(other, str):
            return other if isinstance(other, str) else str(one)
        for index, output in enumerate(one.outputs):
            same = other.outputs[index]
            if (output.name, list(output.shape)) != (same.name, list(same.shape)):
                return f"output '{output.name}' has another shape: {list(output.shape)} and {list(same.shape)}"
            if not _alike(output.datatype, one.raw_output_contents[index], other.raw_output_contents[index]):
                return f"output '{output.name}' has other values"
    return ""


def _alike(datatype: str, one: bytes, other: bytes) -> bool:
    if one == other or datatype not in TOLERANCE:
        return one == other
    tolerance = TOLERANCE[datatype]
    if tolerance is None:
        return len(one) == len(other)
    values = (struct.iter_unpack(f"<{FORMATS[datatype]}", data) for data in (one, other))
    return all(
        isclose(a, b, rel_tol=tolerance, abs_tol=tolerance) or (isnan(a) and isnan(b))
        for (a,), (b,) in zip(*values, strict=True)
    )
