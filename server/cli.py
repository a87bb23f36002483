"""The command `inferd`: runs a command line, and reports an error in a sentence.

The value of an option of `serve` comes from the command line, else from the environment (INFERD_GRPC_PORT), else from
the file that --config names, else it is the default. Options that tritonserver has, too, have its names: `--x=true` and
`--x true` both work. `inferd.server.foreign` accepts or refuses tritonserver's options that inferd does not have.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections.abc import Sequence

from inferd.server import manual
from inferd.server.errors import Misused
from inferd.server.program import program

MISSING = re.compile(r'^Command "([^"]+)" parameter (\S+) requires an argument\.')

USAGE_ERROR = 2
CANCELLED = 130


def as_inferd(command: Sequence[str]) -> list[str]:
    """The arguments of `inferd`, whose program may also be called `tritonserver`.

    Images have a link of that name, and a container whose entry point is `inferd serve` may get the name as its first
    argument: so the arguments of a runtime that was written for Triton's image work unchanged.
    """
    tokens = list(command[1:])
    if command[0].rpartition("/")[2] == "tritonserver":
        return ["serve", *tokens]
    if tokens[:2] == ["serve", "tritonserver"]:
        return ["serve", *tokens[2:]]
    return tokens


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0, 1 if it failed, 2 for a wrong command line, or 130 if it was interrupted."""
    _open_standard_files()
    try:
        status = run(as_inferd(sys.argv if arguments is None else ["inferd", *arguments]))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        text, status = "cancelled", CANCELLED
    except BrokenPipeError:  # as in `inferd ... | head`: the reader is gone, also when the interpreter ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        text, status = explained(error)
        if not text:
            raise
    for line in text.splitlines():
        print(f"inferd: {line}", file=sys.stderr)
    return status


def _open_standard_files() -> None:
    """Open /dev/null in place of standard files that are closed. Otherwise other files and sockets would get their
    numbers, and with these what is printed."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


def run(tokens: list[str]) -> int:
    """Execute a command line. Returns the exit status."""
    if page := manual.asked(tokens):
        print(page, end="")
        return 0
    if tokens == ["--version"]:
        from inferd.server.build import describe

        print(*describe(), sep="\n")
        return 0
    if tokens[0].startswith("-"):
        raise Misused(f"expected a command first, got {tokens[0]}: see inferd --help")
    if tokens[:1] == ["serve"]:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # from the first moment; `app` reopens the log file at it
        from inferd.server.spelling import translated, unknown_variables

        warnings = list(unknown_variables(os.environ))
        tokens = translated(tokens, warnings)
        for line in dict.fromkeys(warnings):
            print(f"inferd: warning: {line}", file=sys.stderr)
    if tokens[:1] == ["perf"]:
        from inferd.server.tools.perf import spelling

        tokens = spelling.translated(tokens)
    result = program()(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    return result if isinstance(result, int) else 0


def explained(error: Exception) -> tuple[str, int]:
    """The message of an error, and the exit status; an empty message for a fault of the program itself."""
    from cyclopts import CycloptsError, UnusedCliTokensError

    from inferd.server import build
    from inferd.server.addresses import SettingsError
    from inferd.server.errors import ServerError

    if isinstance(error, UnusedCliTokensError):
        tokens = " ".join(map(shlex.quote, error.unused_tokens or ()))
        return f"not expected: {tokens}; a value with spaces needs quotes, see --help", USAGE_ERROR
    if isinstance(error, (CycloptsError, SettingsError, Misused)):
        return "\n".join(MISSING.sub(_as_needed, line) for line in str(error).splitlines()), USAGE_ERROR
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}", 1
    return str(error) if isinstance(error, ServerError) else build.explained(error), 1


def _as_needed(found: re.Match[str]) -> str:
    return f"{found[1]}: {found[2]} is needed, with a value: see inferd {found[1]} --help"
