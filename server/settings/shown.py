"""The options in force, for the log, without secrets."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Mapping
from typing import Any

from inferd.server.settings.options import written
from inferd.server.settings.settings import Settings

log = logging.getLogger("inferd.settings")

SECRETS = {
    "grpc_restricted_protocol": re.compile(r"(?<==).*", re.DOTALL),
    "cache_config": re.compile(r"(?<=password=).*", re.DOTALL),
}
"""Matches the secret part of an option's value."""


def tell_options(settings: Settings) -> None:
    """Log every option at the verbose level, as written on the command line."""
    for field in dataclasses.fields(settings):
        log.debug("--%s=%s", field.name.replace("_", "-"), written(_shown(settings, field.name)))


def _shown(settings: Settings, name: str) -> Any:
    value = getattr(settings, name)
    if name in SECRETS:
        return tuple(SECRETS[name].sub("...", str(each)) for each in value)
    return value


def show_options(settings: Settings, origins: Mapping[str, str], *, as_json: bool) -> None:
    """Print each option, its value and its origin: that in `origins`, by field, else the default."""
    rows = []
    for field in dataclasses.fields(settings):
        origin = origins.get(field.name, "the default")
        rows.append((field.name.replace("_", "-"), written(_shown(settings, field.name)), origin))
    if as_json:
        print(json.dumps({name: {"value": value, "from": origin} for name, value, origin in rows}, indent=2))
        return
    name_width, value_width = (min(max(len(row[i]) for row in rows), 60) for i in range(2))
    for name, value, origin in rows:
        print(f"{name:{name_width}}  {value:{value_width}}  {origin}")
