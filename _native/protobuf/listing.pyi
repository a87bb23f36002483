from collections.abc import Iterable
from typing import Any

def encode_index(entries: Iterable[tuple[Any, ...]]) -> bytes:
    """Entries of an inference.RepositoryIndexResponse, encoded: tuples that begin with name, version, state, reason.

    The results of two calls, one after the other, are the response with the entries of both.
    """
