"""An engine in plain Python, for what no client can ask of the real one: that a version is not ready, that the server
drains, how many requests are live. It answers right requests for the models of `tests.conformance.models`.
"""

from __future__ import annotations

import asyncio
import json

import grpc

from inferd._native.service.ticket import CallOrigin
from inferd.backends.api import ModelSpec
from inferd.server.engine.instances.shared_memory import SharedMemory
from inferd.server.engine.models.registry import IndexEntry
from inferd.server.errors import NotFound, ServerError, Status, Unavailable
from inferd_client.pb import grpc_service_pb2 as pb
from tests.conformance import models

CONTROL = "conformance.Control"
HANGS_S = 3600.0  # longer than any test waits for a request to be taken out


class Loaded:
    """A version of a model."""

    def __init__(self, spec: ModelSpec, version: int) -> None:
        self.name = spec.name
        self.version = version
        self.spec = spec
        self.ready = True

    async def check(self) -> bool:
        return self.ready


class Ticket:
    """A submitted request."""

    refusal = 0
    decoupled = False
    done = False

    def __init__(self, engine: FakeEngine, deliver) -> None:
        self._engine = engine
        self._deliver = deliver
        self._timers: list[asyncio.TimerHandle] = []
        engine.live_requests += 1

    def at(self, delay_s: float, status: Status, details: str, response: bytes | None) -> None:
        """Deliver this after a delay, unless something else ends the request before."""
        self._timers.append(asyncio.get_running_loop().call_later(delay_s, self._end, status, details, response))

    def taken(self) -> None:
        pass

    def cancel(self) -> None:
        if self._timers:
            self._clear()

    def _end(self, status, details, response):
        self._clear()
        self.done = True
        self._deliver(int(status), details, response)

    def _clear(self):
        self._engine.live_requests -= 1
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()


class FakeEngine:
    """`inferd.server.engine.engine.Engine`, as far as the doors and these tests use it."""

    live = True
    on_demand = ()

    def __init__(self) -> None:
        self.live_requests = 0
        self._subscribers: list = []
        self.shared_memory = SharedMemory()
        self._models = {
            spec.name: {version: Loaded(spec, version) for version in models.versions(spec.name)}
            for spec in models.MODELS.values()
        }

    def is_awaited(self, name: str) -> bool:
        return False

    async def is_on_demand(self, name: str) -> bool:
        return False

    async def bring(self, name: str) -> None:
        """Nothing is loaded on demand."""

    @property
    def ready(self) -> bool:
        return all(loaded.ready for versions in self._models.values() for loaded in versions.values())

    async def check(self) -> bool:
        return self.ready

    def subscribe(self, callback) -> None:
        self._subscribers.append(callback)

    def set_ready(self, name: str, version: int, ready: bool) -> None:
        self._models[name][version].ready = ready
        for callback in self._subscribers:
            callback(name, version, ready)

    def versions(self, name: str) -> tuple[Loaded, ...]:
        if name not in self._models:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        return tuple(loaded for loaded in self._models[name].values() if loaded.ready)

    def model(self, name: str, version: str = "") -> Loaded:
        ready = self.versions(name)
        if not version:
            return ready[-1]
        if not self._models[name][int(version)].ready:
            raise Unavailable(f"Request for unknown model: '{name}' version {version} is not at ready state")
        return self._models[name][int(version)]

    def index(self) -> list[IndexEntry]:
        return [
            IndexEntry(name, str(version), "READY" if loaded.ready else "UNAVAILABLE", "")
            for name, versions in self._models.items()
            for version, loaded in versions.items()
        ]

    def stream_ended(self, number: int) -> None:
        """No model here has sequences."""

    @property
    def infer(self) -> FakeEngine:
        """What takes requests, of the real engine an InferService."""
        return self

    def submit(self, message: bytes, deliver, call: CallOrigin, *, timeout_ns: int = -1) -> Ticket:
        ticket, stream = Ticket(self, deliver), call.stream
        request = pb.ModelInferRequest.FromString(message + call.forwarded)
        delay, status, details, response = 0.0, Status.OK, "", None
        try:
            loaded = self.model(request.model_name, request.model_version)
            response = _run(loaded, request)
            delay = HANGS_S if loaded.name == "hang" else int(loaded.spec.parameters.get("delay_us", 0)) / 1e6
        except ServerError as error:
            status, details = error.status, str(error)
        ticket.at(delay, status, details, _wrapped(request.id, details, response) if stream else _encoded(response))
        if timeout_ns >= 0:
            late = "Deadline Exceeded"
            wrapped = _wrapped(request.id, late, None) if stream else None
            ticket.at(timeout_ns / 1e9, Status.DEADLINE_EXCEEDED, late, wrapped)
        return ticket

    def control_handler(self, health) -> grpc.GenericRpcHandler:
        """A service by which tests steer the engine: JSON in, JSON out."""

        async def set_ready(request, context):
            self.set_ready(**json.loads(request))
            return b"{}"

        async def live_requests(request, context):
            return json.dumps(self.live_requests).encode()

        async def drain(request, context):
            health.drain()
            return b"{}"

        handlers = {"SetReady": set_ready, "LiveRequests": live_requests, "Drain": drain}
        return grpc.method_handlers_generic_handler(
            CONTROL, {name: grpc.unary_unary_rpc_method_handler(handler) for name, handler in handlers.items()}
        )


def _run(loaded: Loaded, request: pb.ModelInferRequest) -> pb.ModelInferResponse:
    response = pb.ModelInferResponse(model_name=loaded.name, model_version=str(loaded.version), id=request.id)
    for tensor, output, raw in zip(request.inputs, loaded.spec.outputs, request.raw_input_contents, strict=True):
        response.outputs.add(name=output.name, datatype=tensor.datatype, shape=tensor.shape)
        response.raw_output_contents.append(raw)
    return response


def _encoded(response):
    return None if response is None else response.SerializeToString()


def _wrapped(request_id, details, response):
    wrapped = pb.ModelStreamInferResponse(error_message=details)
    if response is None:
        wrapped.infer_response.id = request_id
    else:
        wrapped.infer_response.CopyFrom(response)
        wrapped.infer_response.parameters["triton_final_response"].bool_param = True
    return wrapped.SerializeToString()
