# Blocks: reference-counted memory, of the host or lent by another owner. Also the counts of live native objects. Users
# get the structures from here, too; `inferd._native.memory.block` declares them.

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t

from inferd._native.memory.block cimport (
    CLASS_FOREIGN,
    CLASS_LARGE,
    CLASS_LENT,
    SHARED_WITH_FRIEND,
    SHARED_WITH_NOBODY,
    SHARED_WITH_STRANGER,
    Block,
    Resource,
    Sharing,
    release_fn,
)

cdef inline Block *resource_take(Resource *resource, size_t size) noexcept nogil:
    return resource.take(resource, size)

# The value of `used`; host memory counts it by thread.
cdef int64_t resource_used(Resource *resource) noexcept nogil
# The error text for a take without success: "no page-locked memory: asked for 4096 bytes; 300 are in use, 4096 held of
# at most 8192". From malloc; NULL if there is no memory.
cdef char *resource_refusal(Resource *resource, size_t asked) noexcept nogil
# Raises a MemoryError with this text.
cdef int raise_refused(Resource *resource, size_t asked) except -1

# A block of host memory of at least `size` bytes with one reference; NULL if there is no memory.
cdef Block *block_take(size_t size) noexcept nogil
# A sealed block on memory of another owner. NULL if there is no memory for its head; the owner is then not released.
# The thread that gives the last reference back calls `release(owner)` exactly once, possibly without the GIL.
cdef Block *block_wrap(const void *data, size_t size, release_fn release, void *owner) noexcept nogil
# For resources: give a block of CLASS_LENT its first reference, and count it. Returns the same block.
cdef Block *block_lent(Block *block) noexcept nogil
# Whether the caller has the only reference and no other process sees the memory: the caller may write to it.
cdef bint block_is_exclusive(const Block *block) noexcept nogil
# Add a reference; returns the same block.
cdef Block *block_share(Block *block) noexcept nogil
# Give one reference back; the last one frees the memory. NULL is allowed.
cdef void block_give(Block *block) noexcept nogil
# If the memory is shared, replace `block` by a block with a copy of the `size` bytes at `data`, and give `block` back.
# False: no memory.
cdef bint block_own(Block **block, const uint8_t **data, size_t size) noexcept nogil
# The same, also if the memory is not shared.
cdef bint block_replace(Block **block, const uint8_t **data, size_t size) noexcept nogil
# A foreign block that keeps a Python object alive; NULL if there is no memory. Needs the GIL; giving the block back
# does not.
cdef Block *block_of_object(object owner, const void *data, size_t size)
# A block with this text and a NUL behind it; NULL if there is no memory.
cdef Block *text_block(str text)

# Whether these bytes lie in the block.
cdef inline bint block_contains(const Block *block, const uint8_t *data, size_t size) noexcept nogil:
    return size == 0 or (data >= block.data and data + size <= block.data + block.size)


cdef class BlockView:
    # a read-only Python buffer on a part of a block; holds one reference
    cdef Block *block
    cdef const uint8_t *data
    cdef Py_ssize_t size

# A Python view of `size` bytes at `data` inside `block`, sharing the block.
cdef BlockView block_view(Block *block, const uint8_t *data, size_t size)


cdef enum Live:
    # kinds of native objects whose live numbers are counted here; `inferd._native.memory.host` counts blocks
    LIVE_REQUESTS
    LIVE_STREAMS
    LIVE_EXCHANGES
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
