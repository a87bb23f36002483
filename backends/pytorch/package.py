"""Packages of AOTInductor, `model.pt2`: their content, and the machine that they need.

A package is a zip archive with a compiled library, its generated source, and a description of its target machine.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from inferd.backends.api import BackendError
from inferd.backends.pytorch.wrapper import ExpectedInput, expected_inputs

FOLDER = ("data", "aotinductor")
EXPORTED = ("models",)  # where torch.export.save puts a program
MODEL = "model"  # the name under which a package holds its model, if it holds one

ISA_FLAGS = {
    "AVX2": "avx2",
    "AVX512": "avx512f",
    "AVX512_VNNI": "avx512_vnni",
    "AVX512_BF16": "avx512_bf16",
    "AMX_TILE": "amx_tile",
    "AMX_FP16": "amx_fp16",
}
"""The names in /proc/cpuinfo of instruction sets for which a package may have been compiled."""

_NUMBERED = re.compile(r'inputs_info_\[\d+\]\.name = "arg(\d+)_1";')


@dataclass(frozen=True, slots=True)
class Package:
    """The description of a package.

    Attributes:
        path: the path of the archive.
        folder: the folder in the archive that has the model's files.
        library: the name of the shared object in that folder.
        device: "cpu" or "cuda".
        capability: the compute capability of the target GPU, such as "90"; empty for the CPU.
        inputs: the inputs in the order of the library; None if the package does not describe them.
        arguments: a name for each argument of the exported call, constants included: "ARGS[0]", "KWARGS[mask]".
        numbers: those by which the code calls the inputs, in their order. They differ as the places of the inputs among
            the arguments do. Empty if the code calls them otherwise.
        results: a name for each output: "RESULT[0]".
        obstacle: why only PyTorch's own loader can call the library; empty if the library can be called directly.
        fatal_checks: whether an index out of range ends the process that executes the library.
    """

    path: Path
    folder: str
    library: str
    device: str
    capability: str
    inputs: tuple[ExpectedInput, ...] | None
    arguments: tuple[str, ...]
    numbers: tuple[int, ...]
    results: tuple[str, ...]
    obstacle: str
    fatal_checks: bool

    def unpack(self, target: Path) -> Path:
        """Write the model's files to a folder; returns the path of the library."""
        with zipfile.ZipFile(self.path) as archive:
            for name in archive.namelist():
                file = PurePosixPath(name)
                if str(file.parent) == self.folder and not name.endswith("/"):
                    with archive.open(name) as packed, (target / file.name).open("wb") as unpacked:
                        shutil.copyfileobj(packed, unpacked)
        return target / self.library


def read_package(path: Path) -> Package:
    """Read a package.

    Raises:
        BackendError: the file is no package, or was compiled for another machine.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return _read(path, archive)
    except BackendError:
        raise
    except Exception as error:  # zipfile, zlib and json have many, and foreign content leads to others
        raise BackendError(
            f"'{path}' is no package of AOTInductor, as torch._inductor.aoti_compile_and_package makes it: {error}"
        ) from error


def _read(path: Path, archive: zipfile.ZipFile) -> Package:
    folder = _folder(path, archive)
    names = [name for name in archive.namelist() if str(PurePosixPath(name).parent) == folder]
    libraries = [name for name in names if name.endswith(".so")]
    if len(libraries) != 1:
        raise BackendError(f"'{path}' holds {len(libraries)} compiled libraries in {folder}, expected one")
    library = libraries[0]
    metadata = json.loads(archive.read(library.removesuffix(".so") + "_metadata.json"))
    _check_machine(path, metadata)
    wrapper = library.removesuffix(".so") + ".cpp"
    source = archive.read(wrapper).decode(errors="replace") if wrapper in names else ""
    try:
        inputs = expected_inputs(source) if source else None
    except BackendError as error:
        raise BackendError(f"'{path}': {error}") from None
    return Package(
        path=path,
        folder=folder,
        library=PurePosixPath(library).name,
        device=metadata["AOTI_DEVICE_KEY"],
        capability=metadata.get("AOTI_COMPUTE_CAPABILITY", ""),
        inputs=inputs,
        arguments=tuple(_argument_names(_spec(source, "in_spec_"))),
        numbers=tuple(int(number) for number in _NUMBERED.findall(source)),
        results=tuple(f"RESULT{place}" for place in _leaves(_spec(source, "out_spec_"))),
        obstacle=_obstacle(library, names, archive.namelist()),
        fatal_checks=any(
            _checks_in_parallel(archive.read(name).decode(errors="replace")) for name in names if name.endswith(".cpp")
        ),
    )


def _folder(path: Path, archive: zipfile.ZipFile) -> str:
    """The folder of the only model's files, or of those of the model named "model"."""
    parents = {PurePosixPath(name).parent for name in archive.namelist() if name.endswith(".so")}
    found = sorted(str(parent) for parent in parents if parent.parts[1:3] == FOLDER and len(parent.parts) == 4)
    named = [folder for folder in found if PurePosixPath(folder).name == MODEL]
    if not found and any(PurePosixPath(name).parts[1:2] == EXPORTED for name in archive.namelist()):
        raise BackendError(
            f"'{path}' is what torch.export.save makes, a program that is not compiled: give torch.export.load of it "
            "to torch._inductor.aoti_compile_and_package"
        )
    if len(found) != 1 and len(named) != 1:
        raise BackendError(f"'{path}' holds {len(found)} models of AOTInductor ({', '.join(found)}), expected one")
    return named[0] if named else found[0]


