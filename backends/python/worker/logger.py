"""The server's log, as models write to it."""

from __future__ import annotations

from . import protocol, runtime
from .errors import ErrorCode, TritonModelException
from .texts import text_of


class LogLevel(ErrorCode):
    """The level of a message: an int with a name."""

    INFO: LogLevel
    WARNING: LogLevel
    ERROR: LogLevel
    VERBOSE: LogLevel

    def __repr__(self) -> str:
        return f"LogLevel.{self.name}"


LogLevel.INFO = LogLevel(protocol.LOG_INFO, "INFO")
LogLevel.WARNING = LogLevel(protocol.LOG_WARNING, "WARNING")
LogLevel.ERROR = LogLevel(protocol.LOG_ERROR, "ERROR")
LogLevel.VERBOSE = LogLevel(protocol.LOG_VERBOSE, "VERBOSE")


class Logger:
    """Writes messages to the server's log, with the model and instance that they are from."""

    LogLevel = LogLevel
    INFO = LogLevel.INFO
    WARNING = LogLevel.WARNING
    ERROR = LogLevel.ERROR
    VERBOSE = LogLevel.VERBOSE

    @staticmethod
    def log(message: str, level: int = LogLevel.INFO) -> None:
        """Write a message.

        Args:
            message: the text.
            level: one of Logger.INFO, WARNING, ERROR and VERBOSE.
        """
        message = text_of(message, "a log message")
        if not isinstance(level, LogLevel):
            raise TypeError(f"Logger.log expects Logger.INFO, WARNING, ERROR or VERBOSE as its level, got {level!r}")
        try:
            channel = runtime.current().channel
        except TritonModelException:
            print(message)  # outside a worker
            return
        channel.log(int(level), message)

    @staticmethod
    def log_info(message: str) -> None:
        """Write a message of level INFO."""
        Logger.log(message, LogLevel.INFO)

    @staticmethod
    def log_warn(message: str) -> None:
        """Write a message of level WARNING."""
        Logger.log(message, LogLevel.WARNING)

    @staticmethod
    def log_error(message: str) -> None:
        """Write a message of level ERROR."""
        Logger.log(message, LogLevel.ERROR)

    @staticmethod
    def log_verbose(message: str) -> None:
        """Write a message that appears only if the server logs verbosely."""
        Logger.log(message, LogLevel.VERBOSE)
