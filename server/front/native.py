"""The native front door: connections whose sockets an I/O thread reads and writes, with TLS or without.

The calls of ModelInfer and ModelStreamInfer bypass this module: their requests go from the connection to a lane, and
the responses back, without a Python object. Every other method is a Python handler, served as on a grpc.aio server.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import grpc

from inferd._native.service.authorizer import GROUPS, ListenerInterceptor
from inferd._native.service.forwarding import Forwarder
from inferd._native.service.infer import InferService
from inferd._native.shares import Turns
from inferd._native.timers import TimersHandle
from inferd._native.transport.call import Call, CallOverError
from inferd._native.transport.endpoint import Endpoint
from inferd._native.transport.io_thread import IoThreads
from inferd._native.transport.thread_pool import PoolThreads
from inferd._native.transport.tls import TlsSession
from inferd.server.addresses import Address, Bind, Rules, TcpAddress, UnixAddress, parse_bind
from inferd.server.errors import Denied, Status
from inferd.server.front.access import Access
from inferd.server.front.connection_limits import Admission, ClientLimits, ConnectionLimits, ListenerPolicy
from inferd.server.front.connection_log import ConnectionLog
from inferd.server.front.context import NativeContext
from inferd.server.front.door import STOPPING
from inferd.server.front.driver import SocketDriver
from inferd.server.front.handshake import PendingHandshake
from inferd.server.front.keepalive import DEFAULT_POLICY, ConnectionPolicy
from inferd.server.front.listeners import Listener, ListenPolicy, explained, open_tcp, open_unix
from inferd.server.front.peer import Peer, identified, peer_of
from inferd.server.front.serving import serve
from inferd.server.front.tls import Credentials
from inferd.server.observe.metrics.service import Traffic
from inferd.server.rpc.service import RAW, SERVICE
from inferd.server.settings import DEFAULTS

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]

RELOAD_INTERVAL = 1.0  # seconds between looks at the certificate files
BLOCKING_THREADS = 8  # for servicer methods that are not coroutines
COMPRESSION_LEVELS = {"none": 0, "low": 1, "medium": 6, "high": 9}  # zlib's
INFERENCE = frozenset(f"/{SERVICE}/{name}" for name in RAW)  # the methods whose responses are compressed
PARTING = 0.5  # seconds for the last responses after the grace period
TELLING = 1.0  # seconds for clients to acknowledge the server's stop
POLL = 0.01
TAKE_TIMEOUT = 0.1  # seconds for handshakes that have begun when the listeners close
STARTS = 8  # handlers that may begin in one round of the loop: half a millisecond of Python
NO_LIMITS = ClientLimits()

_CONNECTION_RULES = {
    "keepalive_time": "keepalive_time",
    "keepalive_timeout": "keepalive_timeout",
    "max_connection_age": "max_age",
    "max_connection_age_grace": "age_grace",
    "handshake_timeout": "handshake_timeout",
}
"""Rules of one address in milliseconds, and the fields of ConnectionPolicy that they set; 0 is no limit."""


log = logging.getLogger("inferd.front")


class HandshakeError(OSError):
    """A client may not continue after its handshake. The text is for the log; an empty text is not logged."""


class _Details:
    """A grpc.HandlerCallDetails."""

    __slots__ = ("invocation_metadata", "method")

    def __init__(self, call: Call) -> None:
        self.method = call.path
        self.invocation_metadata = call.metadata


class NativeDoor:
    """An `inferd.server.front.door.Door` on libnghttp2.

    Args:
        infer: serves inference natively, and has the timers; without it, handlers must be registered for inference.
        access: the rules of access; None: every caller may call every method.
        max_message_bytes: largest request message; None: no limit.
        max_held_bytes: memory for unanswered requests and unread responses; None: no limit.
        receive_timeout: seconds in which a request must arrive, see `Endpoint`; infinity: any time.
        send_timeout: seconds in which a client must read a response, the same.
        max_decompressed_bytes: largest request message after decompression; None: no limit but `max_message_bytes`.
        compression_level: of inference responses, a key of COMPRESSION_LEVELS.
        policy: how it listens.
        connections: limits of silence, age and pings.
        max_connections: open at a time; further ones are closed at once. None: any number.
        clients: the limits of each client.
        io_threads: how many threads read and write the sockets.
        io_busy_poll: seconds for which such a thread polls before it sleeps.
    """

    def __init__(
        self,
        infer: InferService | None = None,
        *,
        access: Access | None = None,
        max_message_bytes: int | None = None,
        max_held_bytes: int | None = None,
        receive_timeout: float = DEFAULTS.grpc_receive_timeout / 1000,
        send_timeout: float = DEFAULTS.grpc_send_timeout / 1000,
        max_decompressed_bytes: int | None = None,
        compression_level: str = DEFAULTS.grpc_infer_response_compression_level,
        policy: ListenPolicy | None = None,
        connections: ConnectionPolicy = DEFAULT_POLICY,
        max_connections: int | None = None,
        clients: ClientLimits = NO_LIMITS,
        io_threads: int = 1,
        io_busy_poll: float = 0.0,
    ) -> None:
        self._infer = infer
        self._access = access
        self._level = COMPRESSION_LEVELS[compression_level]
        self._timers = TimersHandle() if infer is None else infer.timers
        self._pool_threads = PoolThreads(max(1, (os.cpu_count() or 1) // 2))
        self._endpoint = Endpoint(
            self._on_call,
            max_message=max_message_bytes,
            max_held_bytes=max_held_bytes,
            receive_timeout=receive_timeout,
            send_timeout=send_timeout,
            max_inflated=max_decompressed_bytes,
            native_level=self._level,
            pool_threads=self._pool_threads,
            max_streams=connections.max_streams,
            timers=self._timers,
        )
        if infer is not None:
            infer.install(self._endpoint)
        if access is not None and access.guards:
            access.authorizer.install(self._endpoint)
        self._registered: dict[str, Handler] = {}
        self._generic: list[grpc.GenericRpcHandler[Any, Any]] = []
        self._policy = policy or ListenPolicy()
        self._listeners: list[Listener] = []
        self._reloading: asyncio.Task[None] | None = None
        self.addresses: tuple[str, ...] = ()
        self._io: IoThreads | None = None
        self._io_threads = io_threads
        self._io_busy_poll = io_busy_poll
        # in the order in which they came: it is that in which they end
        self._drivers: dict[SocketDriver, None] = {}
        self._handshakes: dict[PendingHandshake, None] = {}
        self._connections = replace(connections, send_timeout=send_timeout)
        self._limits = ConnectionLimits(max_connections, clients)
        self._refused = ConnectionLog()
        self._contexts: dict[NativeContext, None] = {}  # of calls that Python handles
        self._draining = False
        self._threads = ThreadPoolExecutor(BLOCKING_THREADS, thread_name_prefix="servicer")
        self._turns = Turns()  # calls whose handlers have not begun
        self._starts_left = STARTS  # in this round of the loop
        self._round_ends = False  # _next_round is scheduled

    # -- registration --

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler[Any, Any]], /) -> None:
        self._generic.extend(generic_rpc_handlers)

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Handler], /) -> None:
        for name, handler in method_handlers.items():
            self._registered[f"/{service_name}/{name}"] = handler

    def forward(self, forwarder: Forwarder) -> None:
        """Forward headers of native calls; the handlers of other calls do that themselves."""
        self._forwarder = forwarder  # the endpoint does not keep it
        forwarder.install(self._endpoint)

    def _find(self, call: Call) -> Handler | None:
        handler = self._registered.get(call.path)
        if handler is not None:
            return handler
        details: Any = _Details(call)
        for generic in self._generic:
            handler = generic.service(details)
            if handler is not None:
                return handler
        return None

    # -- listening --

    async def start(self, *addresses: str) -> int:
        try:
            self._begin_io()
            bound = [self._listen(parse_bind(text, 0)) for text in addresses]
        except BaseException:
            await self._close_listeners()
            self._end_io()
            raise
        if self._policy.credentials is not None:
            self._reloading = asyncio.get_running_loop().create_task(self._reload(self._policy.credentials))
        self.addresses = tuple(map(str, bound))
        return bound[0].port if isinstance(bound[0], TcpAddress) else 0

    def _begin_io(self) -> None:
        """Let an I/O thread serve the endpoint, its timers, the thread pool and the responses of the engine, if any."""
        self._io = IoThreads(self._endpoint, self._io_threads, round(self._io_busy_poll * 1e9))
        if self._infer is None:
            asyncio.get_running_loop().add_reader(self._timers.hear(), self._timers.run_events)
        else:
            self._infer.deliver_on(self._io)
        self._pool_threads.start()
        self._io.start()  # if that fails, `_end_io` takes all of this back

    def _end_io(self) -> None:
        """End the I/O thread and the thread pool."""
        if self._io is not None:
            self._io.stop()
        self._pool_threads.close()
        if self._io is None:
            return
        for pending in self._handshakes:
            pending.abort()
        try:
            self._timers.run_events()
        finally:
            if self._infer is None:
                asyncio.get_running_loop().remove_reader(self._timers.hear())
            else:
                self._infer.deliver_on(None)
            self._io = None

    def _listen(self, bind: Bind) -> Address:
        address, policy, listener_policy = bind.address, self._policy.at(bind), self._listener_policy(bind.rules)
        admit, failed = partial(self._admit, listener_policy, policy.credentials), self._refused.fails
        if isinstance(address, UnixAddress):
            opened, file = open_unix(address, policy)
            self._listeners.append(Listener(opened, admit, file, failed=failed))
            self._listeners[-1].serve()
            return address
        sockets = open_tcp(address, reuse_port=policy.reuse_port)
        self._listeners += [Listener(opened, admit, failed=failed) for opened in sockets]
        for listener in self._listeners[-len(sockets) :]:
            try:
                listener.serve()
            except OSError as error:
                raise explained(address, error) from error
        return TcpAddress(address.host, int(sockets[0].getsockname()[1]))

    def _admit(
        self, listener_policy: ListenerPolicy, credentials: Credentials | None, accepted: socket.socket, name: Any
    ) -> None:
        """Serve an accepted connection, with credentials after its handshake; or close it if there is no room."""
        client = peer_of(accepted, name)
        scarce = self._refused.is_scarce(client.address, accepted.fileno())
        admission = self._limits.admit(listener_policy, client, scarce=scarce)
        if admission is None:
            accepted.close()
            return
        now = self._timers.time()
        assert self._io is not None
        with self._ending_on_error(accepted, client, admission):
            if credentials is None:
                self._drive(accepted, client, admission, now, None)
                return
            pending = PendingHandshake(
                self._io, credentials.material.context, accepted, admission.use.number,
                listener_policy.connections.handshake_timeout,
                partial(self._encrypted, accepted, client, admission, now),
            )  # fmt: skip
            admission.driver = pending
            self._handshakes[pending] = None

    def _encrypted(
        self, accepted: socket.socket, client: Peer, admission: Admission, now: float, pending: PendingHandshake
    ) -> None:
        """The handshake of a connection is over. From now on the client's certificate identifies it."""
        self._handshakes.pop(pending, None)
        session = pending.session
        with self._ending_on_error(accepted, client, admission):
            if not admission.counted:  # it was closed during the handshake, to make room for another connection
                raise HandshakeError("")
            if not session.done:
                why = f"TLS: the handshake failed: {session.failure}" if session.failure else ""
                raise HandshakeError(why)
            if not session.alpn:
                raise HandshakeError("TLS: it did not offer HTTP/2 (ALPN 'h2')")
            client = identified(client, session)
            if not self._limits.identify(admission, client):
                raise HandshakeError("")
            self._drive(accepted, client, admission, now, session)

    @contextmanager
    def _ending_on_error(self, accepted: socket.socket, client: Peer, admission: Admission) -> Iterator[None]:
        """Close an admitted connection if an error within the block shows that it cannot be served."""
        try:
            yield
        except BaseException as error:
            accepted.close()
            self._limits.release(admission)
            if not isinstance(error, OSError | MemoryError):
                raise
            if str(error):
                self._refused.add(client.address, str(error))

    def _drive(
        self, accepted: socket.socket, client: Peer, admission: Admission, now: float, session: TlsSession | None
    ) -> None:
        assert self._io is not None
        SocketDriver(
            self._io, self._endpoint, self._drivers, self._timers, self._limits, accepted, client, admission,
            self._refused, now, session,
        )  # fmt: skip

    def _listener_policy(self, rules: Rules) -> ListenerPolicy:
        """The policy of a listener with these rules."""
        given: dict[str, Any] = {
            field: getattr(rules, option) / 1000 or math.inf
            for option, field in _CONNECTION_RULES.items()
            if getattr(rules, option) is not None
        }
        listener_policy = ListenerPolicy(
            connections=replace(self._connections, **given), max_connections=rules.max_connections or None
        )
        groups = set(GROUPS if rules.groups is None else rules.groups)
        if rules.reflection is not None:
            (groups.add if rules.reflection else groups.discard)("reflection")
        if groups == set(GROUPS) and rules.tokens is not False:
            return listener_policy
        if self._access is None:
            self._access = Access()  # callers need no token, but not every listener serves every method
        listener_policy.groups, listener_policy.trusted = frozenset(groups), rules.tokens is False
        listener_policy.interceptor = ListenerInterceptor(
            self._access.authorizer, listener_policy.groups, trusted=listener_policy.trusted
        )
        return listener_policy

    async def _reload(self, credentials: Credentials) -> None:
        """Serve new connections with the certificate in the files; existing ones keep theirs."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(RELOAD_INTERVAL)
            try:
                await loop.run_in_executor(self._threads, credentials.refresh)
            except Exception:  # such as a lack of memory: the next look may succeed
                log.exception("the TLS certificate stays as it was")

    async def _close_listeners(self) -> None:
        """Accept the connections that already wait, and no more."""
        if self._reloading is not None:
            self._reloading.cancel()
        self.remove_files()
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener.close()
        if self._handshakes:
            await asyncio.wait([pending.closed for pending in self._handshakes], timeout=TAKE_TIMEOUT)

    def remove_files(self) -> None:
        for listener in self._listeners:
            listener.remove_file()

    async def stop(self, grace: float | None) -> None:
        """Close the listeners, let every accepted call finish within `grace` seconds, refuse the rest."""
        loop = asyncio.get_running_loop()
        end = math.inf if grace is None else loop.time() + grace
        await self._close_listeners()
        try:
            await self._drain(end)
        finally:
            self._end_io()

    async def _drain(self, end: float) -> None:
        """Let calls finish until `end` on the loop's clock, end the rest, and all connections."""
        loop = asyncio.get_running_loop()
        for driver in tuple(self._drivers):
            driver.announce_shutdown()
        await self._clients_told(min(end, loop.time() + TELLING))
        self._draining = True
        if self._infer is not None:
            self._infer.drain(STOPPING)
        for context in tuple(self._contexts):
            context.drain()
        await self._part(end)
        self._refuse_calls()
        await self._part(loop.time() + PARTING)
        for driver in tuple(self._drivers):
            driver.abort()
        for pending in self._handshakes:
            pending.abort()
        if self._handshakes:
            await asyncio.wait([pending.closed for pending in self._handshakes], timeout=PARTING)
        await asyncio.sleep(0)  # in which the loop hears of connections that the I/O threads have ended
        tasks = [context.task for context in self._contexts if context.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=PARTING)
        self._threads.shutdown(wait=False)

    async def _clients_told(self, end: float) -> None:
        """Wait until each client knows of the shutdown: the calls that it began before have then come. At most until
        `end`, on the loop's clock."""
        loop = asyncio.get_running_loop()
        while loop.time() < end and (waiting := [each.closed for each in self._drivers if not each.told]):
            await asyncio.wait(waiting, timeout=min(POLL, end - loop.time()))

    async def _part(self, end: float) -> None:
        """End the connections and wait until they have closed, until `end` on the loop's clock at most."""
        loop = asyncio.get_running_loop()
        while self._drivers and loop.time() < end:
            for driver in tuple(self._drivers):  # some may still come, after slow handshakes
                driver.go_away()
            closing = [driver.closed for driver in self._drivers]
            if closing:
                await asyncio.wait(closing, timeout=min(POLL, end - loop.time()))

    def _refuse_calls(self) -> None:
        for driver in tuple(self._drivers):  # handlers of calls in Python are cancelled when they hear of it
            driver.fail_calls(STOPPING)

    def traffic(self) -> Traffic:
        """The door's counters, for metrics."""
        return Traffic(
            calls=self._endpoint.calls(),
            connections=self._limits.count,
            accepted=self._limits.accepted,
            refused=self._limits.refused,
            open_calls=self._endpoint.streams,
            resets=self._endpoint.resets,
            held=self._endpoint.ledger,
        )

    # -- calls that Python handles --

    def _on_call(self, call: Call) -> None:
        """Begin its handler, if few have begun in this round; otherwise it waits for its client's turn."""
        if self._starts_left and not self._turns.waiting:
            self._starts_left -= 1
            self._begin(call)
        else:
            self._turns.put(call.connection.admission.use.number, call)
        if not self._round_ends:
            self._round_ends = True
            asyncio.get_running_loop().call_soon(self._next_round)

    def _next_round(self) -> None:
        """Begin the handlers of the next calls, by their clients' turns. The rest waits, so the loop can read, write
        and deliver in between."""
        self._round_ends = False
        self._starts_left = STARTS
        while self._starts_left and self._turns.waiting:
            call = cast(Call, self._turns.take())
            if call.open:  # otherwise it was reset, or its deadline has passed
                self._starts_left -= 1
                self._begin(call)
        if self._starts_left < STARTS:
            self._round_ends = True
            asyncio.get_running_loop().call_soon(self._next_round)

    def _begin(self, call: Call) -> None:
        with suppress(CallOverError):  # the client has left meanwhile
            self._serve(call)

    def _serve(self, call: Call) -> None:
        """Begin the handler of a call, or refuse the call.

        Raises:
            CallOverError: it has ended.
        """
        handler = self._find(call)
        if handler is None:
            call.refuse(Status.UNIMPLEMENTED, f"Method not found: {call.path[:256]}")
            return
        if self._level and call.path in INFERENCE:
            call.set_compression("", self._level)
        if self._access is not None:
            try:
                self._access.caller(call.path, call.metadata, call.connection.admission.listener_policy)
            except Denied as error:
                client: Peer = call.connection.client
                self._access.note(client.address, call.path, error, client.credentials)
                call.refuse(error.status, str(error), error.refusal)
                return
        if (handler.request_streaming or handler.response_streaming) and not call.count_as_stream():
            return
        if not handler.request_streaming:
            call.expect_one()
        context = NativeContext(call, handler)
        task = asyncio.get_running_loop().create_task(serve(handler, context, self._threads))
        context.task = task
        self._contexts[context] = None
        task.add_done_callback(partial(self._call_done, context))
        if self._draining:
            context.drain()

    def _call_done(self, context: NativeContext, _: asyncio.Task[None]) -> None:
        self._contexts.pop(context, None)
        context.task = None  # a cancelled task keeps its frames, and these keep the request
