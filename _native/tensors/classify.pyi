"""The Python surface of the classification extension, for tests and tools."""

from collections.abc import Iterable

def classify_tensor(data: bytes, datatype: str, rows: int, elements: int, k: int, labels: Iterable[str] = ()) -> bytes:
    """The BYTES content with the k best of each row; TypeError, OverflowError or ValueError as classify.pyx says."""
