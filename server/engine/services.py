"""What the engine does for models that ask it: see `backends.api.Services`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING

from backends.api import BackendError
from server.errors import InvalidArgument, ServerError

if TYPE_CHECKING:
    from server.engine.engine import Engine


class EngineServices:
    """Safe to use from any thread; made on the loop that the engine lives on."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()

    @property
    def entrance(self) -> object:
        """See Services."""
        return self._engine.infer.entrance

    def ask(self, what: str, arguments: Mapping[str, object]) -> Future[object]:
        """See Services."""
        return asyncio.run_coroutine_threadsafe(self._answer(what, arguments), self._loop)

    def measure(self, user: object, change: Mapping[str, object]) -> None:
        """See Services."""
        self._engine.measures.change(user, change)

    def forget_measures(self, user: object) -> None:
        """See Services."""
        self._engine.measures.release(user)

    async def _answer(self, what: str, arguments: Mapping[str, object]) -> object:
        if what == "metric_value":
            return self._metric_value(str(arguments["family"]), _texts(arguments["labels"]))
        name = str(arguments["name"])
        asked_by = str(arguments.get("asked_by", ""))
        match what:
            case "is_model_ready":
                return await self._is_model_ready(name, str(arguments.get("version", "")))
            case "load_model":
                files = _files(arguments.get("files"))
                await self._engine.load(name, str(arguments.get("config", "")), files, asked_by=asked_by)
            case "unload_model":
                dependents = bool(arguments.get("unload_dependents"))
                await self._engine.unload(name, dependents=dependents, asked_by=asked_by)
            case _:
                raise BackendError(f"{what} is not served")
        return None

    def _metric_value(self, family: str, labels: Mapping[str, str]) -> float:
        try:
            return self._engine.measures.value(family, labels)
        except KeyError:
            raise BackendError(f"metric {dict(labels)} of family '{family}' is not counted; the log says why") from None

    async def _is_model_ready(self, name: str, version: str) -> object:
        try:
            return await self._engine.model(name, version).check()
        except InvalidArgument:
            raise
        except ServerError:
            return False


def _files(found: object) -> dict[str, bytes]:
    return {str(path): bytes(content) for path, content in found.items()} if isinstance(found, Mapping) else {}


def _texts(found: object) -> dict[str, str]:
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, Mapping) else {}
