# Small memory of one thread: what is given back waits in a list of its size for who asks for as much again. No locks,
# and a dozen instructions each way.

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t
from libc.stdlib cimport free

cdef enum:
    SMALL_STEP = 16          # bytes by which sizes differ
    SMALL_CLASSES = 65       # up to 1 KiB; larger pieces come from malloc
    SMALL_LARGEST = (SMALL_CLASSES - 1) * SMALL_STEP

cdef extern from *:
    # what free pieces of one size have together at most, in steps; in debug builds none waits, so that the sanitizers
    # see each as it is
    """
    #ifdef NDEBUG
    #define INFERD_SMALL_KEPT 4096
    #else
    #define INFERD_SMALL_KEPT 0
    #endif
    """
    const size_t SMALL_KEPT "INFERD_SMALL_KEPT"

cdef union Piece:
    # the head of a piece, whose bytes follow it
    Piece *next              # of a free one
    size_t size_class        # of one in use; SMALL_CLASSES: it is larger than those
    char room[SMALL_STEP]    # so that the bytes are aligned as malloc's

cdef struct Smalls:
    # of one thread; zeroed, it is empty
    Piece *free[SMALL_CLASSES]
    uint32_t count[SMALL_CLASSES]

# What small_take leaves to it: no piece of this size waits.
cdef void *small_new(size_t size) noexcept nogil
# As realloc. NULL: no memory, and `data` is still there.
cdef void *small_resize(Smalls *self, void *data, size_t size) noexcept nogil
# Give all that waits back to the C library.
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
    if index >= SMALL_CLASSES or self.count[index] * (index + 1) >= SMALL_KEPT:
        free(piece)
        return
    piece.next = self.free[index]
    self.free[index] = piece
    self.count[index] += 1
