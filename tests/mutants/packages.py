"""The packages whose mutants are drawn, and the tests of each."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from tests.mutants.operators import Mutant, mutants_of

LOOSE = "_native"  # the modules in no package of it
OTHERS = ("backends/python", "backends/identity", "backends/triton_api")

# Tests that speak of a package through a server, and so do not import it. Those that import it are found by that.
TESTS = {
    "_native": ("native/test_timers", "native/test_model_files", "engine/test_repository", "engine/test_room"),
    "_native/caching": (
        "engine/test_cache",
        "engine/test_coalescing",
        "engine/test_redis_cache",
        "engine/test_ensembles",
        "conformance/test_response_cache",
        "observe/test_traces",
    ),
    "_native/cuda": ("engine/test_cuda_*", "engine/test_gpu*", "backends/test_placed"),
    "_native/ensembles": ("engine/test_*ensemble*", "conformance/test_ensembles", "engine/test_linear"),
    "_native/execution": (
        "engine/test_alternating",
        "engine/test_batches",
        "engine/test_written_inputs",
        "engine/test_views",
        "engine/test_warmup",
        "engine/test_measures",
        "engine/test_instances",
        "backends/test_identity",
    ),
    "_native/gpu": ("engine/test_gpu*", "engine/test_cuda_*", "backends/test_placed"),
    "_native/memory": ("engine/test_layout", "engine/test_written_inputs", "conformance/test_shared_memory"),
    "_native/protobuf": ("conformance/test_wire", "conformance/test_infer", "conformance/test_bad_input"),
    "_native/request": (
        "native/test_queue",
        "engine/test_requests",
        "engine/test_linear",
        "observe/test_metrics",
        "observe/test_traces",
        "conformance/test_single_responses",
    ),
    "_native/scheduling": (
        "engine/test_batches",
        "engine/test_queue_policy",
        "engine/test_dispatch",
        "engine/test_split",
        "engine/test_alternating",
        "engine/test_linear",
        "conformance/test_queue_policy",
        "conformance/test_full_queue",
        "observe/test_page",
    ),
    "_native/sequences": ("engine/test_sequences", "engine/test_departing_sequences", "conformance/test_sequences"),
    "_native/service": (
        "front/test_access",
        "front/test_rights",
        "front/test_forwarding",
        "engine/test_demand",
        "rpc/*",
        "conformance/test_infer",
        "conformance/test_stream",
        "conformance/test_bad_input",
        "observe/test_metrics",
        "observe/test_page",
    ),
    "_native/tensors": (
        "conformance/test_infer",
        "conformance/test_bad_input",
        "conformance/test_shared_memory",
        "engine/test_placement",
        "engine/test_requests",
        "engine/test_cuda_region_copies",
        "backends/tensorrt/test_served",
    ),
    "_native/transport": (
        "conformance/test_wire",
        "conformance/test_connections",
        "conformance/test_claims",
        "conformance/test_compression",
        "conformance/test_held_bytes",
        "conformance/test_stream",
        "front/test_drain",
        "front/test_keepalive",
        "front/test_protocol",
    ),
    "backends/identity": ("backends/test_identity", "engine/test_batches"),
    "backends/python": ("backends/python/*",),
    "backends/triton_api": ("backends/test_triton_api", "backends/test_triton_calls"),
}
# They need a GPU, images or networks, look at sources, or are the simulation, which comes before the tests.
APART = ("clients", "gpu", "fuzz", "mutants", "packaging", "proxy", "simulation", "storage")


def package_of(file: str) -> str:
    """`_native/scheduling` of `_native/scheduling/queue.pyx`."""
    return str(Path(file).parent)


def sources(root: Path) -> dict[str, list[str]]:
    """All sources from which mutants are drawn, by package."""
    found: dict[str, list[str]] = {}
    for folder in (LOOSE, *OTHERS):
        for path in sorted((root / folder).rglob("*.p[yx][xi]")):
            if path.suffix == ".pyi":
                continue
            file = str(path.relative_to(root))
            if package_of(file).startswith((LOOSE, *OTHERS)) and "worker" not in path.parts:
                found.setdefault(package_of(file), []).append(file)
    return found


def main_of(file: str, root: Path) -> str:
    """The source of the extension that a source is in: that which includes it, or itself."""
    path = root / file
    if path.suffix != ".pxi":
        return file
    including = next(each for each in path.parent.glob("*.pyx") if path.name in included(each))
    return str(including.relative_to(root))


def module_of(file: str, root: Path) -> str:
    """The name of its extension."""
    return "inferd." + main_of(file, root).removesuffix(".pyx").replace("/", ".")


def parts_of(module: str, root: Path) -> list[str]:
    """The sources of an extension, of which the first includes the others."""
    main = root / (module.removeprefix("inferd.").replace(".", "/") + ".pyx")
    return [str(path.relative_to(root)) for path in (main, *(main.parent / name for name in included(main)))]


def included(path: Path) -> list[str]:
    return re.findall(r'^include "(.+)"$', path.read_text(), re.MULTILINE)


def drawn(root: Path, files: list[str], draw: int) -> list[Mutant]:
    """All mutants of these files, in the order that this number draws.

    The place of each in the order is its own: it is the same after a change of anything else.
    """
    mutants = [mutant for file in files for mutant in mutants_of(file, (root / file).read_text())]
    return sorted(mutants, key=lambda mutant: hashlib.sha256(f"{draw} {mutant.key}".encode()).digest())


def selected_tests(root: Path, file: str) -> list[str]:
    """The files of tests for a mutant of this source: those that import its module first, then those of its package."""
    module = module_of(file, root).removeprefix("inferd.")
    package = package_of(file)
    of_module = re.compile(rf"\b{re.escape(module)}\b")
    of_package = re.compile(rf"\b{re.escape(package.replace('/', '.'))}(\.\w+| import )")
    tests = root / "tests"
    table = {path for pattern in TESTS.get(package, ()) for path in tests.glob(f"{pattern}.py")}
    ranked = []
    for path in sorted(tests.rglob("test_*.py")):
        parts = path.relative_to(tests).parts
        if len(parts) == 1 or parts[0] in APART:
            continue
        text = path.read_text()
        if of_module.search(text):
            rank = 0
        elif path.stem == f"test_{Path(file).stem.strip('_')}":
            rank = 1
        elif package != LOOSE and of_package.search(text):
            rank = 2
        elif path in table:
            rank = 3
        else:
            continue
        ranked.append((rank, parts[0] != "native", str(path.relative_to(root))))
    return [path for *_, path in sorted(ranked)]
