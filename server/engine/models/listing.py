"""The repository index for clients."""

from __future__ import annotations

from collections.abc import Iterable

from inferd._native.protobuf.listing import encode_index
from inferd.server.engine.housekeeping.slices import LARGE, slices
from inferd.server.engine.models.registry import IndexEntry


async def encoded_index(entries: Iterable[IndexEntry]) -> bytes:
    """These entries as an encoded RepositoryIndexResponse."""
    return b"".join([encode_index(part) async for part in slices(entries, LARGE)])
