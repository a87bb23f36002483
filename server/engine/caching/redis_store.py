"""The response cache in a Redis server.

The key of a response is PREFIX:MODEL:VERSION:DIGEST. The digest is the SHA-256 of everything that the response depends
on (`Lookup.parts`) and of the model's fingerprint; requests with equal digests count as identical. The value is an
encoded inference.ModelInferResponse behind a checksum that also covers the key: truncated values, and values that
another program has written, count as missing.

A lookup takes at most `socket_timeout`, whatever Redis does; then the model answers. If Redis is down or slow, the
store does not call it for a while, and keeps nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import zlib
from collections.abc import Awaitable, Callable, Coroutine
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, TypeVar

from google.protobuf.message import DecodeError

from inferd._native.service.response_store import Lookup, ResponseStore
from inferd.backends.installing import pip_install
from inferd.server.caching import RedisCache
from inferd.server.engine.caching.circuit import Circuit
from inferd.server.errors import ConfigError
from inferd_client.pb import grpc_service_pb2 as pb

if TYPE_CHECKING:
    import redis.asyncio

log = logging.getLogger("inferd.cache")

MAGIC: Final = b"inferd1\n"
HEAD: Final = len(MAGIC) + 4
LARGE: Final = 1 << 20
"""From this number of bytes on, another thread computes digests and encodes messages."""

MOST_WRITING: Final = 64 << 20
"""The most bytes of responses on their way to Redis; the store does not keep more than that."""

Identity = Callable[[str, int], bytes | None]
Decoded = tuple[list[tuple[str, str, list[int], bytes]], list[tuple[str, int, Any]]]
T = TypeVar("T")

_KINDS: Final = {field.name: field.number for field in pb.InferParameter.DESCRIPTOR.fields}


class RedisStore(ResponseStore):
    """Responses of models with `response_cache`, in Redis.

    Args:
        config: the address of Redis, and its time limits.
        identity: returns the fingerprint of a version; None: the store keeps none of its responses.

    Raises:
        ConfigError: the client library is not installed.
    """

    def __init__(self, config: RedisCache, identity: Identity) -> None:
        super().__init__()
        self._config = config
        self._identity = identity
        self._client = _client(config)
        self._circuit = Circuit(
            f"the response cache in Redis at {config.address}",
            "requests are executed without it",
            self._probe,
            log,
        )
        self._lookups: dict[Lookup, bytes] = {}  # with the fingerprint of the version
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._writing = 0  # bytes
        self._wrong = 0  # wrong values and refused commands of Redis

    async def start(self) -> None:
        """Check that Redis answers. If not, the circuit's probe tries again."""
        await self._ask(self._probe())

    async def close(self) -> None:
        """End all calls, and close the connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._circuit.close()  # after the calls, which may open it
        await self._client.aclose()

    def release(self, model: str) -> None:
        """End all lookups for a model that is about to end; the model then answers."""
        for lookup in [lookup for lookup in self._lookups if lookup.model == model]:
            lookup.missing()

    # -- what the coalescer calls --

    def look(self, lookup: Lookup) -> bool:
        if self._circuit.open:
            return False
        identity = self._identity(lookup.model, lookup.version)
        if identity is None:
            return False
        self._lookups[lookup] = identity
        self._begin(self._search(lookup, identity))
        return True

    def keep(self, lookup: Lookup, answer: bytes) -> None:
        if lookup.key is None or self._circuit.open or self._writing + len(answer) > MOST_WRITING:
            return
        if self._identity(lookup.model, lookup.version) != self._lookups[lookup]:
            return  # the model, or one of its steps, was reloaded: the response may be of either version
        self._writing += len(answer)
        self._begin(self._write(lookup.key, answer))

    def forget(self, lookup: Lookup) -> None:
        del self._lookups[lookup]  # its call to Redis ends within its time limit

    # --

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    async def _search(self, lookup: Lookup, identity: bytes) -> None:
        try:
            found = await self._ask(self._find(lookup, identity)) if lookup.pending else None
            if found is not None:
                lookup.found(*found)
        except ValueError as error:
            self._tell(f"{lookup.key} in Redis is no response of inferd", error)
        finally:
            lookup.missing()

    async def _find(self, lookup: Lookup, identity: bytes) -> Decoded | None:
        parts = lookup.parts()
        if parts is None:
            return None
        inputs, outputs, parameters = parts
        size = sum(len(data) for _, _, _, data in inputs)
        digest = await _work(size, _digest, identity, inputs, outputs, parameters)
        key = f"{self._config.prefix}:{lookup.model}:{lookup.version}:{digest}"
        value = await self._client.get(key)
        lookup.key = key  # the model's response is kept under it, too; unset if Redis could not be read
        return None if value is None else await _work(len(value), _decode, key, value)

    async def _write(self, key: str, answer: bytes) -> None:
        try:
            value = await _work(len(answer), _encode, key, answer)
            milliseconds = max(1, round(self._config.ttl * 1000)) if self._config.ttl else None
            await self._ask(self._client.set(key, value, px=milliseconds))
        finally:
            self._writing -= len(answer)

    async def _probe(self) -> None:
        async with asyncio.timeout(self._config.connect_timeout + self._config.socket_timeout):
            await self._client.ping()

    async def _ask(self, call: Awaitable[T]) -> T | None:
        """The result of a call within its time limit; None if it fails."""
        import redis

        try:
            async with asyncio.timeout(self._config.socket_timeout):
                result = await call
        except redis.ResponseError as error:
            self._tell(f"Redis at {self._config.address} has refused a command", error)
            return None
        except (TimeoutError, redis.TimeoutError) as error:
            self._circuit.failed(error, late=True)
            return None
        except (redis.RedisError, OSError) as error:
            self._circuit.failed(error, late=isinstance(error.__cause__, TimeoutError))  # no free connection
            return None
        self._circuit.succeeded()
        return result

    def _tell(self, what: str, error: Exception) -> None:
        self._wrong += 1
        if self._wrong & (self._wrong - 1) == 0:  # the first, the second, the fourth ...
            log.warning("%s: %s (such case %d)", what, str(error), self._wrong)


def _client(config: RedisCache) -> redis.asyncio.Redis:
    try:
        import redis.asyncio as client
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError as error:
        raise ConfigError(
            f"the response cache in Redis needs its client: {pip_install('inferd[redis]')} ({error})"
        ) from None
    settings: dict[str, Any] = {
        "db": config.db,
        "username": config.user or None,
        "password": config.password or None,
        "socket_connect_timeout": config.connect_timeout,
        "socket_timeout": config.socket_timeout,
        "retry": Retry(NoBackoff(), 0),  # no retry: a request would wait for it
    }
    if config.host.startswith("/"):
        settings |= {"path": config.host, "connection_class": client.UnixDomainSocketConnection}
    else:
        settings |= {"host": config.host, "port": config.port}
    if config.encrypted:
        files = {"ssl_certfile": config.cert, "ssl_keyfile": config.key, "ssl_ca_certs": config.cacert}
        settings |= {name: str(path) for name, path in files.items() if path}
        settings |= {"ssl_ca_path": str(config.cacert_dir)} if config.cacert_dir else {}
        settings["connection_class"] = client.SSLConnection
    pool = client.BlockingConnectionPool(max_connections=config.pool_size, timeout=config.wait_timeout, **settings)
    return client.Redis.from_pool(pool)


async def _work(size: int, function: Callable[..., T], *args: Any) -> T:
    """The function's result; another thread runs it if it has many bytes to read."""
    return function(*args) if size < LARGE else await asyncio.to_thread(function, *args)


