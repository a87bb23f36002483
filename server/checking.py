"""The command `inferd check`."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Sequence

from inferd.server.composition.engine import make_engine, make_loader, model_options
from inferd.server.engine.checking import Report, check, collected_warnings
from inferd.server.engine.instances.gpu import Gpus
from inferd.server.engine.repository.sources import Repositories, open_sources
from inferd.server.errors import ConfigError
from inferd.server.settings import Settings


def run_check(settings: Settings, *, load: bool, form: str = "text") -> int:
    """Check models and print the findings, a line or more for each model; the exit status of the command.

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
            "problems": [_placed(line) for line in report.problem.splitlines()],
            "warnings": [_placed(line) for line in report.warnings],
        }
        for report in reports
    ]
    print(json.dumps(found, indent=2))


def _print_github(reports: Sequence[Report]) -> None:
    for report in reports:
        for level, lines in (("error", report.problem.splitlines()), ("warning", report.warnings)):
            for line in lines:
                at = _placed(line)
                where = ",".join(f"{key}={at[name]}" for key, name in PLACES.items() if at[name])
                text = str(at["text"]).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
                print(f"::{level}{f' {where}' if where else ''}::{report.name}: {text}")


def _placed(line: str) -> dict[str, str | int]:
    """The file, the line, the column (0 for none) and the text of a finding."""
    found = PLACE.match(line)
    if found is None:
        return {"file": "", "line": 0, "column": 0, "text": line}
    return {"file": found[1], "line": int(found[2]), "column": int(found[3] or 0), "text": found[4]}


PLACE = re.compile(r"([^\s:]+):(\d+)(?::(\d+))?: (.*)", re.DOTALL)
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
