"""Files that change while a server reads them."""

from __future__ import annotations

from pathlib import Path


def replace(target: Path, content: bytes | str) -> None:
    """Put another file where `target` is, as Kubernetes and editors do: it is whole at every moment."""
    replacement = target.with_name(f"{target.name}.new")
    replacement.touch(0o600)
    replacement.write_bytes(content.encode() if isinstance(content, str) else content)
    replacement.replace(target)
