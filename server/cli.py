"""The command `inferd`: flags, environment and file → `Settings` → the server.

A value comes from the flag, else from the environment (INFERD_GRPC_PORT), else from the file that --config names,
else it is the default. Flags are tritonserver's where it has the option: `--x=true` and `--x true` both work, and its
options that mean nothing here are accepted or refused as `server.foreign` says.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, CycloptsError, Parameter
from cyclopts.argument import ArgumentCollection
from cyclopts.config import Env, Toml

from server.addresses import SettingsError
from server.errors import ConfigError, ServerError
from server.foreign import FOREIGN, Ignored, Refused
from server.manual import Manual
from server.settings import Settings

if TYPE_CHECKING:
    from server.engine.config import Options

TRUTH = {"true": "true", "1": "true", "false": "false", "0": "false"}
ALIASES = {"model-store": "model-repository"}
ANY_CASE = {"model-control-mode"}
"""Options whose values tritonserver takes in upper case, too."""
FLAGS = {field.name.replace("_", "-") for field in dataclasses.fields(Settings) if field.type == "bool"}

USAGE_ERROR = 2


class UsageError(Exception):
    """The command line asks for something that cannot be done; the text says what and why."""


# ---- tritonserver's spelling ----------------------------------------------------------------------------------------


def translated(tokens: Sequence[str], warn: list[str]) -> list[str]:
    """The tokens in our own spelling: aliases replaced, `--x true` joined, tritonserver's other options taken out.

    Lines about options that were ignored are appended to `warn`.

    Raises:
        UsageError: an option of tritonserver that is refused.
    """
    kept: list[str] = []
    rest = iter(range(len(tokens)))
    for i in rest:
        option, equals, value = tokens[i].partition("=")
        if not option.startswith("--"):
            kept.append(tokens[i])
            continue
        name = ALIASES.get(option[2:], option[2:])
        foreign = FOREIGN.get(name)
        if not equals and _takes_next(name, foreign, tokens[i + 1 : i + 2]):
            value, equals = tokens[next(rest)], "="
        if name in ANY_CASE:
            value = value.lower()
        if foreign is None:
            kept.append(f"--{name}{equals}{value}")
        else:
            _judge(name, foreign, value, warn)
    return kept


def _takes_next(name: str, foreign: Refused | Ignored | None, following: Sequence[str]) -> bool:
    """Whether the token after the option is its value to be joined; flags take only what reads as a truth value."""
    if not following:
        return False
    if foreign is None:
        return name in ANY_CASE or (name in FLAGS and following[0].lower() in TRUTH)
    return following[0].lower() in TRUTH if foreign.is_flag else not following[0].startswith("--")


def _judge(name: str, foreign: Refused | Ignored, value: str, warn: list[str]) -> None:
    said = TRUTH.get(value.lower(), value.lower()) if foreign.is_flag else value.lower()
    if foreign.is_flag and not said:
        said = "true"
    if isinstance(foreign, Ignored):
        if said not in foreign.silent:
            warn.append(f"--{name} is ignored: {foreign.reason}")
    elif said not in foreign.harmless:
        hint = f" (only {' or '.join(foreign.harmless)} is accepted)" if foreign.harmless else ""
        raise UsageError(f"--{name}: {foreign.reason}{hint}")


# ---- the commands ---------------------------------------------------------------------------------------------------


def from_file(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Fill what neither flags nor environment gave from the TOML file that --config names."""
    tokens = [token for argument in arguments if argument.name == "--config" for token in argument.tokens]
    if not tokens:
        return
    path = Path(tokens[0].value)
    if not path.is_file():
        raise UsageError(f"--config: there is no file {path}")
    Toml(path, use_commands_as_keys=False)(app, commands, arguments)


app = App(
    name="inferd",
    help="A gRPC inference server for Triton model repositories.",
    version=lambda: f"inferd {metadata.version('inferd')}",
    default_parameter=Parameter(negative=()),
    config=[Env("INFERD_", command=False), from_file],
    help_formatter=Manual(),
)


@app.command
def serve(
    *,
    settings: Annotated[Settings, Parameter(name="*")],
    config: Annotated[Path | None, Parameter(help="TOML file with options, for example grpc-port = 8001.")] = None,  # noqa: ARG001
) -> int:
    """Serve the models of a repository until told to stop.

    Each option is also an environment variable, INFERD_GRPC_PORT for --grpc-port, and a key of the file that --config
    names. What several of them do together is in docs/operations.md.
    """
    from server.app import run  # the server is imported only where it is run

    return run(settings)


