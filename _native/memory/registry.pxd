# Regions of shared memory, and their registry. `inferd._native.memory.shm` makes and opens them.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from inferd._native.memory.mapping cimport Mapping
from inferd._native.memory.resource cimport Block
from inferd._native.protobuf.codec cimport Str
from inferd._native.threads cimport Mutex

cdef enum RegionKind:
    REGION_SYSTEM            # a POSIX shared memory object
    REGION_CUDA              # memory of a GPU

ctypedef void (*close_fn)(Region *region) noexcept nogil
# The region with this number is closed. Called on any thread, with a lock that all regions share.
ctypedef void (*closed_fn)(void *owner, uint64_t number) noexcept nogil

cdef struct RegionWatch:
    # Of a user that keeps something for a region beyond the last reference to its block, and releases that when the
    # region is closed.
    RegionWatch *previous
    RegionWatch *next
    Region *region           # NULL: this watch is free
    closed_fn closed         # set by the owner, as `owner` is
    void *owner

cdef struct RegionWatches:
    RegionWatch *first
    RegionWatch *last

cdef struct Region:
    Region *next             # in its bucket
    Registry *registry
    RegionKind kind
    uint64_t number          # no other region has or had it
    int64_t scope
    Str name
    uint64_t owner           # the connection with which the region ends; 0: none
    # The registry and each user have a reference to the block; the last one closes the region and frees this structure.
    # `block.data` is the address of the region in this process, NULL if it has none.
    Block *block
    size_t size
    bint writable
    RegionWatches watches
    close_fn close           # releases the fields below; called once, by any thread

    # system
    Str key
    uint64_t offset          # of the region in the object
    Mapping *mapping
    int fd                   # the object of a trusted client, for workers that map it, too; -1: none

    # CUDA
    int32_t device
    uint64_t address         # on the device
    void *handle             # for `close`

cdef enum:
    BUCKETS = 1024

cdef struct Share:
    # What the open regions of one scope have; exists while there are some. The registry's lock protects it.
    Share *next
    int64_t scope
    int64_t count
    int64_t byte_size

cdef struct Registry:
    int32_t references       # one for the owner, and one for each region that is not closed; atomic
    Mutex guard
    Region *buckets[BUCKETS]
    int64_t count            # regions that are not closed, also those without a name. Atomic.
    int64_t byte_size        # their bytes. Atomic.
    int64_t max_count
    int64_t max_byte_size
    Share *shares
    int64_t scope_count      # maximum for one scope
    int64_t scope_byte_size  # maximum of their bytes

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