def _check_machine(path: Path, metadata: dict[str, Any]) -> None:
    machine = metadata.get("AOTI_MACHINE", "")
    if machine and machine != platform.machine():
        raise BackendError(f"'{path}' was compiled for {machine}, this machine is {platform.machine()}")
    wanted = str(metadata.get("AOTI_CPU_ISA", "")).split() if metadata.get("AOTI_DEVICE_KEY") == "cpu" else []
    missing = [isa for isa in wanted if ISA_FLAGS.get(isa) and ISA_FLAGS[isa] not in _cpu_flags()]
    if missing and _cpu_flags():
        raise BackendError(
            f"'{path}' was compiled for a CPU with {', '.join(wanted)}; this one lacks {', '.join(missing)}: compile "
            "it on a machine like this one, or for shorter vectors (torch._inductor.config.cpp.simdlen = 256)"
        )


@cache
def _cpu_flags() -> frozenset[str]:
    """The CPU's features; empty if /proc/cpuinfo does not tell them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), frozenset())


def _obstacle(library: str, names: list[str], everything: list[str]) -> str:
    if library.removesuffix(".so") + ".json" in names:
        return "it calls operators that PyTorch has to look up (custom operators)"
    if any(PurePosixPath(name).suffix in (".blob", ".bin") for name in names) or any(
        PurePosixPath(name).parts[1:3] == ("data", "weights") for name in everything
    ):
        return "its weights lie beside its library"
    return ""


def _checks_in_parallel(source: str) -> bool:
    """Whether a kernel checks indices in a parallel region of OpenMP, which the error cannot leave."""
    kernels = (kernel.partition("#pragma omp parallel")[2] for kernel in source.split('extern "C"'))
    return any("TORCH_CHECK(" in parallel for parallel in kernels)


def _spec(source: str, name: str) -> Any:
    """A call specification: how nested arguments or results are laid out; None if the source has none."""
    begin = source.find(f'{name} = R"(')
    if begin < 0:
        return None
    begin += len(f'{name} = R"(')
    return json.loads(source[begin : source.index(')";', begin)])[1]


def _argument_names(spec: Any) -> Iterator[str]:
    if spec is None:
        return
    positional, named = spec["children_spec"]
    yield from (f"ARGS{place}" for place in _leaves(positional))
    yield from (f"KWARGS{place}" for place in _leaves(named))


def _leaves(spec: Any) -> Iterator[str]:
    """The place of each tensor below: "[0]", "[mask]", "[1][0]"; nothing for the tensor itself."""
    if spec is None:
        return
    kind = spec["type"]
    if kind is None:
        yield ""
        return
    children = spec["children_spec"]
    keys = json.loads(spec["context"]) if kind == "builtins.dict" else range(len(children))
    for key, child in zip(keys, children, strict=True):
        for place in _leaves(child):
            yield f"[{key}]{place}"
