"""The server's options: what there is (`options`), what their values mean (`values`), what is allowed (`rules`), and
those of a server that can run (`settings`)."""

from server.settings.options import sections, written
from server.settings.settings import Settings

__all__ = ["Settings", "sections", "written"]
