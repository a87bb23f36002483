"""Reading of a model's `parameters` and of `--backend-config`: text in, typed values out, errors that name the key."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Collection, Mapping

from inferd.backends.api import BackendError

log = logging.getLogger("inferd.backends")

MOST = 2**63 - 1
"""The largest whole number where a key has no smaller limit."""
MOST_THREADS = 2**31 - 1
"""The largest number of threads that frameworks can be told."""

FLAG_VALUES = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


class Parameters:
    """Typed access to a mapping of texts.

    Args:
        values: the parameters.
        where: what they belong to, for messages: "model 'digits'".
    """

    def __init__(self, values: Mapping[str, str], where: str) -> None:
        self._values = values
        self._where = where

    def flag(self, key: str, default: bool) -> bool:
        """true, false, yes, no, 1 or 0 in any case.

        Raises:
            BackendError: it is something else.
        """
        text = self._values.get(key)
        if text is None:
            return default
        try:
            return FLAG_VALUES[text.strip().lower()]
        except KeyError:
            raise self.error(key, "expected true or false") from None

    def integer(self, key: str, default: int | None = None, *, minimum: int = 0, maximum: int = MOST) -> int | None:
        """A whole number from `minimum` to `maximum`; `default` where the key is absent.

        Raises:
            BackendError: it is not such a number.
        """
        text = self._values.get(key)
        if text is None:
            return default
        try:
            number = int(text)
        except ValueError:
            raise self.error(key, "expected a whole number") from None
        if number < minimum:
            raise self.error(key, f"expected at least {minimum}")
        if number > maximum:
            raise self.error(key, f"expected at most {maximum}")
        return number

    def text(self, key: str, default: str = "") -> str:
        """The value as it stands."""
        return self._values.get(key, default)

    def warn_unknown(self, known: Collection[str]) -> None:
        """Log each unknown key. Such keys are allowed, as in Triton, but are usually typing errors."""
        for key in self._values:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean '{near[0]}'?" if near else ""
                log.warning("%s: parameter '%s' has no effect%s", self._where, key, hint)

    def error(self, key: str, expected: str) -> BackendError:
        """An error about one key, with its value."""
        return BackendError(f"{self._where}: parameter '{key}' is '{self._values[key]}', {expected}")


def default_intra_op_threads() -> int:
    """Threads for one operator where nothing is configured: half of the CPUs this process may use, at least one.

    That is about the number of physical cores; on a machine with two it leaves one to the event loop, whose latency
    loses more than a small model gains from a second thread.
    """
    return max(1, len(os.sched_getaffinity(0)) // 2)
