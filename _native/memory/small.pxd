# Small allocations in the front. A piece that is freed waits in a list for the next allocation of its size. This takes
# no lock and a dozen instructions each way.

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t
from libc.stdlib cimport free
from libc.string cimport memset

from inferd._native.assertion cimport assert_that
from inferd._native.memory.spoiling cimport NONSENSE, spoils

cdef enum:
    SMALL_STEP = 16          # bytes between two sizes
    SMALL_CLASSES = 65       # up to 1 KiB; malloc serves larger sizes
    SMALL_LARGEST = (SMALL_CLASSES - 1) * SMALL_STEP

cdef extern from *:
    # How much memory the free pieces of one size may have, in units of SMALL_STEP; none with sanitizers, so that they
    # see every allocation.
    """
    #if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    #define INFERD_SMALL_KEPT 0
    #else
    #define INFERD_SMALL_KEPT 4096
    #endif
    """
    const size_t SMALL_KEPT "INFERD_SMALL_KEPT"

cdef union Piece:
    # the head of a piece; its bytes follow
    Piece *next              # of a free piece
    size_t size_class        # of a piece in use; SMALL_CLASSES: larger than the largest class
    char room[SMALL_STEP]    # aligns the bytes like malloc's

cdef struct Smalls:
    # the free small pieces of the front; all zeros if there is none
    Piece *free[SMALL_CLASSES]
    uint32_t count[SMALL_CLASSES]

# The rest of small_take: no piece of this size is free.
cdef void *small_new(size_t size) noexcept nogil
# Like realloc. NULL: no memory, and `data` is unchanged.
cdef void *small_resize(Smalls *self, void *data, size_t size) noexcept nogil
# Return all free pieces to the C library.
cdef void smalls_clear(Smalls *self) noexcept nogil


cdef inline void *small_take(Smalls *self, size_t size) noexcept nogil:
    # NULL: no memory
    cdef size_t index = (size + SMALL_STEP - 1) // SMALL_STEP
    cdef Piece *piece
    if size > SMALL_LARGEST or self.free[index] == NULL:
        return small_new(size)
    piece = self.free[index]
    self.free[index] = piece.next
    self.count[index] -= 1
    piece.size_class = index
    return piece + 1


cdef inline void small_give(Smalls *self, void *data) noexcept nogil:
    # NULL is allowed
    cdef Piece *piece
    cdef size_t index
    if data == NULL:
        return
    piece = <Piece *>data - 1
    index = piece.size_class
    assert_that(index <= SMALL_CLASSES)  # else it was given before, or its head was overwritten
    if index >= SMALL_CLASSES or self.count[index] * (index + 1) >= SMALL_KEPT:
        free(piece)
        return
    if spoils:
        memset(data, NONSENSE, index * SMALL_STEP)
    piece.next = self.free[index]
    self.free[index] = piece
    self.count[index] += 1
