"""Small allocations in the front, see the header.

A call takes and gives a dozen small pieces, most of them in libnghttp2. The C library also has lists for each thread,
but only of seven pieces each; with some dozens of calls in flight nearly all allocations would take its slow path.
"""

from libc.stddef cimport size_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy


cdef inline size_t class_of(size_t size) noexcept nogil:
    return SMALL_CLASSES if size > SMALL_LARGEST else (size + SMALL_STEP - 1) // SMALL_STEP


cdef void *small_new(size_t size) noexcept nogil:
    cdef size_t index = class_of(size)
    cdef size_t room = size if index == SMALL_CLASSES else index * SMALL_STEP
    cdef Piece *piece = <Piece *>malloc(sizeof(Piece) + room) if room <= <size_t>-1 - sizeof(Piece) else NULL
    if piece == NULL:
        return NULL
    piece.size_class = index
    return piece + 1


cdef void *small_resize(Smalls *self, void *data, size_t size) noexcept nogil:
    cdef size_t index
    cdef Piece *piece
    cdef void *grown
    if data == NULL:
        return small_take(self, size)
    index = (<Piece *>data - 1).size_class
    if index >= SMALL_CLASSES and size > SMALL_LARGEST:
        if size > <size_t>-1 - sizeof(Piece):
            return NULL
        piece = <Piece *>realloc(<Piece *>data - 1, sizeof(Piece) + size)
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
