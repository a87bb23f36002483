"""`inferd check`: finds problems that keep models from being served, and configuration that has no effect.

It takes the steps of a load up to the first that would run a model's code. A problem of one model does not stop the
check of others.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from inferd.backends.api import BackendError, ModelSource
from inferd.backends.loader import BackendLoader
from inferd.server.composition.engine import make_engine, make_loader, model_options
from inferd.server.engine import config as configuration
from inferd.server.engine.instances.gpu import Gpus
from inferd.server.engine.repository.folders import ModelFolder
from inferd.server.engine.repository.sources import Repositories, open_sources
from inferd.server.errors import ConfigError, ServerError
from inferd.server.settings import Settings


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
    """A report for each model, in the order of names. Blocks until the frameworks have read the models.

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
    """The problem of a version, with the version's folder, which most texts have already."""
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


def run_check(settings: Settings, *, load: bool, form: str = "text") -> int:
    """Check models and print the findings, a line or more for each model. Returns the exit status of the command.

    Args:
        settings: the repositories, and how to read them.
        load: make instances, too.
        form: of the output: text, json, or github for remarks at the lines of a pull request.

    Raises:
        ConfigError: a repository cannot be read.
    """
    repositories = Repositories(open_sources(settings.model_repository, settings.model_name))
    try:
        reports = list(check(repositories, model_options(settings, Gpus()), make_loader(settings)))
    finally:
        repositories.close()
    if not reports:
        raise ConfigError(
            f"there is no model in {repositories}: a model is a folder with a config.pbtxt or a version folder"
        )
    if load and not any(report.problem for report in reports):
        with collected_warnings() as said:
            problems = asyncio.run(_loaded(settings))
        told = "\n".join((*problems.values(), *(warning for report in reports for warning in report.warnings)))
        for line in dict.fromkeys(line for line in said if line not in told):
            print(line, file=sys.stderr)
        reports = [Report(each.name, problems.get(each.name, ""), each.warnings) for each in reports]
    FORMS[form](reports)
    return 1 if any(report.problem for report in reports) else 0


def _print_text(reports: Sequence[Report]) -> None:
    for report in reports:
        print(report.problem or f"{report.name}: ok")
        for warning in report.warnings:
            print(f"  warning: {warning}")


def _print_json(reports: Sequence[Report]) -> None:
    found = [
        {
            "model": report.name,
            "ok": not report.problem,
            "problems": [_place(line) for line in report.problem.splitlines()],
            "warnings": [_place(line) for line in report.warnings],
        }
        for report in reports
    ]
    print(json.dumps(found, indent=2))


def _print_github(reports: Sequence[Report]) -> None:
    for report in reports:
        for level, lines in (("error", report.problem.splitlines()), ("warning", report.warnings)):
            for line in lines:
                at = _place(line)
                where = ",".join(f"{key}={at[name]}" for key, name in PLACES.items() if at[name])
                text = str(at["text"]).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
                print(f"::{level}{f' {where}' if where else ''}::{report.name}: {text}")


def _place(line: str) -> dict[str, str | int]:
    """The file, the line, the column (0 for none) and the text of a finding."""
    found = PLACE.match(line)
    if found is None or not Path(found[1]).is_file():
        return {"file": "", "line": 0, "column": 0, "text": line}
    return {"file": found[1], "line": int(found[2]), "column": int(found[3] or 0), "text": found[4]}


PLACE = re.compile(r"([^:]+):(\d+)(?::(\d+))?: (.*)", re.DOTALL)
PLACES = {"file": "file", "line": "line", "col": "column"}
"""GitHub's names for the parts of a finding's place."""
FORMS = {"text": _print_text, "json": _print_json, "github": _print_github}


async def _loaded(settings: Settings) -> dict[str, str]:
    """Load everything as the server does; the problems by model."""
    engine = make_engine(settings)
    try:
        await engine.start()
        return dict(engine.problems)
    finally:
        await engine.close()
