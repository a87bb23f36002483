# Shared mappings of files that somebody else may shorten.

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
    } inferd_mapping;
    """
    ctypedef struct Mapping "inferd_mapping":
        # Never moved or freed: a signal handler looks at all of them.
        uint8_t *start       # page-aligned; NULL: not in use. Atomic.
        size_t size          # from there
        uint8_t *data        # where the wanted bytes begin
        int broken           # atomic

# To be called before mappings are used: see that touching them cannot end the process. False: errno.
cdef bint mapping_guard() noexcept nogil
# Map `size` bytes of a file from `offset` on, which need not be aligned to a page; size must not be 0. NULL: see errno.
cdef Mapping *mapping_new(int fd, uint64_t offset, size_t size, bint writable) noexcept nogil
cdef void mapping_free(Mapping *mapping) noexcept nogil
# Whether somebody has touched a part that the file does not have any more. What was read since then is zeros, what was
# written is lost, in the whole mapping and for good.
cdef bint mapping_broken(const Mapping *mapping) noexcept nogil
