"""The rules for `optimization.execution_accelerators`: the names that a backend knows, if instances can use them.

Accelerators of a kind of device on which the model has no instance are hints without effect, see `refused`.
"""

from __future__ import annotations

from collections.abc import Iterator

from inferd.backends.api import Backend
from inferd.server.engine.config.findings import Finding
from inferd.server.pb import model_config_pb2 as pb

KIND = pb.ModelInstanceGroup.Kind


def broken_accelerator_rules(config: pb.ModelConfig, backend: Backend | None) -> Iterator[Finding]:
    """Findings about the accelerators of a complete configuration; `backend` is None for an ensemble."""
    accelerators = config.optimization.execution_accelerators
    for name, entries, known, kind in (
        ("gpu_execution_accelerator", accelerators.gpu_execution_accelerator, "gpu_accelerators", KIND.KIND_GPU),
        ("cpu_execution_accelerator", accelerators.cpu_execution_accelerator, "cpu_accelerators", KIND.KIND_CPU),
    ):
        names: frozenset[str] = getattr(backend, known, frozenset())
        used = any(group.kind == kind for group in config.instance_group)
        for index, entry in enumerate(entries):
            path = ("optimization", "execution_accelerators", name, index)
            if used and entry.name not in names:
                text = f"unknown Execution Accelerator '{entry.name}' is requested"
                served = f"those of backend '{config.backend}' are {', '.join(sorted(names))}" if names else "remove it"
                yield Finding((*path, "name"), text, served)
