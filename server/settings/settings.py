"""The checked options of a server: their values are allowed, and fit each other."""

from __future__ import annotations

from inferd.server.settings import rules
from inferd.server.settings.options import Options


class Settings(Options):
    """The options of one server.

    Raises:
        SettingsError: the value of an option is out of its range, or contradicts another.
    """

    def __post_init__(self) -> None:
        rules.check(self)
