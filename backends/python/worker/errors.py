"""Errors of models: the exception that they raise, and the error in a response."""

from __future__ import annotations

import os
import sys
from types import FrameType, TracebackType

from .texts import text_of


class TritonModelException(Exception):
    """Raised for wrong use of this module, and by models that cannot serve their requests."""

    def message(self) -> str:
        """The text."""
        return str(self)


class ErrorCode(int):
    """A status code of the KServe protocol's errors: an int with a name."""

    name: str

    def __new__(cls, value: int, name: str) -> ErrorCode:
        code = super().__new__(cls, value)
        code.name = name
        return code

    def __reduce__(self) -> tuple[type[ErrorCode], tuple[int, str]]:
        return type(self), (int(self), self.name)

    def __repr__(self) -> str:
        return f"TritonError.{self.name}"


class TritonError:
    """An error as the answer to one request.

    Args:
        message: for the caller.
        code: one of the constants of this class.

    Raises:
        TypeError: the message is not a str, or the code is not one of them.
    """

    __slots__ = ("_code", "_message")

    UNKNOWN = ErrorCode(0, "UNKNOWN")
    INTERNAL = ErrorCode(1, "INTERNAL")
    NOT_FOUND = ErrorCode(2, "NOT_FOUND")
    INVALID_ARG = ErrorCode(3, "INVALID_ARG")
    UNAVAILABLE = ErrorCode(4, "UNAVAILABLE")
    UNSUPPORTED = ErrorCode(5, "UNSUPPORTED")
    ALREADY_EXISTS = ErrorCode(6, "ALREADY_EXISTS")
    CANCELLED = ErrorCode(7, "CANCELLED")

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        message = text_of(message, "the message of a TritonError")
        if isinstance(code, bool) or not isinstance(code, int) or not 0 <= code < len(ERROR_CODES):
            raise TypeError(f"TritonError expects one of its codes, such as TritonError.NOT_FOUND, got {code!r}")
        self._message = message
        self._code = ERROR_CODES[code]

    def message(self) -> str:
        """The text."""
        return self._message

    def code(self) -> ErrorCode:
        """One of the constants of this class."""
        return self._code

    def __str__(self) -> str:
        return self._message

    def __repr__(self) -> str:
        return f"TritonError({self._message!r}, {self._code!r})"


ERROR_CODES = (
    TritonError.UNKNOWN,
    TritonError.INTERNAL,
    TritonError.NOT_FOUND,
    TritonError.INVALID_ARG,
    TritonError.UNAVAILABLE,
    TritonError.UNSUPPORTED,
    TritonError.ALREADY_EXISTS,
    TritonError.CANCELLED,
)

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep  # noqa: PTH100, PTH120 (pathlib costs memory)
_OURS = (_HERE, os.path.join(os.path.dirname(_HERE[:-1]), "programs", ""), "backends/triton_api/")  # noqa: PTH118, PTH120
"""Prefixes of paths of files that are not the model's; paths of extensions are relative to the sources."""

PACKAGES = {
    "bs4": "beautifulsoup4",
    "Crypto": "pycryptodome",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "fitz": "PyMuPDF",
    "PIL": "pillow",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "PyYAML",
}
"""The packages of modules that models often import, where the names differ."""


def error_text(error: BaseException) -> str:
    """The text of an error for the server: that of a TritonModelException as it is, of any other with its traceback."""
    return _str_of(error) if isinstance(error, TritonModelException) else exception_text(error)


def _str_of(error: BaseException) -> str:
    """The text of an error, whose class may have a `__str__` that raises."""
    try:
        return str(error)
    except Exception as wrong:
        return f"(its text cannot be read: {type(wrong).__name__})"


def exception_text(error: BaseException) -> str:
    """An exception as callers see it: type, text, and where in the model it was raised, innermost first.

    That is the form in which Triton's Python backend reports one. Frames of this package and of the server's own
    programs are left out: Triton raises such errors in C++.
    """
    text = f"{type(error).__name__}: {_str_of(error)}"
    if isinstance(error, ModuleNotFoundError) and error.name:
        module = error.name.partition(".")[0]
        package = PACKAGES.get(module, module)
        text += f" in {sys.executable}; if it is a package: {sys.executable} -m pip install {package}"
    frames = []
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None:
        frame: FrameType = traceback.tb_frame
        if not frame.f_code.co_filename.startswith(_OURS):
            frames.append(f"  {frame.f_code.co_filename}({traceback.tb_lineno}): {frame.f_code.co_name}\n")
        traceback = traceback.tb_next
    if frames:
        text += "\n\nAt:\n" + "".join(reversed(frames))
    return text
