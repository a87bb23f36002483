"""Small memory of one thread, see the header.

A call takes and gives a dozen small pieces, most of them in libnghttp2. The C library serves a thread from lists of its
own, too, but of seven pieces each, so where some dozens of calls are in flight it goes the long way for nearly all.

Of each size some free pieces are kept. In debug builds none is, so that the sanitizers see each as it is.
"""

from libc.stddef cimport size_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy

cdef extern from *:
    """
    #ifdef NDEBUG
    #define INFERD_SMALL_KEPT (64 << 10)
    #else
    #define INFERD_SMALL_KEPT 0
    #endif
    """
    const size_t KEPT "INFERD_SMALL_KEPT"  # bytes of free pieces of one size

cdef enum:
    HEAD = sizeof(Piece)
    LARGEST = (SMALL_CLASSES - 1) * SMALL_STEP


cdef inline size_t class_of(size_t size) noexcept nogil:
    if size > LARGEST:
        return SMALL_CLASSES
    return (size + SMALL_STEP - 1) // SMALL_STEP


cdef void *small_take(Smalls *self, size_t size) noexcept nogil:
    cdef size_t wanted = class_of(size)
    cdef Piece *piece
    if wanted < SMALL_CLASSES:
        piece = self.free[wanted]
        if piece != NULL:
            self.free[wanted] = piece.next
            self.count[wanted] -= 1
            piece.size_class = wanted
            return piece + 1
        size = wanted * SMALL_STEP
    if size > <size_t>-1 - HEAD:
        return NULL
    piece = <Piece *>malloc(HEAD + size)
    if piece == NULL:
        return NULL
    piece.size_class = wanted
    return piece + 1


cdef void small_give(Smalls *self, void *data) noexcept nogil:
    cdef Piece *piece = <Piece *>data - 1
    cdef size_t index
    if data == NULL:
        return
    index = piece.size_class
    if index >= SMALL_CLASSES or self.count[index] * (HEAD + index * SMALL_STEP) >= KEPT:
        free(piece)
        return
    piece.next = self.free[index]
    self.free[index] = piece
    self.count[index] += 1


cdef void *small_resize(Smalls *self, void *data, size_t size) noexcept nogil:
    cdef size_t index
    cdef Piece *piece
    cdef void *grown
    if data == NULL:
        return small_take(self, size)
    index = (<Piece *>data - 1).size_class
    if index >= SMALL_CLASSES and size > LARGEST:
        if size > <size_t>-1 - HEAD:
            return NULL
        piece = <Piece *>realloc(<Piece *>data - 1, HEAD + size)
        return piece + 1 if piece != NULL else NULL
    if class_of(size) <= index < SMALL_CLASSES:
        return data
    grown = small_take(self, size)
    if grown != NULL:
        memcpy(grown, data, min(size, index * SMALL_STEP))
        small_give(self, data)
    return grown


cdef void smalls_clear(Smalls *self) noexcept nogil:
    cdef Piece *piece
    cdef size_t index
    for index in range(<size_t>SMALL_CLASSES):
        while self.free[index] != NULL:
            piece = self.free[index]
            self.free[index] = piece.next
            free(piece)
        self.count[index] = 0
