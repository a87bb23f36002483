"""The response cache as configured by `--cache-config`.

The form is Triton's: `--cache-config local,size=1048576`, or one option for each value. There is one cache: in the
server's memory (`local`), or in a Redis server that other servers may use, too (`redis`). `redis` has the keys of
https://github.com/triton-inference-server/redis_cache and some more.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

LOCAL_KEYS = ("size", "ttl", "entry", "compare")
REDIS_KEYS = (
    "host",
    "port",
    "user",
    "password",
    "db",
    "connect_timeout",
    "socket_timeout",
    "wait_timeout",
    "pool_size",
    "cert",
    "key",
    "cacert",
    "cacert_dir",
    "ttl",
    "prefix",
)
USER_VARIABLE = "TRITONCACHE_REDIS_USERNAME"
PASSWORD_VARIABLE = "TRITONCACHE_REDIS_PASSWORD"
LONGEST_TIMEOUT_MS = 60_000


class CacheConfigError(ValueError):
    """A `--cache-config` that does not describe a cache."""


@dataclass(frozen=True, slots=True)
class LocalCache:
    """Responses in the server's memory."""

    size: int  # bytes
    ttl: float = 0.0  # seconds; 0: for ever
    entry: int = 0  # bytes of one response at most; 0: a quarter of the size
    compare: bool = False  # compare large inputs themselves, not only their digests


@dataclass(frozen=True, slots=True)
class RedisCache:
    """Responses in a Redis server. Times are in seconds."""

    host: str  # a path that begins with / is a unix socket
    port: int = 0
    user: str = ""
    password: str = ""
    db: int = 0
    connect_timeout: float = 1.0  # to connect for the probe, after Redis was down
    socket_timeout: float = 0.1  # the longest wait of a request for Redis, connecting included
    wait_timeout: float = 0.1  # of `socket_timeout`, the longest wait for a free connection
    pool_size: int = 8  # connections
    cert: Path | None = None
    key: Path | None = None
    cacert: Path | None = None
    cacert_dir: Path | None = None
    ttl: float = 0.0  # 0: responses stay until Redis evicts them
    prefix: str = "inferd"

    def __repr__(self) -> str:
        return f"RedisCache({self.address})"  # without secrets

    @property
    def address(self) -> str:
        """The address of the Redis server, for messages."""
        return self.host if self.host.startswith("/") else f"{self.host}:{self.port}"

    @property
    def encrypted(self) -> bool:
        """Whether the connection uses TLS: as in Triton, if any of its files is named."""
        return any((self.cert, self.key, self.cacert, self.cacert_dir))


CacheConfig = LocalCache | RedisCache | None


def parse_cache_config(entries: tuple[str, ...], environment: Mapping[str, str] = os.environ) -> CacheConfig:
    """The cache that all options describe together; None without options, or for a local cache of size 0.

    Args:
        entries: the values of all `--cache-config`.
        environment: the source of Redis' user name and password if the options lack them.

    Raises:
        CacheConfigError: an entry has another form, an unknown cache or key, or a value out of range, or entries name
            different caches.
    """
    kinds = {entry.partition(",")[0] for entry in entries}
    if not entries:
        return None
    if kinds == {"redis"}:
        return _redis(_values(entries, REDIS_KEYS), environment)
    if kinds == {"local"}:
        return _local(_values(entries, LOCAL_KEYS))
    if kinds == {"local", "redis"}:
        raise CacheConfigError("expected one cache, got a local one and one in Redis")
    wrong = next(entry for entry in entries if entry.partition(",")[0] not in {"local", "redis"})
    raise CacheConfigError(f"expected local,size=BYTES or redis,host=HOST,port=PORT, got {_hidden(wrong)!r}")


def _values(entries: Collection[str], keys: tuple[str, ...]) -> dict[str, str]:
    """The pairs of all entries. A comma belongs to a value unless one of the keys follows: passwords have commas."""
    values: dict[str, str] = {}
    between = re.compile(f",(?=(?:{'|'.join(keys)})=)")
    for entry in entries:
        kind, _, pairs = entry.partition(",")
        for pair in between.split(pairs) if pairs else ():
            key, equals, value = pair.partition("=")
            if not equals or key not in keys:
                raise CacheConfigError(f"the {kind} cache has {', '.join(keys)}, got {_hidden(key)!r}")
            if "," in value and key not in {"user", "password"}:
                raise CacheConfigError(f"the {kind} cache has {', '.join(keys)}, got {_hidden(pair)!r}")
            values[key] = value
    return values


def _local(values: Mapping[str, str]) -> LocalCache | None:
    if "size" not in values:
        raise CacheConfigError("the local cache needs size=BYTES")
    if values.get("compare", "false") not in {"true", "false"}:
        raise CacheConfigError(f"compare: expected true or false, got {values['compare']!r}")
    cache = LocalCache(
        int(_number(values, "size", 0)),
        _number(values, "ttl", 0),
        int(_number(values, "entry", 0)),
        values.get("compare") == "true",
    )
    return cache if cache.size else None


def _redis(values: Mapping[str, str], environment: Mapping[str, str]) -> RedisCache:
    host = values.get("host", "")
    if not host or not (host.startswith("/") or "port" in values):
        raise CacheConfigError("the redis cache needs host=HOST and port=PORT, or host=/PATH/OF/A/UNIX/SOCKET")
    files = {key: Path(values[key]) for key in ("cert", "key", "cacert", "cacert_dir") if key in values}
    default = RedisCache(host)
    cache = RedisCache(
        host=host,
        port=int(_number(values, "port", 0, 65535)),
        user=values.get("user", environment.get(USER_VARIABLE, "")),
        password=values.get("password", environment.get(PASSWORD_VARIABLE, "")),
        db=int(_number(values, "db", 0)),
        connect_timeout=_milliseconds(values, "connect_timeout", default.connect_timeout),
        socket_timeout=_milliseconds(values, "socket_timeout", default.socket_timeout),
        wait_timeout=_milliseconds(values, "wait_timeout", default.wait_timeout),
        pool_size=int(_number(values, "pool_size", default.pool_size, 1024)),
        ttl=_number(values, "ttl", 0),
        prefix=values.get("prefix", default.prefix),
        **files,
    )
    if cache.pool_size < 1:
        raise CacheConfigError("pool_size: expected at least 1 connection, got 0")
    if bool(cache.cert) != bool(cache.key):
        raise CacheConfigError("cert and key: expected both or none")
    for key, path in files.items():
        if not path.exists():
            raise CacheConfigError(f"{key}: there is no file '{path}'")
    return cache


def _number(values: Mapping[str, str], key: str, default: float, most: float = 1 << 62) -> float:
    try:
        number = float(values.get(key, default))
    except ValueError:
        number = -1
    if not 0 <= number <= most:
        bound = "at least 0" if most == 1 << 62 else f"0 to {most:.0f}"
        raise CacheConfigError(f"{key}: expected a number of {bound}, got {values[key]!r}")
    return number


def _milliseconds(values: Mapping[str, str], key: str, default: float) -> float:
    number = _number(values, key, default * 1000, LONGEST_TIMEOUT_MS)
    if number < 1:
        raise CacheConfigError(
            f"{key}: expected 1 to {LONGEST_TIMEOUT_MS} milliseconds, got {values[key]!r}: no request waits for ever"
        )
    return number / 1000


def _hidden(entry: str) -> str:
    """The entry without parts that may be a password."""
    return entry.partition("password")[0]
