from collections.abc import Iterable
from typing import Any

def encode_index(entries: Iterable[tuple[Any, ...]]) -> bytes:
    """Entries of an inference.RepositoryIndexResponse, encoded: tuples that begin with name, version, state, reason.

    What two calls return, one after the other, is the response with the entries of both.
    """
