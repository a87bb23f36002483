"""The options in force, for the log: what is secret in them is left out."""

from __future__ import annotations

import dataclasses
import logging
import re

from server.settings.options import Settings, written

log = logging.getLogger("inferd.settings")

SECRETS = {
    "grpc_restricted_protocol": re.compile(r"(?<==).*", re.DOTALL),
    "cache_config": re.compile(r"(?<=password=).*", re.DOTALL),
}
"""What of an option's value is a secret."""


def tell_options(settings: Settings) -> None:
    """Log every option at the verbose level, as one writes it."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.name in SECRETS:
            value = tuple(SECRETS[field.name].sub("...", str(each)) for each in value)
        log.debug("--%s=%s", field.name.replace("_", "-"), written(value))
