from collections.abc import Sequence

from inferd._native.request.lane import LaneHandle
from inferd._native.scheduling.queue import Learnt

def encode_statistics(versions: Sequence[tuple[LaneHandle, Learnt | None, Sequence[tuple[str, int, int]]]]) -> bytes:
    """The statistics of these versions, as entries of an encoded inference.ModelStatisticsResponse.

    The results of two calls, one after the other, are the response with the versions of both.

    Args:
        versions: for each its lane; the estimates of its adaptive delay, or None; and the memory that it uses, as kind,
            index of that kind (0 or more), and bytes.

    Raises:
        MemoryError: there is no memory for it.
    """
