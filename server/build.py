"""The build of this server, and whether the imported modules belong to it.

`setup.py` writes a record beside the native extensions. In a source tree the record can be compared with the sources.
Extensions built from other sources fail at import, with errors that do not name the remedy.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "_native" / "built.json"
FOLDERS = ("_native", "backends", "inferd_client")
OWN = {"inferd", "inferd_client"}
"""The packages that inferd consists of."""
SUFFIXES = {".c", ".pyx", ".pxd", ".pxi", ".h"}
FRAMEWORKS = {
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
    "torch": ("torch",),
    "tensorrt": ("tensorrt", "tensorrt-lean-cu13-libs", "tensorrt-rtx-cu13-libs"),
    "numpy": ("numpy",),
    "grpcio": ("grpcio",),
    "protobuf": ("protobuf",),
    "uvloop": ("uvloop",),
    "obstore": ("obstore",),
    "huggingface_hub": ("huggingface_hub",),
}
"""Distributions that the server uses if they are installed, by their common names."""
OF_IMPORTS = (ImportError, TypeError, ValueError, AttributeError, SystemError)
"""The exceptions that importing a mismatched extension raises."""


def digest_of_sources(root: Path = ROOT) -> str:
    """A digest of the sources of the extensions; empty if there are no sources, as in a wheel."""
    files = sorted(
        path for folder in FOLDERS for path in (root / folder).rglob("*") if path.suffix in SUFFIXES and path.is_file()
    )
    if not any(path.suffix == ".pyx" for path in files):
        return ""
    import hashlib  # imported only here, because it loads OpenSSL

    found = hashlib.sha256()
    for path in files:
        found.update(f"{path.relative_to(root)}\0".encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def record() -> dict[str, str]:
    """The record of the build: kind, commit, sources, python; empty without a record."""
    try:
        found = json.loads(RECORD.read_text())
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}


def describe() -> Iterator[str]:
    """Lines about the version, the build, the interpreter and the frameworks that are installed."""
    from importlib import metadata  # imported only here, because it loads a parser of mail

    built = record()
    commit = f", commit {built['commit']}" if built.get("commit") else ""
    yield f"inferd {metadata.version('inferd')}"
    yield f"native: {built.get('kind', 'unknown')} build{commit}{_libraries()}"
    yield f"python: {platform.python_implementation()} {platform.python_version()}, {platform.machine()}"
    found = [f"{name} {version}" for name, names in FRAMEWORKS.items() if (version := _version(names))]
    yield f"found: {', '.join(found)}"
    if stale := stale_sources():
        yield f"warning: {stale}"


def _libraries() -> str:
    try:
        from inferd._native.transport.libraries import library_versions
    except OF_IMPORTS:  # `stale_sources` explains it, or the start of the server does
        return ""
    return f", {', '.join(library_versions())}"


def _version(names: tuple[str, ...]) -> str:
    from importlib import metadata  # as above

    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def stale_sources() -> str:
    """A warning if the extensions were built from other sources than those in this tree; else empty."""
    built, now = record().get("sources"), digest_of_sources()
    if not built or not now or built == now:
        return ""
    return "the native extensions were built from other sources than those that lie here: build them with 'make build'"


def _is_of_an_import(error: BaseException) -> bool:
    """Whether it was raised while a module was imported: by code of the module itself, or as an extension began."""
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_name
        if name == "<module>" or name.startswith("init "):  # so Cython calls the beginning of an extension
            return True
        trace = trace.tb_next
    return isinstance(error, ImportError)


def explained(error: BaseException) -> str:
    """An explanation of an import error that the build or the installation has caused; empty for any other error.

    An error of another origin gets a note if the extensions are stale, which may be its cause.
    """
    if type(error).__module__.startswith("google.protobuf."):  # its check of generated code
        return (
            f"protobuf does not fit the packages that need it: '{sys.executable} -m pip check' names those, and "
            f"'{sys.executable} -m pip install --upgrade \"protobuf<8\"' may help ({error})"
        )
    if not isinstance(error, OF_IMPORTS):
        return ""
    name = getattr(error, "name", None) or ""
    if isinstance(error, ModuleNotFoundError) and name.partition(".")[0] not in OWN:
        return (
            f"{sys.executable} has no module '{name}', which inferd needs: install inferd again with its dependencies; "
            f"'{sys.executable} -m pip check' lists what is missing"
        )
    if stale := stale_sources():
        if _is_of_an_import(error):
            return stale
        error.add_note(f"inferd: {stale}")
    if not isinstance(error, ImportError) or not name.startswith("inferd._native"):
        return ""
    built = record().get("python", "")
    if built and built != sys.implementation.cache_tag:
        return f"the native extensions were built for {built}, and this is {sys.implementation.cache_tag}: rebuild them"
    todo = "build them with 'make build'" if digest_of_sources() else "install inferd again"
    return f"the native extension {name} is not there, or lacks what is imported from it: {todo}"
