"""Errors of a configuration, by field, and the exception made of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from inferd.server.engine.pbtxt.source import FieldPath, Source
from inferd.server.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Finding:
    """One error: its text, its place, and what to write instead."""

    path: FieldPath
    text: str
    instead: str = ""
    names_model: bool = False  # the text already has the model's name


def error_of(findings: Iterable[Finding], model: str, source: Source) -> ConfigError:
    """The error with a line for each finding."""
    return ConfigError("\n".join(f"{source.at(*found.path)}: {_line(found, model)}" for found in findings))


def _line(found: Finding, model: str) -> str:
    named = found.text if found.names_model else f"{found.text} for model '{model}'"
    return f"{named}: {found.instead}" if found.instead else named


def raise_any(findings: Iterable[Finding], model: str, source: Source) -> None:
    """Raise an error if there is a finding.

    Raises:
        ConfigError: there is one.
    """
    if found := list(findings):
        raise error_of(found, model, source)
