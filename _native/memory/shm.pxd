# The shared memory regions that clients have registered, and access to their bytes.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from inferd._native.memory.mapping cimport Mapping
from inferd._native.memory.resource cimport Block
from inferd._native.protobuf.codec cimport Str
from inferd._native.threads cimport Mutex

cdef enum RegionKind:
    REGION_SYSTEM            # a POSIX shared memory object
    REGION_CUDA              # memory of a GPU

cdef enum:
    # Other scopes are users, by number.
    SCOPE_SHARED = -1        # of the regions that every caller may use
    SCOPE_NONE = -2          # of a caller that may use no region
    MAPPED_FROM = 64 << 10   # a worker maps the region of a tensor of at least so many bytes; smaller ones are copied

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

cdef struct Placement:
    # one tensor of a request in a region
    Placement *next
    Region *region           # one reference of its block
    bint output
    uint32_t tensor          # index of the output
    size_t offset
    size_t size              # bytes of the input, or room for the output

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
