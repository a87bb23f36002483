"""The choice of traced requests: settings of the server and of single models, which can change at any time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from inferd._native.request.recorder import RecorderHandle, SamplingHandle
from inferd.server.settings.tracing import TraceConfig

if TYPE_CHECKING:
    from inferd.server.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Sampling:
    """The choice of traced requests; see `TraceConfig`."""

    levels: tuple[str, ...]
    rate: int
    count: int
    log_frequency: int

    @classmethod
    def of(cls, config: TraceConfig) -> Sampling:
        return cls(config.levels, config.rate, config.count, config.log_frequency)


class TraceControl:
    """The settings of traces. On the event loop.

    Args:
        config: of the server's start.
        recorder: records the course of requests.
        engine: serves the requests.
        place: makes the destination of traces, or raises InvalidArgument; called on another thread.
    """

    def __init__(
        self, config: TraceConfig, recorder: RecorderHandle, engine: Engine, place: Callable[[], object]
    ) -> None:
        self.config = config
        self._place = place
        self._start = Sampling.of(config)
        self._recorder = recorder
        self._engine = engine
        self._server = self._start
        self._models: dict[str, dict[str, object]] = {}  # fields of Sampling with a value for one model
        self._handles: dict[str, SamplingHandle] = {}
        self._watchers: list[Callable[[], object]] = []
        self._apply_server(count=self._server.count)
        engine.subscribe(self._on_change)

    @property
    def on(self) -> bool:
        """Whether any request may be traced."""
        return bool(self._server.levels) or any(self.sampling(model).levels for model in self._models)

    def watch(self, changed: Callable[[], object]) -> None:
        """Register `changed`, called after each change."""
        self._watchers.append(changed)

    def sampling(self, model: str = "") -> Sampling:
        """The settings of a model, or of "" for models without settings of their own; `count` is what is left of it."""
        own = self._models.get(model)
        if own is None:
            return replace(self._server, count=self._recorder.left)
        found = replace(self._server, **own)  # type: ignore[arg-type]  # names are fields
        return replace(found, count=self._handles[model].left)

    async def require_place(self) -> None:
        """Make sure that traces can be written.

        Raises:
            InvalidArgument: traces cannot be written; the text says why.
        """
        await asyncio.to_thread(self._place)

    def update(self, model: str, changes: Mapping[str, object]) -> None:
        """Change fields of the server's settings, or of a model's; None restores the default or the server's value.

        Only a change of the count begins the count anew.
        """
        if model:
            self._update_model(model, changes)
        else:
            start = {name: getattr(self._start, name) if value is None else value for name, value in changes.items()}
            self._server = replace(self._server, **start)  # type: ignore[arg-type]  # names are fields
            counts = "count" in changes
            self._apply_server(count=self._server.count if counts else self._recorder.left)
            for each, own in self._models.items():
                self._apply_model(each, counts=counts and "count" not in own)
        for changed in self._watchers:
            changed()

    def _update_model(self, model: str, changes: Mapping[str, object]) -> None:
        former = self._models.get(model)
        own = {name: value for name, value in {**(former or {}), **changes}.items() if value is not None}
        if own:
            self._models[model] = own
            self._apply_model(model, counts=former is None or "count" in changes)
            return
        self._models.pop(model, None)
        for loaded in self._engine.loaded():
            if loaded.name == model:
                self._recorder.assign(loaded.lane, None)

    def _apply_server(self, count: int) -> None:
        server = self._server
        self._recorder.sample(on=bool(server.levels), tensors="TENSORS" in server.levels, rate=server.rate, count=count)

    def _apply_model(self, model: str, *, counts: bool) -> None:
        """Let the model's settings take effect; `counts`: its count begins anew."""
        handle = self._handles.setdefault(model, SamplingHandle())
        found = replace(self._server, **self._models[model])  # type: ignore[arg-type]  # names are fields
        count = found.count if counts else handle.left
        handle.set(on=bool(found.levels), tensors="TENSORS" in found.levels, rate=found.rate, count=count)
        self._assign(model)

    def _assign(self, model: str) -> None:
        for loaded in self._engine.loaded():
            if loaded.name == model:
                self._recorder.assign(loaded.lane, self._handles[model])

    def _on_change(self, model: str, version: int | None, ready: bool) -> None:
        if ready and version is not None and model in self._models:
            self._assign(model)
