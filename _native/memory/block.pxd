# The structures of a block of memory and of the resource that it comes from. `inferd._native.memory.resource` has their
# functions.

from libc.stdint cimport int32_t, int64_t, uint8_t

ctypedef void (*release_fn)(void *owner) noexcept nogil

cdef enum Sharing:
    # which other process writes to the memory of a block
    SHARED_WITH_NOBODY
    SHARED_WITH_FRIEND       # that of a client that is trusted not to write while its own request uses the memory
    SHARED_WITH_STRANGER     # that of a client that may write at any time: copy the data before their first use

cdef struct Block:
    uint8_t *data            # 256-byte aligned if it comes from a resource; for a GPU, not an address of the host
    size_t size              # usable bytes
    int32_t references       # atomic
    int32_t size_class       # >= 0: a class of host memory; CLASS_LARGE, CLASS_FOREIGN, CLASS_LENT
    Sharing sharing          # of a foreign block; shared memory must not be used after its request
    bint sealed              # a Python object or a client reads it without a reference, so nobody may write to it
    release_fn release       # of foreign and lent blocks: called with `owner` for the last reference
    void *owner
    Block *next              # free list of host memory

cdef enum:
    CLASS_LARGE = -1         # host memory of a size that is not pooled
    CLASS_FOREIGN = -2       # memory of another owner, with a head of ours
    CLASS_LENT = -3          # memory and head of another owner: `release` takes both back

# Where blocks come from: resource_take allocates, and block_give gives any block back, whatever its resource.
# A further resource is a structure that begins with this one and gives out blocks of CLASS_LENT.
cdef struct Resource:
    Block *(*take)(Resource *resource, size_t size) noexcept nogil  # one reference; NULL: no memory
    const char *name         # "host", "page-locked", ...: for messages
    int64_t limit            # bytes that may be held at most; 0 for host memory, which has no limit
    int64_t used             # bytes in live blocks. The counters are atomic.
    int64_t held             # bytes allocated from the system or the device
    int64_t peak             # maximum of `used`; for host memory, of `held`
    int64_t refused          # number of takes that found no memory
