"""TraceSetting: shows and changes which requests are traced while the server runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from inferd.server.errors import InvalidArgument, NotFound, Unavailable, Unimplemented
from inferd.server.rpc.call import Call
from inferd.server.settings.tracing import LEVELS, MOST_COUNT, MOST_RATE, TraceConfig
from inferd_client.pb import grpc_service_pb2 as pb

if TYPE_CHECKING:
    from inferd.server.engine.engine import Engine

NUMBERS = {"trace_rate": (0, MOST_RATE), "trace_count": (-1, MOST_COUNT), "log_frequency": (0, MOST_RATE)}
FIELDS = {"trace_level": "levels", "trace_rate": "rate", "trace_count": "count", "log_frequency": "log_frequency"}


class Sampling(Protocol):
    """Settings in force."""

    @property
    def levels(self) -> tuple[str, ...]: ...
    @property
    def rate(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def log_frequency(self) -> int: ...


class TraceControl(Protocol):
    """The interface of `inferd.server.observe.tracing.control.TraceControl`."""

    @property
    def config(self) -> TraceConfig: ...
    def sampling(self, model: str = "") -> Sampling:
        """The sampling of a model, or of the server."""

    async def require_place(self) -> None:
        """Raise an InvalidArgument if traces cannot be written anywhere."""

    def update(self, model: str, changes: Mapping[str, object]) -> None:
        """Change settings, by the names of Sampling's fields; None restores the default or inherited value."""


class TraceSetting:
    """The handler; changes take effect all or none."""

    def __init__(self, control: TraceControl, engine: Engine) -> None:
        self._control = control
        self._engine = engine

    async def trace_setting(self, request: pb.TraceSettingRequest, call: Call) -> pb.TraceSettingResponse:
        model = request.model_name
        if model:
            self._require(model)
        changes = dict(map(_change, request.settings.keys(), (each.value for each in request.settings.values())))
        if changes:
            if not model:  # they apply to every model, and a trace can contain tensors
                call.require_every_model()
            if changes.get("levels"):
                await self._control.require_place()
            self._control.update(model, changes)
        return self._answer(model)

    def _require(self, model: str) -> None:
        try:
            self._engine.model(model)
        except (NotFound, Unavailable, InvalidArgument) as error:
            raise InvalidArgument(f"Request for unknown model : {model}") from error

    def _answer(self, model: str) -> pb.TraceSettingResponse:
        sampling, config = self._control.sampling(model), self._control.config
        shown: dict[str, Sequence[Any]] = {
            "trace_level": sampling.levels or ("OFF",),
            "trace_rate": (sampling.rate,),
            "trace_count": (sampling.count,),
            "trace_mode": (config.mode,),
        }
        if config.mode == "triton":
            shown |= {"log_frequency": (sampling.log_frequency,), "trace_file": (config.file,)}
        else:
            resource = tuple(f"{name}={value}" for name, value in config.resource.items())
            shown |= {"url": (config.url,), "resource": resource}
            shown |= {name: (value,) for name, value in config.batching.items()}
        response = pb.TraceSettingResponse()
        for name, values in shown.items():
            response.settings[name].value.extend(map(str, values))
        return response


def _change(name: str, values: Sequence[str]) -> tuple[str, object]:
    """The value of one setting in a request, with Triton's error texts."""
    if name == "trace_file":
        raise Unimplemented("trace file location can not be updated through network protocol")
    if name not in FIELDS:
        raise InvalidArgument(f"unknown trace setting '{name}': expected some of {', '.join(FIELDS)}")
    if not values:
        return FIELDS[name], None
    if name == "trace_level":
        return FIELDS[name], _levels(values)
    if len(values) != 1:
        raise InvalidArgument(f"expect only 1 value for '{name}'")
    try:
        number = int(values[0])
    except ValueError:
        raise InvalidArgument(f"Unable to parse '{name}', got: {values[0]}") from None
    least, most = NUMBERS[name]
    if not least <= number <= most:
        raise InvalidArgument(f"Unable to parse '{name}', value is out of range [ {least}, {most} ], got: {values[0]}")
    return FIELDS[name], number


def _levels(values: Sequence[str]) -> tuple[str, ...]:
    for value in values:
        if value not in LEVELS:
            raise InvalidArgument(f"unknown trace level '{value}': expected some of {', '.join(LEVELS)}")
    if "OFF" in values and len(set(values)) > 1:
        raise InvalidArgument("Expect only one trace level 'OFF' is specified")
    return tuple(level for level in LEVELS[1:] if level in values)
