"""The options of a server that can run: their values are allowed, and go together."""

from __future__ import annotations

from server.settings import rules
from server.settings.options import Options


class Settings(Options):
    """How one server runs.

    Raises:
        SettingsError: the value of an option is out of its range, or does not go with another.
    """

    def __post_init__(self) -> None:
        rules.check(self)
