# The registry of shared memory regions. Used by `inferd._native.memory.shm`, which also declares the structures.

from libc.stdint cimport int64_t, uint32_t, uint64_t

from inferd._native.memory.shm cimport Region, RegionKind, Registry, Share
from inferd._native.protobuf.codec cimport Str

cdef enum:
    EVERY_KIND = -1

cdef enum Entered:
    ENTERED
    NAME_TAKEN
    SCOPE_FULL               # with it the regions of its scope would exceed a bound
    REGISTRY_FULL            # with it all regions together would exceed a bound
    NO_MEMORY

# A registry with one reference, its owner's; NULL: no memory. The bounds of a scope are those of all regions, unless
# the caller lowers them.
cdef Registry *registry_new(int64_t max_count, int64_t max_byte_size) noexcept nogil
# Give one reference back; the last one frees the registry.
cdef void registry_leave(Registry *registry) noexcept nogil

# The region of a scope with this name, with one more reference to its block; NULL: there is none.
cdef Region *registry_find(Registry *registry, int64_t scope, Str name) noexcept nogil
# Add a region, with one more reference to its block. `own` gets the number and the bytes of the regions that its scope
# had before.
cdef Entered registry_enter(Registry *registry, Region *region, Share *own) noexcept nogil
# Remove the region with this name and kind. The caller gets the registry's reference to its block. NULL: there is no
# such region.
cdef Region *registry_remove(Registry *registry, int64_t scope, int kind, Str name) noexcept nogil
# Remove the regions of an owner or, for owner 0, those of a scope and kind (EVERY_KIND: those of all scopes). Returns
# them as a chain for regions_give.
cdef Region *registry_take(Registry *registry, int64_t scope, int kind, uint64_t owner) noexcept nogil
# Give back the reference to the block of each region of a chain; returns the number of regions.
cdef uint32_t regions_give(Region *region) noexcept nogil
# Set `out` to an array from malloc (NULL: no memory) of the regions of a scope and kind, each with one more reference
# to its block. Returns their number.
cdef uint32_t registry_use_all(Registry *registry, int64_t scope, RegionKind kind, Region ***out) noexcept nogil
# A region that was in the registry is closed: do not count it any more, and give back its reference to the registry.
cdef void registry_forget(Registry *registry, const Region *region) noexcept nogil
