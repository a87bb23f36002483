"""The program `inferd`: its commands by name, and their modules.

Commands, and cyclopts, which parses their options, are imported at their use: the program prints its commands at once,
and a container's `inferd health` does not pay for the server's options.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from cyclopts import App
    from cyclopts.argument import ArgumentCollection

MEANING = "A gRPC inference server for Triton model repositories, and the tools around it."


class Command(NamedTuple):
    """A command.

    Attributes:
        place: MODULE:FUNCTION; the function's arguments are the options, its docstring the help.
        summary: the first sentences of the help.
        usage: the text after the command's name, if the arguments do not determine it.
    """

    place: str
    summary: str
    usage: str = ""


SERVING, ASKING = "inferd.server.commands.serving", "inferd.server.commands.asking"
MODELS, MEASURING = "inferd.server.commands.models", "inferd.server.commands.measuring"

GROUPS: dict[tuple[str, ...], str] = {
    ("models",): "The models of a server, and new ones.",
    ("backends",): "Backends of your own.",
    ("config",): "The options of the server.",
}
"""Groups of commands: the part that their names begin with, and the meaning of the group."""

COMMANDS: dict[tuple[str, ...], Command] = {
    ("serve",): Command(
        f"{SERVING}:serve", "Serve the models of a repository until told to stop.", "[REPOSITORY...] [OPTIONS]"
    ),
    ("check",): Command(
        f"{SERVING}:check",
        "Report problems that keep models of a repository from being served, and configuration that is ignored.",
        "REPOSITORY... [OPTIONS]",
    ),
    ("health",): Command(
        f"{ASKING}:health", "Ask a server whether it serves: status 0 when it does, 1 and the reason otherwise."
    ),
    ("infer",): Command(f"{ASKING}:infer", "Ask a model of a server and print its response."),
    ("models", "ls"): Command(f"{MODELS}:ls", "List the repository's models and their states."),
    ("models", "load"): Command(
        f"{MODELS}:load", "Load or reload models, on a server with --model-control-mode=explicit."
    ),
    ("models", "unload"): Command(f"{MODELS}:unload", "Unload models, on a server with --model-control-mode=explicit."),
    ("models", "describe"): Command(f"{MODELS}:describe", "Show a model's inputs and outputs."),
    ("models", "stats"): Command(f"{MODELS}:stats", "Show the statistics of models since they were loaded."),
    ("models", "init"): Command(
        f"{MODELS}:init",
        "Make a model of a repository from a model file: its folder, and a config.pbtxt with remarks.",
    ),
    ("top",): Command(
        f"{ASKING}:top", "Show what a server does: requests, times, batches and instances of each model."
    ),
    ("perf",): Command(
        f"{MEASURING}:perf",
        "Put a model under load: requests per second, latencies, and where the server spends the time.",
    ),
    ("plot",): Command(
        f"{MEASURING}:plot",
        "Draw results that `inferd perf --out run.json` has written; several runs beside each other.",
    ),
    ("tune",): Command(
        f"{MEASURING}:tune",
        "Find the batch size, instances, queue delay and threads with which models give the most throughput.",
    ),
    ("config", "show"): Command(
        f"{SERVING}:show_config",
        "Show each option of `inferd serve`, its value, and the origin of the value.",
        "[OPTIONS OF serve]",
    ),
    ("backends", "init"): Command(f"{SERVING}:init_backend", "Write a backend to begin with, and a model of it."),
    ("check-backend",): Command(
        f"{SERVING}:check_backend",
        "Load the models of a repository and check their backend against its contract; for authors of backends.",
        "REPOSITORY... [OPTIONS]",
    ),
    ("build-engine",): Command(
        f"{SERVING}:build_engine", "Build a plan of TensorRT from an ONNX model, for the GPU of this machine."
    ),
    ("completion",): Command(
        "inferd.server.program:completion",
        "Print what a shell needs to complete commands and options: `source <(inferd completion bash)`.",
    ),
}


def named(tokens: list[str]) -> tuple[str, ...]:
    """The command or group that the tokens begin with; () for the program itself."""
    chain = tuple(tokens[:2])
    while chain and chain not in COMMANDS and chain not in GROUPS:
        chain = chain[:-1]
    return chain


@cache
def program() -> App:
    """The commands for cyclopts."""
    from cyclopts import App, Parameter
    from cyclopts.config import Env

    root = App(
        name="inferd",
        help=MEANING,
        default_parameter=Parameter(negative=()),
        config=[Env("INFERD_", command=False), from_file],
        suppress_keyboard_interrupt=False,  # the caller handles it
    )
    groups: dict[tuple[str, ...], App] = {(): root}
    for chain, meaning in GROUPS.items():
        groups[chain] = App(name=chain[-1], help=meaning)
        root.command(groups[chain])
    for chain, command in COMMANDS.items():
        groups[chain[:-1]].command(command.place, name=chain[-1])
    return root


def from_file(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Fill in options from the TOML file that --config names, if neither flags nor environment give them.

    Raises:
        Misused: the file cannot be read, or has an unknown option.
    """
    tokens = [token for argument in arguments if argument.name == "--config" for token in argument.tokens]
    if not tokens:
        return
    import tomllib
    from pathlib import Path

    from cyclopts import CycloptsError
    from cyclopts.config import Toml

    from inferd.server.errors import Misused

    path = Path(tokens[0].value)
    if not path.is_file():
        raise Misused(f"--config: there is no file {path}")
    try:
        Toml(path, use_commands_as_keys=False)(app, commands, arguments)
    except (tomllib.TOMLDecodeError, CycloptsError) as error:
        raise Misused(f"--config: {path}: {error}") from None


def completion(shell: Literal["bash", "zsh", "fish"], /) -> int:
    """Print what a shell needs to complete commands and options: `source <(inferd completion bash)`.

    Args:
        shell: Which one.
    """
    print(program().generate_completion(shell=shell))
    if shell == "zsh":  # the printed text only defines a function
        print('if [[ $funcstack[1] == _inferd ]]; then _cyclopts_inferd "$@"; else compdef _cyclopts_inferd inferd; fi')
    return 0
