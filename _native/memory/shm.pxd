# The shared memory regions that clients have registered, and access to their bytes.

from libc.stdint cimport int64_t, uint32_t

from inferd._native.memory.registry cimport Region, RegionKind, Registry, RegionWatch
from inferd._native.protobuf.codec cimport Str

cdef enum:
    # Other scopes are users, by number.
    SCOPE_SHARED = -1        # of the regions that every caller may use
    SCOPE_NONE = -2          # of a caller that may use no region
    MAPPED_FROM = 64 << 10   # a worker maps the region of a tensor of at least so many bytes; smaller ones are copied

cdef struct Placement:
    # one tensor of a request in a region
    Placement *next
    Region *region           # one reference of its block
    bint output
    uint32_t tensor          # index of the output
    size_t offset
    size_t size              # bytes of the input, or room for the output

# The region of the scope with this name, with one more reference to its block; NULL if there is none.
cdef Region *region_find(Registry *registry, int64_t scope, Str name) noexcept nogil
# Why this part of a region cannot be used, from malloc; NULL if it can.
cdef char *region_refusal(const Region *region, int64_t offset, int64_t byte_size) noexcept nogil
# Whether all reads and writes of the region so far were valid: the object has not been shortened. Check it after each
# use.
cdef bint region_intact(const Region *region) noexcept nogil
cdef void placements_free(Placement *first) noexcept nogil
# Let one of `count` watches watch a region that is in use, unless one watches it already. False: no watch is free.
cdef bint region_watch(Region *region, RegionWatch *watches, uint32_t count) noexcept nogil
# Free all these watches. After the return `closed` does not run any more.
cdef void region_unwatch(RegionWatch *watches, uint32_t count) noexcept nogil

# The text for callers that may not use shared memory.
cdef const char *SHM_DISABLED


cdef class Regions:
    # a Registry for Python
    cdef Registry *registry
    # Add a region, whose `close` is set, with one more reference to its block. The caller keeps its own reference.
    cdef int enter(self, Region *region) except -1

# A region with copies of `name` and `key`, not in the registry yet, whose block has one reference. `data` may be NULL.
# NULL: no memory.
cdef Region *region_new(RegionKind kind, int64_t scope, bytes name, bytes key, void *data, size_t size) noexcept
