"""The command `inferd check`."""

from __future__ import annotations

import asyncio

from server.app import make_engine, make_loader, model_options
from server.engine.checking import Report, check
from server.engine.gpu import Gpus
from server.engine.places import Repositories, open_places
from server.errors import ConfigError
from server.settings import Settings


def run_check(settings: Settings, *, load: bool) -> int:
    """Print what is found, a line or more for each model; the exit status of the command.

    Args:
        settings: which repositories, and how they are read.
        load: make instances, too.

    Raises:
        ConfigError: a repository cannot be read.
    """
    repositories = Repositories(open_places(settings.model_repository, settings.model_name))
    try:
        reports = list(check(repositories, model_options(settings, Gpus()), make_loader(settings)))
    finally:
        repositories.close()
    if not reports:
        raise ConfigError(
            f"there is no model in {repositories}: a model is a folder with a config.pbtxt or a version folder"
        )
    if load and not any(report.problem for report in reports):
        problems = asyncio.run(_loaded(settings))
        reports = [Report(each.name, problems.get(each.name, ""), each.warnings) for each in reports]
    for report in reports:
        print(report.problem or f"{report.name}: ok")
        for warning in report.warnings:
            print(f"  warning: {warning}")
    return 1 if any(report.problem for report in reports) else 0


async def _loaded(settings: Settings) -> dict[str, str]:
    """Load everything as the server does; by model, what went wrong."""
    engine = make_engine(settings)
    try:
        await engine.start()
        return dict(engine.problems)
    finally:
        await engine.close()
