"""The server's options: what there is (`options`), what is allowed (`rules`), what their values mean (`values`)."""

from server.settings.options import Settings, sections, written

__all__ = ["Settings", "sections", "written"]
