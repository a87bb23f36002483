"""A Redis server for responses, played by the simulation: it is slow, fails, forgets, and has values of other programs.

The store is the one that is shipped; this is the client of Redis that it asks.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING

import redis

import inferd.server.engine.caching.redis_store as redis_store
from inferd.server.caching import LocalCache, RedisCache
from inferd_client.pb import grpc_service_pb2 as pb
from tests.simulation.wire import Violation
from tests.simulation.wording import encoded

if TYPE_CHECKING:
    from inferd.server.caching import CacheConfig
    from tests.simulation.simulation import Simulation

SHARE = 0.2  # of simulations whose responses lie in Redis
TIMES = (0.0, 0.00005, 0.00005, 0.001, 0.01)  # seconds that a command takes
TIMEOUT = 0.03  # seconds that a command may take
SLOW = 0.5  # seconds that one takes that is too slow
NOTES = {"said": "in Redis", "share": 0.25, "known": True, "count": -7, "size": 1 << 63}  # in responses that it gives
FIELDS = {str: "string_param", float: "double_param", bool: "bool_param", int: "int64_param"}
PREFIX = "simulated"
FEW = 10  # answers, of which some come to who has asked


class Remote:
    """The client of Redis.

    Attributes:
        on: responses lie there, and not in the server's memory.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.on = simulation.has("remote", SHARE, when=simulation.scale.remote and not simulation.scale.crowd)
        self._simulation = simulation
        self._random = random = Random(f"{simulation.outcome.seed} remote")
        self._values: dict[str, tuple[bytes, float]] = {}  # and when they are forgotten
        self._unsound: set[str] = set()  # of these
        self._asked = self._given = 0  # how often it was asked, and has had a sound answer
        self._has_failed = False  # so that the server does not ask for a while
        self._times = random.sample(TIMES, 2)
        self._fails = random.choice((0, 0, 0.02, 0.2)) if self.on else 0
        self._spoils = random.choice((0, 0.1, 0.3))
        if self.on:
            redis_store._client = lambda _: self  # type: ignore[assignment, return-value]

    def cache(self, size: int, ttl: float) -> CacheConfig:
        """The cache of the server."""
        if not self.on:
            return LocalCache(size, ttl=ttl)
        return RedisCache("redis", 1, socket_timeout=TIMEOUT, connect_timeout=TIMEOUT, ttl=ttl, prefix=PREFIX)

    @property
    def slack_ns(self) -> int:
        """How long an answer may be on its way to Redis and from there."""
        return int(4 * TIMEOUT * 1e9) if self.on else 0

    def end(self) -> None:
        """All is over.

        Raises:
            Violation: the server has not asked, or has made nothing of what it was given.
        """
        reuse = self._simulation.service.reuse()
        if self.on and reuse["misses"] >= FEW and not (self._asked or self._has_failed):
            raise Violation(f"Redis is never asked, and the cache has {reuse}")
        if self.on and self._given >= FEW and not reuse["hits"]:
            raise Violation(f"Redis has given {self._given} answers, and the cache has {reuse}")

    # -- what the store asks

    async def _take_time(self) -> None:
        random = self._random
        draw = random.random()
        self._has_failed = self._has_failed or draw < self._fails
        await asyncio.sleep(SLOW if draw < self._fails / 3 else random.choice(self._times))
        if draw < self._fails * 2 / 3:
            raise redis.ConnectionError("gone")
        if draw < self._fails:
            raise redis.ResponseError("OOM command not allowed")

    async def ping(self) -> None:
        """See `redis.asyncio.Redis`."""
        await self._take_time()

    async def get(self, key: str) -> bytes | None:
        """See `redis.asyncio.Redis`."""
        self._asked += 1
        await self._take_time()
        value, until = self._values.get(key, (None, 0.0))
        if value is None or asyncio.get_running_loop().time() >= until:
            return None
        self._given += key not in self._unsound
        return value

    async def set(self, key: str, value: bytes, px: int | None) -> None:
        """See `redis.asyncio.Redis`."""
        await self._take_time()
        until = float("inf") if px is None else asyncio.get_running_loop().time() + px / 1000
        is_spoilt = self._random.random() < self._spoils
        self._values[key] = (self._spoilt(key, value) if is_spoilt else noted(key, value)), until
        (self._unsound.add if is_spoilt else self._unsound.discard)(key)

    async def aclose(self) -> None:
        """See `redis.asyncio.Redis`."""

    def _spoilt(self, key: str, value: bytes) -> bytes:
        """A value that is no response to this key."""
        random = self._random
        what = random.randrange(9)
        if what == 0:
            return value[: random.randrange(len(value))]
        if what == 1:
            return redis_store._encode(f"{key}0", value[redis_store.HEAD :])
        if what == 2:
            return redis_store._encode(key, b"\x0a\xff")
        message = pb.ModelInferResponse.FromString(value[redis_store.HEAD :])
        output = message.outputs[0]
        if what == 3:
            output.name = "nothing"
        elif what == 4:
            output.datatype = "FP16" if output.datatype != "FP16" else "INT8"
        elif what == 5 and output.datatype != "BYTES":
            output.shape[-1] += 1
        elif what == 6:
            output.shape[-1] = -output.shape[-1] - 1
        elif what == 7:
            output.shape.extend([1] * 40)
        else:
            message.raw_output_contents.append(b"more")
        return redis_store._encode(key, encoded(message))


def noted(key: str, value: bytes) -> bytes:
    """The response with parameters, by which it is known."""
    message = pb.ModelInferResponse.FromString(value[redis_store.HEAD :])
    for name, note in NOTES.items():
        field = "uint64_param" if note == 1 << 63 else FIELDS[type(note)]
        setattr(message.parameters[name], field, note)
    return redis_store._encode(key, encoded(message))


def forget_remote() -> None:
    """All is over: the module of the store keeps nothing of it."""
    redis_store._client = CLIENT


CLIENT = redis_store._client
