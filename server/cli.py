"""The command `inferd`: flags, environment and file → `Settings` → the server.

A value comes from the flag, else from the environment (INFERD_GRPC_PORT), else from the file that --config names,
else it is the default. Flags are tritonserver's where it has the option: `--x=true` and `--x true` both work, and its
options that mean nothing here are accepted or refused as `server.foreign` says.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Parameter
from cyclopts.argument import ArgumentCollection
from cyclopts.config import Env, Toml

from server import commands
from server.addresses import SettingsError
from server.build import OF_IMPORTS, describe, explained
from server.commands import Several, metadata
from server.errors import Misused, ServerError
from server.foreign import FOREIGN, Foreign, Refused, Replaced
from server.manual import Manual
from server.settings import Settings

TRUTH = {"true": "true", "1": "true", "false": "false", "0": "false"}
ALIASES = {"model-store": "model-repository"}
ANY_CASE = {"model-control-mode"}
"""Options whose values tritonserver takes in upper case, too."""
FLAGS = {field.name.replace("_", "-") for field in dataclasses.fields(Settings) if field.type == "bool"}
VALUED = {"config"} | {field.name.replace("_", "-") for field in dataclasses.fields(Settings) if field.type != "bool"}
REPOSITORY = "model-repository"
"""What an argument of `serve` without option is."""
MISSING = re.compile(r'^Command "(\S+)" parameter (\S+) requires an argument\.')
OTHER_VARIABLES = ("INFERD_CONFIG", "INFERD_DEBUG_COUNTERS", "INFERD_CACHE")
OF_KUBERNETES = re.compile(r"INFERD_(SERVICE|PORT)(_|$)")

USAGE_ERROR = 2
CANCELLED = 130


class UsageError(Exception):
    """The command line asks for something that cannot be done; the text says what and why."""


# ---- tritonserver's spelling ----------------------------------------------------------------------------------------


def translated(tokens: Sequence[str], warn: list[str]) -> list[str]:
    """The tokens in our own spelling: aliases replaced, `--x true` joined, tritonserver's other options taken out.

    The first is the command; what else is no option, nor the value of one, is a model repository.

    Lines about options that were ignored or replaced are appended to `warn`.

    Raises:
        UsageError: options that are refused or lack their value; all are told.
    """
    kept: list[str] = []
    wrong: list[str] = []
    rest = iter(range(len(tokens)))
    for i in rest:
        option, equals, value = tokens[i].partition("=")
        if not option.startswith("--"):
            kept.append(tokens[i] if option.startswith("-") or i == 0 else f"--{REPOSITORY}={tokens[i]}")
            continue
        name = ALIASES.get(option[2:], option[2:])
        foreign = FOREIGN.get(name)
        if not equals and _takes_next(name, foreign, tokens[i + 1 : i + 2]):
            value, equals = tokens[next(rest)], "="
        if name in ANY_CASE:
            value = value.lower()
        if name in FLAGS and equals and value.lower() not in TRUTH:
            wrong.append(f"--{name}: expected true or false, got {value!r}")
        elif name in VALUED and not equals and (i + 1 == len(tokens) or tokens[i + 1].startswith("--")):
            wrong.append(f"--{name}: it needs a value")
        elif foreign is None:
            kept.append(f"--{name}{equals}{value}")
            if name in VALUED and not equals:
                kept.append(tokens[next(rest)])
        else:
            try:
                kept += _judge(name, foreign, value, warn)
            except UsageError as error:
                wrong.append(str(error))
    if wrong:
        raise UsageError("\n".join(wrong))
    return kept


def _takes_next(name: str, foreign: Foreign | None, following: Sequence[str]) -> bool:
    """Whether the token after the option is its value to be joined."""
    if not following:
        return False
    if foreign is None:
        return name in ANY_CASE or (name in FLAGS and not following[0].startswith("-"))
    return following[0].lower() in TRUTH if foreign.is_flag else not following[0].startswith("--")


def _judge(name: str, foreign: Foreign, value: str, warn: list[str]) -> list[str]:
    """What is written in the place of one of tritonserver's options."""
    said = TRUTH.get(value.lower(), value.lower()) if foreign.is_flag else value.lower()
    if foreign.is_flag and not said:
        said = "true"
    if isinstance(foreign, Refused):
        if said not in foreign.harmless:
            hint = f" (only {' or '.join(foreign.harmless)} is accepted)" if foreign.harmless else ""
            raise UsageError(f"--{name}: {foreign.reason}{hint}")
    elif said not in foreign.silent:
        if isinstance(foreign, Replaced):
            instead = f"--{foreign.option}={foreign.value.format(said)}"
            warn.append(f"--{name} is deprecated: it is taken for {instead}")
            return [instead]
        warn.append(f"--{name} is ignored: {foreign.reason}")
    return []


