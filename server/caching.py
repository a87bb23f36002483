"""The response cache as `--cache-config` describes it.

Triton's form: `--cache-config local,size=1048576`, or one option for each value of a cache,
`--cache-config redis,host=cache.internal --cache-config redis,port=6379`.
"""

from __future__ import annotations

from dataclasses import dataclass

LOCAL_KEYS = ("size", "ttl")
REDIS_KEYS = ("host", "port", "db", "user", "password", "ttl", "timeout")


class CacheConfigError(ValueError):
    """A `--cache-config` that says something else than a cache."""


@dataclass(frozen=True, slots=True)
class LocalCache:
    """Answers in the server's memory."""

    size: int  # bytes
    ttl: float = 0.0  # seconds; 0: for ever


@dataclass(frozen=True, slots=True)
class RedisCache:
    """Answers in a Redis server, shared by all that use it."""

    host: str
    port: int = 6379
    db: int = 0
    user: str = ""
    password: str = ""
    ttl: float = 0.0  # seconds; 0: for ever
    timeout: float = 0.1  # seconds that a question may take before it counts as a miss


CacheConfig = LocalCache | RedisCache | None


def parse_cache_config(entries: tuple[str, ...]) -> CacheConfig:
    """What the options say together; None without any, or for a local cache of size 0.

    Raises:
        CacheConfigError: an entry has another form, an unknown cache or key, a value out of range, or names a second
            cache.
    """
    values: dict[str, str] = {}
    kinds: set[str] = set()
    for entry in entries:
        kind, comma, pairs = entry.partition(",")
        if kind not in ("local", "redis") or not comma:
            raise CacheConfigError(f"expected local,size=BYTES or redis,host=HOST, got {_hidden(entry)!r}")
        kinds.add(kind)
        for pair in pairs.split(","):
            key, equals, value = pair.partition("=")
            if not equals or key not in (LOCAL_KEYS if kind == "local" else REDIS_KEYS):
                known = ", ".join(LOCAL_KEYS if kind == "local" else REDIS_KEYS)
                raise CacheConfigError(f"the {kind} cache has {known}, got {key!r}")
            values[key] = value
    if len(kinds) > 1:
        raise CacheConfigError("there can be one cache, got local and redis")
    if not kinds:
        return None
    return _local(values) if kinds == {"local"} else _redis(values)


def _local(values: dict[str, str]) -> CacheConfig:
    if "size" not in values:
        raise CacheConfigError("the local cache needs size=BYTES")
    cache = LocalCache(int(_number(values, "size", 0)), _number(values, "ttl", 0))
    return cache if cache.size else None


def _redis(values: dict[str, str]) -> CacheConfig:
    if not values.get("host"):
        raise CacheConfigError("the redis cache needs host=HOST")
    return RedisCache(
        values["host"],
        int(_number(values, "port", 6379)),
        int(_number(values, "db", 0)),
        values.get("user", ""),
        values.get("password", ""),
        _number(values, "ttl", 0),
        _number(values, "timeout", 0.1),
    )


def _number(values: dict[str, str], key: str, default: float) -> float:
    try:
        number = float(values.get(key, default))
    except ValueError:
        number = -1
    if not 0 <= number < 1 << 62:
        raise CacheConfigError(f"{key}: expected a number of at least 0, got {values[key]!r}")
    return number


def _hidden(entry: str) -> str:
    """The entry without what might be a password."""
    return entry.partition("password=")[0]
