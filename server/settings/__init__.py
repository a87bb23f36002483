"""The server's options: their list (`options`), the parsing of values (`values`), the allowed values (`rules`), and
checked options (`settings`)."""

from typing import Final

from inferd.server.settings.options import (
    CORES_PER_IO_THREAD,
    DEVICE_POOL_SIZE,
    HELD_DIVISOR,
    Options,
    sections,
    written,
)
from inferd.server.settings.settings import Settings

DEFAULTS: Final = Options(model_repository=())
"""The options of a server that is started without any. A part of the server that can be made without the value of an
option takes it from here, or has no limit."""

__all__ = ["CORES_PER_IO_THREAD", "DEFAULTS", "DEVICE_POOL_SIZE", "HELD_DIVISOR", "Settings", "sections", "written"]
