"""Whether memory that is given back is filled with nonsense, see the header."""

cdef extern from *:
    """
    #ifdef NDEBUG
    #define INFERD_SPOILS 0
    #else
    #define INFERD_SPOILS 1
    #endif
    """
    const bint SPOILS "INFERD_SPOILS"

spoils = SPOILS


def spoil_memory(wanted: bool) -> None:
    """Fill memory with nonsense when it is given back to a pool, or do not; for tests."""
    global spoils
    spoils = wanted