def _digest(identity: bytes, inputs: list[Any], outputs: list[Any], parameters: list[Any]) -> str:
    heads = [(name, datatype, shape, len(data)) for name, datatype, shape, data in inputs]
    digest = hashlib.sha256(identity)
    digest.update(json.dumps([heads, outputs, parameters], separators=(",", ":")).encode())
    for *_, data in inputs:
        digest.update(data)
    return digest.hexdigest()


def _checksum(key: str, answer: bytes | memoryview) -> bytes:
    return zlib.crc32(answer, zlib.crc32(key.encode())).to_bytes(4, "little")


def _encode(key: str, answer: bytes) -> bytes:
    return b"".join((MAGIC, _checksum(key, answer), answer))


def _decode(key: str, value: bytes) -> Decoded:
    """Outputs and parameters as `Lookup.found` takes them.

    Raises:
        ValueError: the value is not one that `_encode` makes for this key.
    """
    answer = memoryview(value)[HEAD:]
    if not value.startswith(MAGIC) or value[len(MAGIC) : HEAD] != _checksum(key, answer):
        raise ValueError(f"{len(value)} bytes without the right checksum")
    try:
        message = pb.ModelInferResponse.FromString(bytes(answer))
    except DecodeError as error:
        raise ValueError(str(error)) from error
    outputs = [
        (output.name, output.datatype, list(output.shape), data)
        for output, data in zip(message.outputs, message.raw_output_contents, strict=True)
    ]
    parameters = [
        (name, _KINDS[kind], getattr(value, kind))
        for name, value in sorted(message.parameters.items(), key=itemgetter(0))  # a map has an order by chance
        if (kind := value.WhichOneof("parameter_choice")) is not None
    ]
    return outputs, parameters
