# Shared mappings of files that another process may shorten.

from libc.stdint cimport uint8_t, uint64_t

cdef extern from *:
    """
    #include <stddef.h>
    #include <stdint.h>
    typedef struct {
        uint8_t *start;
        size_t size;
        uint8_t *data;
        int broken;
        unsigned frees;
    } inferd_mapping;
    """
    ctypedef struct Mapping "inferd_mapping":
        # Never moved or freed, because a signal handler walks over all of them.
        uint8_t *start       # page-aligned; NULL: not in use. Atomic.
        size_t size          # in bytes, from `start` on; atomic
        uint8_t *data        # the address of the bytes that were asked for
        int broken           # atomic
        unsigned int frees   # mappings that have left this place; atomic

# Install the handler of SIGBUS, unless it is there. To be called before each use of mappings. False: see errno.
cdef bint mapping_guard() noexcept nogil
# Map `size` bytes of a file (not 0) from `offset` on, which need not be aligned to a page. NULL: see errno.
cdef Mapping *mapping_new(int fd, uint64_t offset, size_t size, bint writable) noexcept nogil
cdef void mapping_free(Mapping *mapping) noexcept nogil
# Whether a thread has accessed a part that the file does not have any more. From that access on the whole mapping reads
# as zeros, and writes to it are lost.
cdef bint mapping_broken(const Mapping *mapping) noexcept nogil
