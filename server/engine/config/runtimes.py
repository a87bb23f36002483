"""The rule for `runtime`: the usual way in which a backend executes models, or another of its ways."""

from __future__ import annotations

from collections.abc import Iterator

from inferd.backends.api import Backend
from inferd.server.engine.config.findings import Finding
from inferd.server.pb import model_config_pb2 as pb


def broken_runtime_rules(config: pb.ModelConfig, backend: Backend | None) -> Iterator[Finding]:
    """Findings about the runtime of a complete configuration; `backend` is None for an ensemble."""
    usual = f"libtriton_{config.backend}.so"  # the default in Triton's own configurations
    others = backend.runtimes if backend is not None else frozenset()
    if config.runtime and config.runtime not in {usual, *others}:
        known = ", ".join(sorted(others))
        instead = f"write {known}, or remove it" if others else "remove it"
        yield Finding(("runtime",), f"backend '{config.backend}' has no runtime '{config.runtime}'", instead)
