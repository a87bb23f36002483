# Blocks: reference-counted memory, of the host or lent by a foreign owner; and the ledger of live objects.

from libc.stdint cimport int32_t, int64_t, uint8_t

ctypedef void (*release_fn)(void *owner) noexcept nogil

cdef enum Sharing:
    # who else writes to the memory of a block
    SHARED_WITH_NOBODY
    SHARED_WITH_FRIEND       # a client that is trusted to leave it alone while a request of its own uses it
    SHARED_WITH_STRANGER     # a client that may change it at any time: copy it before anything depends on it

cdef struct Block:
    uint8_t *data            # 256-byte aligned when it comes from a resource; no address of the host's for a GPU's
    size_t size              # usable bytes
    int32_t references       # atomic
    int32_t size_class       # >= 0: a class of host memory; CLASS_LARGE, CLASS_FOREIGN, CLASS_LENT
    Sharing sharing          # of a foreign block; what is shared must not outlive its request
    bint sealed              # others look at it without a reference (a Python object, a client): never written to
    release_fn release       # of foreign and lent blocks: called with `owner` when the last reference goes
    void *owner
    Block *next              # free list of host memory

cdef enum:
    CLASS_LARGE = -1         # host memory of a size that is not kept
    CLASS_FOREIGN = -2       # somebody else's memory; the head is ours
    CLASS_LENT = -3          # somebody else's memory and head: `release` takes back both

# Where blocks come from. The verbs are resource_take and, for every block whatever its resource, block_give.
# Another resource is a structure that begins with this one and hands out blocks of CLASS_LENT.
cdef struct Resource:
    Block *(*take)(Resource *resource, size_t size) noexcept nogil  # one reference; NULL when there is no memory
    const char *name         # "host", "page-locked", ...: for messages
    int64_t limit            # bytes that may be held at most; of host memory 0, which means any number
    int64_t used             # bytes in blocks alive. The counters are atomic.
    int64_t held             # bytes obtained from below
    int64_t peak             # the most that was ever used; of host memory, held
    int64_t refused          # takes that found no memory

cdef inline Block *resource_take(Resource *resource, size_t size) noexcept nogil:
    return resource.take(resource, size)

# `used`, which host memory keeps by thread.
cdef int64_t resource_used(Resource *resource) noexcept nogil
# "no page-locked memory: asked for 4096 bytes; 300 are in use, 4096 held of at most 8192", from malloc; NULL when there
# is none.
cdef char *resource_refusal(Resource *resource, size_t asked) noexcept nogil
# The same as a MemoryError.
cdef int raise_refused(Resource *resource, size_t asked) except -1

# A block of host memory of at least `size` bytes with one reference; NULL when there is no memory.
cdef Block *block_take(size_t size) noexcept nogil
# A sealed block over memory of somebody else; NULL when there is no memory for its head (the owner is then not
# released).
# `release(owner)` is called exactly once, by whichever thread gives the last reference back, possibly without the GIL.
cdef Block *block_wrap(const void *data, size_t size, release_fn release, void *owner) noexcept nogil
# For resources: a block of CLASS_LENT goes out, with one reference. Returns it.
cdef Block *block_lent(Block *block) noexcept nogil
# Whether nobody but the holder of one reference, the caller, can see the memory. Then it may be written to.
cdef bint block_is_exclusive(const Block *block) noexcept nogil
# One more reference; returns the same block.
cdef Block *block_share(Block *block) noexcept nogil
# Give one reference back; the last one returns the memory. NULL is allowed.
cdef void block_give(Block *block) noexcept nogil
# Replace a reference to shared memory by one to a copy of its `size` bytes at `data`; do nothing with memory that is
# not shared. False: no memory.
cdef bint block_own(Block **block, const uint8_t **data, size_t size) noexcept nogil
# The same with memory of any kind.
cdef bint block_replace(Block **block, const uint8_t **data, size_t size) noexcept nogil
# A foreign block that keeps a Python object alive; NULL when there is no memory. Needs the GIL now, but not when it is
# given back.
cdef Block *block_of_object(object owner, const void *data, size_t size)


cdef class BlockView:
    # read-only Python buffer over part of a block; holds one reference
    cdef Block *block
    cdef const uint8_t *data
    cdef Py_ssize_t size

# A Python view of `size` bytes at `data` inside `block`, sharing the block.
cdef BlockView block_view(Block *block, const uint8_t *data, size_t size)


cdef enum Live:
    # kinds of native objects whose number alive is counted here; blocks are counted by `_native.memory.host`
    LIVE_REQUESTS
    LIVE_STREAMS
    LIVE_CONNECTIONS
    LIVE_LANES
    LIVE_ARENAS
    LIVE_KINDS

cdef void live_add(Live kind, int64_t n) noexcept nogil


cdef class Memory:
    # a resource, for Python
    cdef Resource *resource


cdef class Lent:
    # a block, for Python
    cdef Block *block
    cdef Memory memory

# {"used", "held", "peak", "limit", "refused"} of a resource, for Python.
cdef dict usage_of(Resource *resource)
