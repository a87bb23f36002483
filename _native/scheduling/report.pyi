from collections.abc import Sequence

from _native.request.lane import LaneHandle
from _native.scheduling.queue import Learnt

def encode_statistics(versions: Sequence[tuple[LaneHandle, Learnt | None, Sequence[tuple[str, int, int]]]]) -> bytes:
    """What these versions have done, as entries of an encoded inference.ModelStatisticsResponse.

    What two calls return, one after the other, is the response with the versions of both.

    Args:
        versions: of each its lane; what an adaptive delay goes by, or None; and the memory that it uses, as kind,
            which of that kind (0 or more), and bytes.

    Raises:
        MemoryError: there is no memory for it.
    """
