"""The server's options: their list (`options`), the parsing of values (`values`), the allowed values (`rules`), and
checked options (`settings`)."""

from inferd.server.settings.options import CORES_PER_IO_THREAD, HELD_DIVISOR, sections, written
from inferd.server.settings.settings import Settings

__all__ = ["CORES_PER_IO_THREAD", "HELD_DIVISOR", "Settings", "sections", "written"]