def unknown_variables(environment: Iterable[str]) -> Iterator[str]:
    """A line for each INFERD_ variable that is no option; Kubernetes makes some for a Service of the name."""
    known = {*(f"INFERD_{field.name.upper()}" for field in dataclasses.fields(Settings)), *OTHER_VARIABLES}
    for name in sorted(environment):
        if name.startswith("INFERD_") and name not in known and not OF_KUBERNETES.match(name):
            near = difflib.get_close_matches(name, known, n=1)
            yield f"{name} is ignored: there is no such option{f', did you mean {near[0]}?' if near else ''}"


# ---- the commands ---------------------------------------------------------------------------------------------------


def from_file(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Fill what neither flags nor environment gave from the TOML file that --config names."""
    tokens = [token for argument in arguments if argument.name == "--config" for token in argument.tokens]
    if not tokens:
        return
    path = Path(tokens[0].value)
    if not path.is_file():
        raise UsageError(f"--config: there is no file {path}")
    try:
        Toml(path, use_commands_as_keys=False)(app, commands, arguments)
    except (tomllib.TOMLDecodeError, CycloptsError) as error:
        raise UsageError(f"--config: {path}: {error}") from None


app = App(
    name="inferd",
    help="A gRPC inference server for Triton model repositories.",
    version=lambda: "\n".join(describe()),
    default_parameter=Parameter(negative=()),
    config=[Env("INFERD_", command=False), from_file],
    help_formatter=Manual(),
    suppress_keyboard_interrupt=False,  # see main
)


@app.command(usage="inferd serve [REPOSITORY...] [OPTIONS]")
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
    *repository: Annotated[str, Parameter(help="Folders of model folders, or one model.")],
    load: bool = False,
    model_config_name: str = "",
    disable_auto_complete_config: bool = False,
    backend_directory: Path | None = None,
    backend_config: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    format: Literal["text", "json", "github"] = "text",  # noqa: A002 - the option's name
) -> int:
    """Tell what would keep each model of a repository from being served, and what of its configuration is ignored.

    Configurations are completed and model files read as they are when the server starts, on the CPU where there is no
    GPU. No model is executed; but a model.py that has auto_complete_config is asked to complete its configuration.

    Args:
        load: Make the instances, too, and warm them up, all models at a time, as the server does.
        model_config_name: Prefer configs/NAME.pbtxt of a model folder to its config.pbtxt.
        disable_auto_complete_config: Take config.pbtxt as it is.
        backend_directory: Folder with further backends.
        backend_config: BACKEND,KEY=VALUE for one backend or KEY=VALUE for all; may be given several times.
        format: Of what is printed; github makes remarks at the lines of a pull request.
    """
    from server.checking import run_check  # frameworks are imported only where models are looked at

    if not repository:
        raise UsageError("check: give the folder of a model repository")
    settings = Settings(
        model_repository=repository,
        model_config_name=model_config_name,
        disable_auto_complete_config=disable_auto_complete_config,
        backend_directory=backend_directory,
        backend_config=backend_config,
    )
    return run_check(settings, load=load, form=format)


@app.command(name="check-backend", usage="inferd check-backend REPOSITORY... [OPTIONS]")
def check_backend(
    *repository: Annotated[str, Parameter(help="Folders of model folders, or one model.")],
    backend_directory: Path | None = None,
    backend_config: Annotated[tuple[str, ...], Parameter(negative=())] = (),
) -> int:
    """Load the models of a repository and tell whether their backend keeps to its contract; for who writes one.

    Each model is asked with numbers made up from its configuration, first one request at a time, then many at once.
    Models of sequences and decoupled ones are loaded and not asked.

    Args:
        backend_directory: Folder with further backends.
        backend_config: BACKEND,KEY=VALUE for one backend or KEY=VALUE for all; may be given several times.
    """
    from server.contract import run_check_backend  # as above

    if not repository:
        raise UsageError("check-backend: give the folder of a repository with a model of the backend")
    return run_check_backend(
        Settings(model_repository=repository, backend_directory=backend_directory, backend_config=backend_config)
    )


@app.command
def health(
    *,
    url: Annotated[str, Parameter(name=("--url", "-u"))] = "127.0.0.1:8001",
    service: str = "",
    timeout: float = 2.0,
    root_cert: Path | None = None,
    header: Several = (),
) -> int:
    """Ask a server whether it serves: status 0 when it does, 1 and the reason otherwise.

    Args:
        url: HOST:PORT, or unix:PATH.
        service: A model, or MODEL/VERSION; the server itself unless said otherwise.
        timeout: Seconds to wait for the answer.
        root_cert: PEM file to check the server's certificate against; without it the connection is plain text.
        header: KEY=VALUE, such as what a restricted protocol asks for; may be given several times.
    """
    from server.tools.health import HealthCheck, ask

    ask(HealthCheck(url, service, timeout, root_cert, metadata(header)))
    print(f"{url}: {service or 'the server'} is SERVING")
    return 0


@app.command
def top(
    url: Annotated[
        str, Parameter(help="Where metrics are served, or grpc://HOST:PORT of a v2 server.")
    ] = "http://localhost:8002/metrics",
    *,
    interval: float = 1.0,
    once: bool = False,
    format: Literal["table", "json"] = "table",  # noqa: A002 - the option's name
    root_cert: Path | None = None,
    header: Several = (),
) -> int:
    """Show what a server does: requests, times, batches and instances of each model.

    It reads the metrics of this server or of tritonserver, or asks any v2 server by gRPC for its statistics. What those
    do not tell is shown as -.

    Args:
        interval: Seconds between two looks.
        once: Print what was done in one interval, and end.
        format: Of what --once prints; json implies it.
        root_cert: PEM file to check a v2 server's certificate against; without it the connection is plain text.
        header: KEY=VALUE for a v2 server, such as authorization; may be given several times.
    """
    from server.tools.looking import target_of
    from server.tools.top import once as print_once
    from server.tools.top import watch

    if interval <= 0:
        raise UsageError("--interval: expected more than 0 seconds")
    try:
        target = target_of(url, root_cert, metadata(header))
    except (OSError, ValueError) as error:
        raise UsageError(f"top: {url}: {error}") from None
    return print_once(target, interval, format) if once or format == "json" else watch(target, interval)


configuration = App(name="config", help="The options of the server.")
app.command(configuration)


@configuration.command(name="show", usage="inferd config show [OPTIONS OF serve]")
def show_config(
    *tokens: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    format: Literal["table", "json"] = "table",  # noqa: A002 - the option's name
) -> int:
    """Tell each option of `inferd serve`, what it would be, and where that is from.

    Give it what you give to `inferd serve`; of what is not given, the environment and the file that --config names are
    asked.

    Args:
        format: Of what is printed.
    """
    from server.settings.shown import show_options

    warnings: list[str] = []
    given = translated(["serve", *tokens], warnings)
    _, bound, _ = app.parse_args(given, exit_on_error=False, print_error=False)
    show_options(bound.arguments["settings"], _origins(given), as_json=format == "json")
    return 0


def _origins(tokens: Sequence[str]) -> dict[str, str]:
    """By the names of fields of Settings: where each value is from, if it is not the default."""
    names = [field.name for field in dataclasses.fields(Settings)]
    flags = {token.partition("=")[0].removeprefix("--").replace("-", "_") for token in tokens if token.startswith("--")}
    given = [token.partition("=")[2] for token in tokens if token.startswith("--config=")]
    given += [tokens[i + 1] for i, token in enumerate(tokens[:-1]) if token == "--config"]
    path = (given or [os.environ.get("INFERD_CONFIG", "")])[-1]
    written = {key.replace("-", "_") for key in tomllib.loads(Path(path).read_text())} if path else set()
    found = {name: f"the file {path}" for name in names if name in written}
    found |= {name: f"INFERD_{name.upper()}" for name in names if f"INFERD_{name.upper()}" in os.environ}
    return found | {name: "the command line" for name in names if name in flags}


@app.command
def completion(shell: Literal["bash", "zsh", "fish"], /) -> int:
    """Print what a shell needs to complete commands and options: `source <(inferd completion bash)`.

    Args:
        shell: Which one.
    """
    print(app.generate_completion(shell=shell))
    return 0


commands.register(app)


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


def _as_needed(found: re.Match[str]) -> str:
    return f"{found[1]}: {found[2]} is needed, with a value."


def as_inferd(command: Sequence[str]) -> list[str]:
    """The arguments of `inferd` for a command that may be called `tritonserver`.

    Images have a link of that name, and a container whose entry point is `inferd serve` may get it as the first
    argument: so the arguments of a runtime that was written for Triton's image work unchanged.
    """
    program, *tokens = command
    if Path(program).name == "tritonserver":
        return ["serve", *tokens]
    if tokens[:2] == ["serve", "tritonserver"]:
        return ["serve", *tokens[2:]]
    return tokens


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status of the command: 0, 1 when it failed, 2 when it was asked wrongly."""
    tokens = as_inferd(sys.argv if arguments is None else ["inferd", *arguments])
    warnings: list[str] = []
    try:
        if tokens[:1] == ["serve"]:
            warnings += unknown_variables(os.environ)
            tokens = translated(tokens, warnings)
        for line in dict.fromkeys(warnings):
            print(f"inferd: warning: {line}", file=sys.stderr)
        if tokens == ["--version"]:
            print(*describe(), sep="\n")  # as it is: an App would wrap the lines
            return 0
        result = app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    except (UsageError, CycloptsError, SettingsError, Misused) as error:
        for line in str(error).splitlines():
            print(f"inferd: {MISSING.sub(_as_needed, line)}", file=sys.stderr)
        return USAGE_ERROR
    except ServerError as error:
        print(f"inferd: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("inferd: cancelled", file=sys.stderr)
        return CANCELLED
    except OF_IMPORTS as error:
        if not (text := explained(error)):
            raise
        print(f"inferd: {text}", file=sys.stderr)
        return 1
    return result if isinstance(result, int) else 0
