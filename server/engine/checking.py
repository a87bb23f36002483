"""`inferd check`: finds problems that keep models from being served, and configuration that has no effect.

It takes the steps of a load up to the first that would run a model's code. A problem of one model does not stop the
check of others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from inferd.backends.api import BackendError, ModelSource
from inferd.backends.loader import BackendLoader
from inferd.server.engine import config as configuration
from inferd.server.engine.repository.folders import ModelFolder
from inferd.server.engine.repository.sources import Repositories
from inferd.server.errors import ConfigError, ServerError


@dataclass(frozen=True, slots=True)
class Report:
    """The findings about one model.

    Attributes:
        name: of the model.
        problem: why the model cannot be served; empty if it can.
        warnings: about ignored fields.
    """

    name: str
    problem: str
    warnings: tuple[str, ...]


def check(repositories: Repositories, options: configuration.Options, loader: BackendLoader) -> Iterator[Report]:
    """A report for each model, by name; blocks for as long as the frameworks need to read the models.

    Raises:
        ConfigError: a repository cannot be read.
    """
    prepared: dict[str, configuration.Prepared | None] = {}
    problems: dict[str, str] = {}
    warnings: dict[str, tuple[str, ...]] = {}
    for folder in repositories.scan():
        brought = folder
        with collected_warnings() as said:
            try:
                brought = repositories.brought(folder) or folder
                prepared[folder.name], problem = _look_at(brought, options, loader)
            except ConfigError as error:
                prepared[folder.name], problem = None, str(error)
        problems[folder.name] = brought.shown(problem)
        warnings[folder.name] = tuple(dict.fromkeys(map(brought.shown, said)))
    for name, composed in configuration.compose(prepared).items():
        if isinstance(composed, ConfigError):
            problems[name] = problems[name] or str(composed)
    for name in sorted(prepared):
        yield Report(name, problems[name], warnings[name])


def _look_at(
    folder: ModelFolder, options: configuration.Options, loader: BackendLoader
) -> tuple[configuration.Prepared | None, str]:
    """The model's configuration, if it can be prepared, and the problem."""
    prepared = None
    try:
        prepared = configuration.prepare(folder, options, loader)
        for version, own in prepared.by_version.items():
            if own.backend is not None:
                text = partial(configuration.config_to_json, own.config)
                own.backend.check(ModelSource(own.spec, version, folder.version_path(version), text))
    except ServerError as error:
        return prepared, str(error)
    except BackendError as error:
        return prepared, f"{folder.path}: {error}"
    except OSError as error:
        return prepared, f"{error.filename or folder.path}: {(error.strerror or str(error)).lower()}"
    except Exception as error:  # frameworks raise anything; the check continues with other models
        return prepared, f"{folder.path}: {type(error).__name__}: {error}"
    problems = (_placed(folder, version, text) for version, text in prepared.problems.items())
    return prepared, "\n".join(dict.fromkeys(problems))


def _placed(folder: ModelFolder, version: int, problem: str) -> str:
    """The problem of a version with its place, which most texts have already."""
    return problem if str(folder.path) in problem else f"{folder.version_path(version)}: {problem}"


class _Collector(logging.Handler):
    def __init__(self, add: Callable[[str], object]) -> None:
        super().__init__(logging.WARNING)
        self._add = add

    def emit(self, record: logging.LogRecord) -> None:
        self._add(record.getMessage())


@contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """Collect the warnings that are logged inside of the block, instead of logging them."""
    said: list[str] = []
    log, handler = logging.getLogger("inferd"), _Collector(said.append)
    propagates, log.propagate = log.propagate, False
    log.addHandler(handler)
    try:
        yield said
    finally:
        log.removeHandler(handler)
        log.propagate = propagates
