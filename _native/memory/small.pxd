# Small memory of one thread: what is given back waits in a list of its size for who asks for as much again. No locks,
# and a dozen instructions each way.

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t

cdef enum:
    SMALL_STEP = 16          # bytes by which sizes differ
    SMALL_CLASSES = 65       # up to 1 KiB; larger pieces come from malloc

cdef union Piece:
    # the head of a piece, whose bytes follow it
    Piece *next              # of a free one
    size_t size_class        # of one in use; SMALL_CLASSES: it is larger than those
    char room[SMALL_STEP]    # so that the bytes are aligned as malloc's

cdef struct Smalls:
    # of one thread; zeroed, it is empty
    Piece *free[SMALL_CLASSES]
    uint32_t count[SMALL_CLASSES]

# NULL: no memory.
cdef void *small_take(Smalls *self, size_t size) noexcept nogil
# NULL is allowed.
cdef void small_give(Smalls *self, void *data) noexcept nogil
# As realloc. NULL: no memory, and `data` is still there.
cdef void *small_resize(Smalls *self, void *data, size_t size) noexcept nogil
# Give all that waits back to the C library.
cdef void smalls_clear(Smalls *self) noexcept nogil
