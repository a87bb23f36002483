"""What is wrong with a configuration, field by field, and the error that is made of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from server.engine.config.source import FieldPath, Source
from server.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: what, where, and what to write instead."""

    path: FieldPath
    text: str
    instead: str = ""


def error_of(findings: Iterable[Finding], model: str, source: Source) -> ConfigError:
    """The error with a line for each finding."""
    return ConfigError(
        "\n".join(
            f"{source.at(*found.path)}: {found.text} for model '{model}'{f': {found.instead}' if found.instead else ''}"
            for found in findings
        )
    )


def raise_any(findings: Iterable[Finding], model: str, source: Source) -> None:
    """Nothing if there is no finding.

    Raises:
        ConfigError: there is one.
    """
    if found := list(findings):
        raise error_of(found, model, source)
