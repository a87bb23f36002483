"""The response cache as `--cache-config` describes it.

Triton's form: `--cache-config local,size=1048576`, or one option for each value of the cache. Its other cache, in a
Redis server, is not served.
"""

from __future__ import annotations

from dataclasses import dataclass

KEYS = ("size", "ttl")


class CacheConfigError(ValueError):
    """A `--cache-config` that says something else than a cache."""


@dataclass(frozen=True, slots=True)
class LocalCache:
    """Answers in the server's memory."""

    size: int  # bytes
    ttl: float = 0.0  # seconds; 0: for ever


CacheConfig = LocalCache | None


def parse_cache_config(entries: tuple[str, ...]) -> CacheConfig:
    """What the options say together; None without any, or for a local cache of size 0.

    Raises:
        CacheConfigError: an entry has another form, an unknown cache or key, or a value out of range.
    """
    values: dict[str, str] = {}
    for entry in entries:
        kind, comma, pairs = entry.partition(",")
        if kind == "redis":
            raise CacheConfigError("a cache in Redis is not served yet, expected local,size=BYTES")
        if kind != "local" or not comma:
            raise CacheConfigError(f"expected local,size=BYTES, got {_hidden(entry)!r}")
        for pair in pairs.split(","):
            key, equals, value = pair.partition("=")
            if not equals or key not in KEYS:
                raise CacheConfigError(f"the local cache has {', '.join(KEYS)}, got {key!r}")
            values[key] = value
    if not values:
        return None
    if "size" not in values:
        raise CacheConfigError("the local cache needs size=BYTES")
    cache = LocalCache(int(_number(values, "size", 0)), _number(values, "ttl", 0))
    return cache if cache.size else None


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
