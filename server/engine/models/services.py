"""The engine's services for models: see `inferd.backends.api.Services`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Protocol

from inferd.backends.api import BackendError
from inferd.server.engine.models.measures import Measures
from inferd.server.engine.models.version import LoadedVersion
from inferd.server.errors import InvalidArgument, ServerError


class ModelService(Protocol):
    """The part of `inferd.server.engine.engine.Engine` that models call."""

    async def load(
        self, name: str, config: str = "", files: Mapping[str, bytes] | None = None, *, asked_by: str = ""
    ) -> None:
        """Load or reload a model."""

    async def unload(self, name: str, *, dependents: bool = False, asked_by: str = "") -> None:
        """Unload a model, and its dependents with it."""

    def model(self, name: str, version: str = "") -> LoadedVersion:
        """A ready version; raises ServerError without one."""

    async def is_on_demand(self, name: str) -> bool:
        """Whether the model is not loaded, and a request would load it."""

    async def bring(self, name: str, *, asked_by: str = "") -> None:
        """Load a model on demand; the calling model may be loading itself."""


class EngineServices:
    """The services; any thread may use them. Made on the engine's event loop.

    Args:
        models: loads, unloads and finds models.
        measures: metrics of models' own.
        entrance: capsule of the submission, for models' requests.
    """

    def __init__(self, models: ModelService, measures: Measures, entrance: object) -> None:
        self._models = models
        self._measures = measures
        self._entrance = entrance
        self._loop = asyncio.get_running_loop()

    @property
    def entrance(self) -> object:
        """See Services."""
        return self._entrance

    def ask(self, what: str, arguments: Mapping[str, object]) -> Future[object]:
        """See Services."""
        return asyncio.run_coroutine_threadsafe(self._answer(what, arguments), self._loop)

    def measure(self, user: object, change: Mapping[str, object]) -> None:
        """See Services."""
        self._measures.change(user, change)

    def forget_measures(self, user: object) -> None:
        """See Services."""
        self._measures.release(user)

    async def _answer(self, what: str, arguments: Mapping[str, object]) -> object:
        if what == "metric_value":
            return self._metric_value(str(arguments["family"]), _texts(arguments["labels"]))
        name = str(arguments["name"])
        asked_by = str(arguments.get("asked_by", ""))
        match what:
            case "is_model_ready":
                return await self._is_model_ready(name, str(arguments.get("version", "")))
            case "is_decoupled":
                if name != asked_by:  # a model's load cannot wait for itself
                    await self._models.bring(name, asked_by=asked_by)
                return self._models.model(name, str(arguments.get("version", ""))).spec.decoupled
            case "load_model":
                files = _files(arguments.get("files"))
                await self._models.load(name, str(arguments.get("config", "")), files, asked_by=asked_by)
            case "unload_model":
                dependents = bool(arguments.get("unload_dependents"))
                await self._models.unload(name, dependents=dependents, asked_by=asked_by)
            case _:
                raise BackendError(f"{what} is not served")
        return None

    def _metric_value(self, family: str, labels: Mapping[str, str]) -> float:
        try:
            return self._measures.value(family, labels)
        except KeyError:
            raise BackendError(f"metric {dict(labels)} of family '{family}' is not counted; the log says why") from None

    async def _is_model_ready(self, name: str, version: str) -> object:
        if await self._models.is_on_demand(name):
            return True
        try:
            return await self._models.model(name, version).check()
        except InvalidArgument:
            raise
        except ServerError:
            return False


def _files(found: object) -> dict[str, bytes]:
    return {str(path): bytes(content) for path, content in found.items()} if isinstance(found, Mapping) else {}


def _texts(found: object) -> dict[str, str]:
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, Mapping) else {}
