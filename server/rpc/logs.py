"""LogSettings: shows and changes the settings of logging while the server runs."""

# ruff: noqa: ARG002 - handlers share one signature, whatever they need of it

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from inferd.server.errors import InvalidArgument, Unimplemented
from inferd.server.rpc.call import Call
from inferd_client.pb import grpc_service_pb2 as pb

Setting = bool | int | str

_FIELDS = {bool: "bool_param", int: "uint32_param", str: "string_param"}
_KINDS = {bool: "boolean", int: "int32", str: "string"}

FORMATS = ("default", "ISO8601", "json")


class LogControl(Protocol):
    """The settings of logs: log_file, log_info, log_warning, log_error, log_verbose_level and log_format."""

    def settings(self) -> Mapping[str, Setting]:
        """All of them, as they are."""

    def update(self, changes: Mapping[str, Setting]) -> None:
        """Change settings, from now on."""


class LogSettings:
    """The handler; changes take effect all or none."""

    def __init__(self, control: LogControl) -> None:
        self._control = control

    async def log_settings(self, request: pb.LogSettingsRequest, call: Call) -> pb.LogSettingsResponse:
        changes = _changes(request, self._control.settings())
        if changes:
            self._control.update(changes)
        response = pb.LogSettingsResponse()
        for name, value in self._control.settings().items():
            setattr(response.settings[name], _FIELDS[type(value)], value)
        return response


def _changes(request: pb.LogSettingsRequest, present: Mapping[str, Setting]) -> dict[str, Setting]:
    """The request's changes, checked, with Triton's error texts."""
    found: dict[str, Setting] = {}
    for name, setting in request.settings.items():
        if name not in present:
            raise InvalidArgument(f"unknown log setting '{name}': expected some of {', '.join(present)}")
        if name == "log_file":
            raise Unimplemented("log file location can not be updated through network protocol")
        kind = type(present[name])
        if setting.WhichOneof("parameter_choice") != _FIELDS[kind]:
            raise InvalidArgument(f"expect {_KINDS[kind]} for {name}")
        found[name] = getattr(setting, _FIELDS[kind])
    form = found.get("log_format", FORMATS[0])
    if form not in FORMATS:
        raise InvalidArgument(
            f"invalid argument for log_format, got: {form}, expected {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        )
    return found
