"""What the engine does for models that ask it: see `backends.api.Services`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING

from backends.api import BackendError
from server.errors import ServerError

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
        if what == "is_model_ready":
            work = self._is_model_ready(str(arguments["name"]), str(arguments.get("version", "")))
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        refused: Future[object] = Future()
        refused.set_exception(BackendError(f"{what} is not served: models are loaded when the server starts"))
        return refused

    async def _is_model_ready(self, name: str, version: str) -> object:
        try:
            return await self._engine.model(name, version).check()
        except ServerError:
            return False