@app.command(usage="inferd check REPOSITORY... [OPTIONS]")
def check(
    *repository: Annotated[Path, Parameter(help="Folders of model folders.")],
    model_config_name: str = "",
    disable_auto_complete_config: bool = False,
) -> int:
    """Check the configuration of every model of a repository without serving it.

    Frameworks are loaded only for models whose configuration must be completed from their files.

    Args:
        model_config_name: Prefer configs/NAME.pbtxt of a model folder to its config.pbtxt.
        disable_auto_complete_config: Take config.pbtxt as it is.
    """
    from backends.loader import BackendLoader
    from server.engine.config import Options
    from server.engine.gpu import Gpus

    if not repository:
        raise UsageError("check: give the folder of a model repository")
    gpus = Gpus().count
    options = Options(auto_complete=not disable_auto_complete_config, config_name=model_config_name, gpus=gpus)
    failures = 0
    for name, problem in _problems(repository, options, BackendLoader()):
        print(f"{name}: ok" if problem is None else problem)
        failures += problem is not None
    return 1 if failures else 0


@app.command(name="build-engine")
def build_engine(
    model: Annotated[Path, Parameter(help="An ONNX file.")],
    *,
    output: Annotated[Path | None, Parameter(name=("--output", "-o"))] = None,
    profile: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    max_batch_size: int = 0,
    precision: Annotated[tuple[str, ...], Parameter(negative=())] = (),
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

    What was built before comes from the cache, and what was measured for it is used again.

    Args:
        output: Where the plan goes; model.plan beside the model, unless said otherwise.
        profile: "INPUT=LEAST,BEST,GREATEST ..." for each input whose shape varies, such as "x=1x16,8x16,64x16 s=1,2,8";
            once for each optimisation profile. Of a shape tensor the values.
        max_batch_size: In place of a profile, where nothing but the first dimension varies.
        precision: fp16, bf16, fp8 or int8: kernels may have it, too. TensorRT 11 takes precisions from the model.
        strongly_typed: Every tensor keeps the type that the model gives it.
        version_compatible: Later versions of TensorRT run it, too.
        exclude_lean_runtime: A version-compatible plan does not bring the runtime for it: tensorrt_lean runs it.
        hardware_compatible: GPUs from Ampere on run it, too, some slower than a plan of their own.
        weight_streaming: Weights need not all be on the device.
        optimization_level: 0, the quickest to build, to 5.
        workspace_byte_size: Memory of the device for one kernel, at most.
        gpu: The number of the GPU.
        compute_capability: With tensorrt_rtx, of the GPU that the plan is for, such as 8.6: none is needed then.
        runtime: tensorrt or tensorrt_rtx; auto takes what is installed.
        cache: Folder of what was built; ~/.cache/inferd/tensorrt unless said otherwise.
        cuda_driver: The driver's library, where it is not libcuda.so.1.
    """
    import shutil

    from backends.api import BackendError, EngineSpec
    from backends.loader import BackendLoader
    from server.engine.gpu import GpuPolicy, Gpus

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    _ = Gpus(GpuPolicy(library=cuda_driver) if cuda_driver else None).count  # the driver is asked before TensorRT is
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
        copy.replace(target)  # nobody sees a part of it
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


def _problems(repository: Sequence[Path], options: Options, loader: Any) -> Iterator[tuple[str, str | None]]:
    """For each model its name and what is wrong with it, if anything."""
    from backends.api import BackendError
    from server.engine import config
    from server.engine.repository import scan

    prepared: dict[str, config.Prepared | None] = {}
    found: dict[str, str | None] = {}
    for folder in scan(repository):
        prepared[folder.name] = None
        if folder.problem:
            found[folder.name] = f"{folder.path}: {folder.problem}"
            continue
        try:
            prepared[folder.name] = config.prepare(folder, options, loader)
        except ConfigError as error:
            found[folder.name] = str(error)
        except BackendError as error:
            found[folder.name] = f"{folder.path}: {error}"
    for name, composed in config.compose(prepared).items():
        found[name] = str(composed) if isinstance(composed, ConfigError) else None
    yield from sorted(found.items())


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status of the command: 0, 1 when it failed, 2 when it was asked wrongly."""
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    warnings: list[str] = []
    try:
        if tokens[:1] == ["serve"]:
            tokens = translated(tokens, warnings)
        for line in warnings:
            print(f"inferd: warning: {line}", file=sys.stderr)
        result = app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    except (UsageError, CycloptsError, SettingsError) as error:
        print(f"inferd: {error}", file=sys.stderr)
        return USAGE_ERROR
    except ServerError as error:
        print(f"inferd: {error}", file=sys.stderr)
        return 1
    return result if isinstance(result, int) else 0
