"""What holds for all tests."""

import faulthandler
import gc
import os
import signal
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from inferd.backends import opening
from tests.threads import alternate_stack_kept

# Servers of tests run beside each other: each serves its metrics on a port of its own.
os.environ.setdefault("INFERD_METRICS_PORT", "0")

# A shell has programs in its background ignore ^C, and theirs inherit that. Tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example, or making one, takes says how busy the machine is. Examples are the same in each run: to find old
# faults with new ones is for `make soak`, not for the next change.
settings.register_profile(
    "inferd",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="INFERD_NEW_EXAMPLES" not in os.environ,
)
settings.load_profile("inferd")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """For --dist loadfile."""
    if config.getvalue("dist") != "loadfile":
        return None
    from tests.scheduling import LongestFirst

    return LongestFirst(config, log)


def pytest_collection_finish() -> None:
    """What has been imported stays: the collector need not look at it after each test that asks for a collection.

    What a test imports later does not set aside what is garbage then, which tests of live objects would find for ever.
    A server looks for it when a version ends.
    """
    gc.collect()
    gc.freeze()
    opening.gc = SimpleNamespace(  # type: ignore[assignment]
        isenabled=gc.isenabled, disable=gc.disable, enable=gc.enable, freeze=lambda: None
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """A library that a test uses may not end the process at a signal of a later test."""
    with alternate_stack_kept():
        return (yield)


def pytest_unconfigure() -> None:
    """The process ends, and prints the stack, where a failed test leaves a hanging thread."""
    faulthandler.dump_traceback_later(120, exit=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, Any]:
    """Reports go from one process to another, which lone surrogates in a test's output would not."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report
