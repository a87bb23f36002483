"""The commands that use the server's own code, on this machine: `serve`, `check`, `check-backend`, `config show`,
`build-engine`.

Each command imports the server and the frameworks when it runs.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import MissingArgumentError, Parameter

from inferd.server.errors import Misused
from inferd.server.settings import Settings

Several = Annotated[tuple[str, ...], Parameter(negative=())]


def serve(
    *,
    config: Annotated[Path | None, Parameter(help="TOML file with options, for example grpc-port = 8001.")] = None,  # noqa: ARG001
    settings: Annotated[Settings, Parameter(name="*")],
) -> int:
    """Serve the models of a repository until told to stop.

    Each option is also an environment variable, INFERD_GRPC_PORT for --grpc-port, and a key of the file that --config
    names. docs/operations.md tells how options work together.
    """
    from inferd.server.app import run  # the server is imported only where it is run

    return run(settings)


def check(
    *repository: Annotated[str, Parameter(help="Folders of model folders, or one model.")],
    load: bool = False,
    model_config_name: str = "",
    disable_auto_complete_config: bool = False,
    backend_directory: Path | None = None,
    backend_config: Several = (),
    format: Literal["text", "json", "github"] = "text",  # noqa: A002 - the option's name
) -> int:
    """Report problems that keep models of a repository from being served, and configuration that is ignored.

    Configurations are completed and model files read as at the server's start, on the CPU if there is no GPU. No model
    is executed, but the auto_complete_config of a model.py is.

    Args:
        load: Also make the instances and warm them up, all models at the same time, as the server does.
        model_config_name: Prefer configs/NAME.pbtxt of a model folder to its config.pbtxt.
        disable_auto_complete_config: Take config.pbtxt as it is.
        backend_directory: Folder with further backends.
        backend_config: BACKEND,KEY=VALUE for one backend or KEY=VALUE for all; may be given several times.
        format: Format of the output; github makes remarks at the lines of a pull request.
    """
    from inferd.server.checking import run_check  # frameworks are imported only where models are looked at

    if not repository:
        raise Misused("check: give the folder of a model repository")
    settings = Settings(
        model_repository=repository,
        model_config_name=model_config_name,
        disable_auto_complete_config=disable_auto_complete_config,
        backend_directory=backend_directory,
        backend_config=backend_config,
    )
    return run_check(settings, load=load, form=format)


def check_backend(
    *repository: Annotated[str, Parameter(help="Folders of model folders, or one model.")],
    backend_directory: Path | None = None,
    backend_config: Several = (),
) -> int:
    """Load the models of a repository and check their backend against its contract; for authors of backends.

    Each model gets requests with made-up numbers, first one at a time, then many at once.
    Decoupled models and models of sequences are only loaded.

    Args:
        backend_directory: Folder with further backends.
        backend_config: BACKEND,KEY=VALUE for one backend or KEY=VALUE for all; may be given several times.
    """
    from inferd.server.contract import run_check_backend  # as above

    if not repository:
        raise Misused("check-backend: give the folder of a repository with a model of the backend")
    return run_check_backend(
        Settings(model_repository=repository, backend_directory=backend_directory, backend_config=backend_config)
    )


def init_backend(name: str, /, *, folder: Path = Path()) -> int:
    """Write a backend to begin with, and a model of it.

    Args:
        name: Of the backend: lower-case letters, digits and _.
        folder: Gets the folders `backends` and `models`.
    """
    from inferd.server.beginning import make_backend

    return make_backend(name, folder)


def show_config(
    *tokens: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    format: Literal["table", "json"] = "table",  # noqa: A002 - the option's name
) -> int:
    """Show each option of `inferd serve`, its value, and the origin of the value.

    Give it the arguments of `inferd serve`; other options come from the environment and from the file that --config
    names.

    Args:
        format: Format of the output.
    """
    from inferd.server.program import program
    from inferd.server.settings.shown import show_options
    from inferd.server.spelling import translated

    warnings: list[str] = []
    given = translated(["serve", *tokens], warnings)
    missing = {}
    try:
        _, bound, _ = program().parse_args(given, exit_on_error=False, print_error=False)
    except MissingArgumentError:
        missing = {"model_repository": "nowhere: serve needs it"}
        complete = [*given, "--model-repository=(none)"]
        _, bound, _ = program().parse_args(complete, exit_on_error=False, print_error=False)
    origins = _origins(given) | missing
    show_options(bound.arguments["settings"], origins, as_json=format == "json")
    return 0


def _origins(tokens: Sequence[str]) -> dict[str, str]:
    """The origin of each value that is not the default, by field of Settings."""
    names = [field.name for field in dataclasses.fields(Settings)]
    flags = {token.partition("=")[0].removeprefix("--").replace("-", "_") for token in tokens if token.startswith("--")}
    given = [token.partition("=")[2] for token in tokens if token.startswith("--config=")]
    given += [tokens[i + 1] for i, token in enumerate(tokens[:-1]) if token == "--config"]
    path = (given or [os.environ.get("INFERD_CONFIG", "")])[-1]
    written = {key.replace("-", "_") for key in tomllib.loads(Path(path).read_text())} if path else set()
    found = {name: f"the file {path}" for name in names if name in written}
    found |= {name: f"INFERD_{name.upper()}" for name in names if f"INFERD_{name.upper()}" in os.environ}
    return found | {name: "the command line" for name in names if name in flags}


def build_engine(
    model: Annotated[Path, Parameter(help="An ONNX file.")],
    *,
    output: Annotated[Path | None, Parameter(name=("--output", "-o"))] = None,
    profile: Several = (),
    max_batch_size: int = 0,
    precision: Several = (),
    strongly_typed: bool = False,
    version_compatible: bool = False,
    exclude_lean_runtime: bool = False,
    hardware_compatible: bool = False,
    weight_streaming: bool = False,
    optimization_level: int | None = None,
    workspace_byte_size: int = 0,
    gpu: int = 0,
    compute_capability: str = "",
    runtime: str = "auto",
    cache: Path | None = None,
    cuda_driver: str = "",
) -> int:
    """Build a plan of TensorRT from an ONNX model, for the GPU of this machine.

    A plan that was built before comes from the cache; other builds use the cache's measurements.

    Args:
        output: The plan's file; by default model.plan beside the model.
        profile: "INPUT=LEAST,BEST,GREATEST ..." with each input whose shape varies, such as
            "x=1x16,8x16,64x16 s=1,2,8"; once for each optimisation profile. Of a shape tensor, give the values.
        max_batch_size: The largest batch, in place of a profile, if only the first dimension varies.
        precision: fp16, bf16, fp8 or int8: kernels may use it, too. TensorRT 11 takes precisions from the model.
        strongly_typed: Every tensor keeps the type that the model gives it.
        version_compatible: Later versions of TensorRT can run the plan, too.
        exclude_lean_runtime: Leave the runtime out of a version-compatible plan: tensorrt_lean runs it.
        hardware_compatible: All GPUs from Ampere on can run the plan, some of them slower than a plan of their own.
        weight_streaming: Weights need not all be on the device.
        optimization_level: 0, the quickest to build, to 5.
        workspace_byte_size: Memory of the device for one kernel, at most.
        gpu: The number of the GPU.
        compute_capability: With tensorrt_rtx, of the target GPU, such as 8.6; the build needs no GPU then.
        runtime: tensorrt or tensorrt_rtx; auto: the installed one.
        cache: Folder of built plans; by default ~/.cache/inferd/tensorrt.
        cuda_driver: The driver's library, if it is not libcuda.so.1.
    """
    import logging
    import shutil

    from inferd.backends.api import BackendError, EngineSpec
    from inferd.backends.loader import BackendLoader
    from inferd.server.engine.instances.gpu import GpuPolicy, Gpus

    if not model.is_file():
        raise Misused(f"build-engine: there is no file {model}")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    _ = Gpus(GpuPolicy(library=cuda_driver) if cuda_driver else None).count  # loads the driver before TensorRT does
    spec = EngineSpec(
        model=model,
        profiles=profile,
        max_batch_size=max_batch_size,
        precisions=precision,
        strongly_typed=strongly_typed,
        version_compatible=version_compatible,
        lean_runtime=not exclude_lean_runtime,
        hardware_compatible=hardware_compatible,
        weight_streaming=weight_streaming,
        optimization_level=optimization_level,
        workspace=workspace_byte_size,
        device=gpu,
        compute_capability=compute_capability,
        runtime=runtime,
        cache=cache,
    )
    try:
        built = BackendLoader().backend("tensorrt").build(spec, _show_progress)
        target = output or model.with_name("model.plan")
        copy = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.copyfile(built, copy)
        copy.replace(target)  # readers see the whole file or none
    except (BackendError, OSError) as error:
        print(f"inferd: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("inferd: cancelled", file=sys.stderr)
        return 130
    return 0


def _show_progress(what: str, percent: int) -> None:
    """One line that changes on a terminal, a line for each step elsewhere."""
    if sys.stderr.isatty():
        print(f"\r{percent:3} % {what:60.60}", end="\n" if percent == 100 else "", file=sys.stderr, flush=True)
    else:
        print(f"{percent:3} % {what}", file=sys.stderr, flush=True)
