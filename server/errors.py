"""Families of errors, by the side at fault, and the one mapping from them to gRPC status codes.

Texts of errors that Triton also has are Triton's, followed by what was expected and what came.
"""

from __future__ import annotations

import enum
import errno
import resource
from typing import ClassVar


class Status(enum.IntEnum):
    """gRPC status codes (https://grpc.io/docs/guides/status-codes/)."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class StartError(Exception):
    """The server cannot start; the text has the reason."""


class ServerError(Exception):
    """An error that the server sends to a client with a status. Raise one of the families below."""

    status: ClassVar[Status] = Status.INTERNAL
    refusal: int = 0
    """A number in the table of refusals (`_native/refusal.pyx`); 0 for the status' usual one."""

    counted: ClassVar[bool] = False
    """Whether the refusal has been counted where the error comes from."""


class InvalidArgument(ServerError):
    """The request or the configuration is wrong; sending it again will not help."""

    status = Status.INVALID_ARGUMENT


class Misused(InvalidArgument):
    """A command line with a wrong argument."""


class NotFound(ServerError):
    """The request names something that does not exist here."""

    status = Status.NOT_FOUND


class AlreadyExists(ServerError):
    """The request would make something that exists."""

    status = Status.ALREADY_EXISTS


class Exhausted(ServerError):
    """A limit is reached, or the system has no more of a resource."""

    status = Status.RESOURCE_EXHAUSTED


class Unavailable(ServerError):
    """Not now: loading, queue full, draining. Safe to retry."""

    status = Status.UNAVAILABLE


class Unimplemented(ServerError):
    """A feature that is off or not built."""

    status = Status.UNIMPLEMENTED


class Internal(ServerError):
    """The fault of the server or of a model."""

    status = Status.INTERNAL


class Denied(ServerError):
    """The caller has no right to do this. The status is UNAUTHENTICATED, PERMISSION_DENIED, or Triton's."""

    status: Status  # type: ignore[misc]  # of the instance here, of the class in the other families

    def __init__(self, status: Status, details: str, refusal: int = 0) -> None:
        super().__init__(details)
        self.status = status
        self.refusal = refusal


class ConfigError(InvalidArgument):
    """A model configuration that cannot be served; the text carries file, line and what to write instead."""


LACKS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN))
"""The system's errors for an exhausted resource, which are no fault of a file."""


def system_says(error: OSError) -> str:
    """The text of an error of the system, with advice if the process has reached its limit of open files."""
    text = error.strerror or str(error)
    return f"{text}: {_advice(error.errno)}" if error.errno == errno.EMFILE else text


def lack_of(error: BaseException) -> str:
    """Advice if an error, or its cause, means that the system has run out of a resource.

    Empty for other errors.
    """
    led: BaseException | None = error
    seen: set[int] = set()
    while led is not None and id(led) not in seen:
        seen.add(id(led))
        if isinstance(led, MemoryError):
            return _advice(errno.ENOMEM)
        if isinstance(led, OSError) and led.errno in LACKS:
            return _advice(led.errno)
        if isinstance(led, RuntimeError) and led.args == (NO_THREAD,):
            return _advice(errno.EAGAIN)
        led = led.__cause__ or led.__context__
    return ""


NO_THREAD = "can't start new thread"  # the interpreter's text


def _advice(number: int | None) -> str:
    match number:
        case errno.EMFILE:
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return f"the server has reached its limit of {most} open files, raise it (ulimit -n)"
        case errno.ENFILE:
            return "the system has reached its limit of open files, raise it (sysctl fs.file-max)"
        case errno.EAGAIN:
            return (
                "the server has reached a limit of threads and processes, raise that of its user (ulimit -u) or of its "
                "container (pids)"
            )
    return "the server has no memory for it, raise the limit of its container or load fewer models"


NO_TEXT = "it has no text"


def text_of(error: BaseException) -> str:
    """The text of an error, which may be one of a model's code: even its text may fail."""
    try:
        return str(error)
    except BaseException:
        return NO_TEXT


def status_and_text(error: BaseException) -> tuple[Status, str]:
    """The status and the text that a client gets for `error`; for an unforeseen error INTERNAL, without its text.

    The text has no null byte, even if a name in it has one: texts in C end there.
    """
    if isinstance(error, ServerError):
        return error.status, str(error).replace("\0", " ")
    if isinstance(error, MemoryError):
        return Status.RESOURCE_EXHAUSTED, "the server has no memory for this call"
    return Status.INTERNAL, f"internal error: {type(error).__name__}"
