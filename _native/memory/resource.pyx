"""Blocks of memory with counted references, where they come from, and the ledger of live native objects.

A block is taken from a resource with one reference, shared, and given back; the last reference returns it. Host memory
is the resource of messages (`inferd._native.memory.host`); others lend blocks whose `release` takes them back.
"""

cimport cython
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_FillInfo
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int32_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from inferd._native.assertion cimport assert_that
from inferd._native.atomic cimport fetch_add32, fetch_add64, load32, load64
from inferd._native.memory.common_pool cimport common_cool, common_is_still, common_keep, common_resource
from inferd._native.memory.host cimport (
    host_blocks,
    host_count,
    host_free,
    host_give,
    host_pooled,
    host_take,
    host_trim,
)
from inferd._native.text cimport format_text

cdef int64_t live[LIVE_KINDS]


cdef void live_add(Live kind, int64_t n) noexcept nogil:
    cdef int64_t before = fetch_add64(&live[<int>kind], n)
    assert_that(before + n >= 0)


cdef Block *block_take(size_t size) noexcept nogil:
    return host_take(size)


cdef Block *block_wrap(const void *data, size_t size, release_fn release, void *owner) noexcept nogil:
    cdef Block *block = <Block *>malloc(sizeof(Block))
    if block == NULL:
        return NULL
    block.data = <uint8_t *>data
    block.size = size
    block.references = 1
    block.size_class = CLASS_FOREIGN
    block.sharing = SHARED_WITH_NOBODY
    block.sealed = True
    block.release = release
    block.owner = owner
    host_count(1)
    return block


cdef Block *block_lent(Block *block) noexcept nogil:
    assert_that(block.references == 0)
    block.references = 1
    block.sealed = False
    host_count(1)
    return block


cdef bint block_is_exclusive(const Block *block) noexcept nogil:
    return not block.sealed and block.sharing == SHARED_WITH_NOBODY and load32(&block.references) == 1


cdef Block *block_share(Block *block) noexcept nogil:
    cdef int32_t before = fetch_add32(&block.references, 1)
    assert_that(before > 0)
    return block


cdef void block_give(Block *block) noexcept nogil:
    cdef int32_t before
    cdef bint lent
    if block == NULL:
        return
    before = fetch_add32(&block.references, -1)
    assert_that(before > 0)
    if before != 1:
        return
    if block.size_class >= CLASS_LARGE:
        host_give(block)
        return
    host_count(-1)
    lent = block.size_class == CLASS_LENT  # then `release` takes the head back, too
    block.release(block.owner)
    if not lent:
        free(block)


cdef bint block_own(Block **block, const uint8_t **data, size_t size) noexcept nogil:
    return block[0].sharing == SHARED_WITH_NOBODY or block_replace(block, data, size)


cdef bint block_replace(Block **block, const uint8_t **data, size_t size) noexcept nogil:
    cdef Block *own = block_take(size)
    if own == NULL:
        return False
    memcpy(own.data, data[0], size)
    block_give(block[0])
    block[0] = own
    data[0] = own.data
    return True


# ---------------------------------------------------------------------------------------------------------------------
# Resources

cdef int64_t resource_used(Resource *resource) noexcept nogil:
    return load64(&resource.held) - host_free() if resource == common_resource() else load64(&resource.used)


cdef char *resource_refusal(Resource *resource, size_t asked) noexcept nogil:
    cdef int64_t limit = resource.limit
    if resource == common_resource():
        return format_text("no %s memory: asked for %zu bytes; %lld are in use, %lld held", resource.name, asked,
                           <long long>resource_used(resource), <long long>load64(&resource.held))
    return format_text("no %s memory: asked for %zu bytes; %lld are in use, %lld held of at most %lld", resource.name,
                       asked, <long long>resource_used(resource), <long long>load64(&resource.held), <long long>limit)


cdef int raise_refused(Resource *resource, size_t asked) except -1:
    cdef char *text = resource_refusal(resource, asked)
    try:
        raise MemoryError((<bytes>text).decode() if text != NULL else "out of memory")
    finally:
        free(text)


# ---------------------------------------------------------------------------------------------------------------------
# Python

cdef void release_object(void *owner) noexcept nogil:
    with gil:
        Py_DECREF(<object>owner)


cdef Block *block_of_object(object owner, const void *data, size_t size):
    cdef Block *block = block_wrap(data, size, release_object, <void *>owner)
    if block != NULL:
        Py_INCREF(owner)
    return block


cdef Block *text_block(str text):
    cdef bytes encoded = text.encode("utf-8", "replace")
    cdef Block *block = block_take(len(encoded) + 1)
    if block != NULL:
        memcpy(block.data, <const char *>encoded, len(encoded) + 1)
    return block


cdef class BlockView:
    """Read-only buffer over part of a block, for handing its bytes to Python without a copy."""

    def __init__(self):
        raise TypeError("BlockView cannot be created from Python")

    def __dealloc__(self):
        block_give(self.block)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, <void *>self.data, self.size, 1, flags & ~PyBUF_WRITABLE)

    def __len__(self):
        return self.size


cdef BlockView block_view(Block *block, const uint8_t *data, size_t size):
    cdef BlockView view = BlockView.__new__(BlockView)
    assert_that(block_contains(block, data, size))
    view.block = block_share(block)
    view.data = data
    view.size = <Py_ssize_t>size
    return view


_further = {}                # counters that other modules have added


def add_counter(name: str, count) -> None:
    """Add a counter: `live_counters` also reports what `count` returns."""
    _further[name] = count


def live_counters() -> dict[str, int]:
    """Native objects alive now, by kind. All are zero when no connection is open and no model is loaded."""
    return {name: count() for name, count in _further.items()} | {
        "blocks": host_blocks(),
        "requests": load64(&live[<int>LIVE_REQUESTS]),
        "streams": load64(&live[<int>LIVE_STREAMS]),
        "exchanges": load64(&live[<int>LIVE_EXCHANGES]),
        "connections": load64(&live[<int>LIVE_CONNECTIONS]),
        "lanes": load64(&live[<int>LIVE_LANES]),
        "arenas": load64(&live[<int>LIVE_ARENAS]),
    }


def pooled() -> int:
    """Free bytes of host memory that the pool keeps for reuse."""
    return host_pooled()


cdef dict usage_of(Resource *resource):
    return {
        "used": resource_used(resource),
        "held": load64(&resource.held),
        "peak": load64(&resource.peak),
        "limit": resource.limit,
        "refused": load64(&resource.refused),
    }


cdef class Memory:
    """A resource of memory; the subclass says where the memory lies."""

    def __init__(self, *_, **__):
        if self.resource == NULL:
            raise TypeError("Memory is the base of resources; host memory is inferd._native.memory.resource.host()")

    @property
    def name(self) -> str:
        return self.resource.name.decode()

    def usage(self) -> dict[str, int]:
        """The bytes that blocks have (`used`), those from the system or the device (`held`), the maximum of `used`, or
        of host memory of `held` (`peak`), the `limit` (0: none), and the number of takes that found no memory
        (`refused`)."""
        return usage_of(self.resource)

    def take(self, size: int) -> Lent:
        """A block of at least `size` bytes, given back when the object is deleted.

        Raises:
            MemoryError: the text says what was asked for, what is held, and the limit.
        """
        cdef Lent lent = Lent.__new__(Lent)
        cdef size_t wanted = size
        with nogil:
            lent.block = resource_take(self.resource, wanted)
        lent.memory = self
        if lent.block == NULL:
            raise_refused(self.resource, wanted)
        return lent

    def trim(self) -> int:
        """Return memory that no block uses to the system; returns the number of bytes."""
        return trim()


@cython.no_gc
cdef class Lent:
    """A block of a resource, as long as this object lives."""

    def __init__(self):
        raise TypeError("a Lent is made by Memory.take")

    def __dealloc__(self):
        block_give(self.block)

    @property
    def address(self) -> int:
        """The address of the first byte; on a device for memory of a device."""
        return <uintptr_t>self.block.data

    @property
    def size(self) -> int:
        """The size in bytes: at least that asked for."""
        return self.block.size


def host() -> Memory:
    """Host memory: without a limit."""
    cdef Memory memory = Memory.__new__(Memory)
    memory.resource = common_resource()
    return memory


def trim() -> int:
    """Return free blocks to the system, except those in lists of other threads; returns the number of bytes."""
    return host_trim()


def cool() -> int:
    """Return memory to the system that has been free since the last few calls; returns the number of bytes.

    To be called about once a second, but not on the event loop: unmapping a gigabyte takes long.
    """
    cdef int64_t dropped
    with nogil:
        dropped = common_cool()
    return dropped


def is_still() -> bool:
    """Whether no block was given back to the pool since the last `cool`."""
    return common_is_still()


def keep_at_most(size: int) -> None:
    """Keep at most so many free bytes of host memory for reuse; 128 MiB unless this is called."""
    common_keep(size)


# For tests: a block as Python sees it.

def _take(size: int):
    """A view over a new block of `size` bytes; the view holds the only reference."""
    cdef size_t wanted = size
    cdef Block *block = block_take(wanted)
    cdef BlockView view
    if block == NULL:
        raise MemoryError(f"no memory for a block of {size} bytes")
    view = block_view(block, block.data, wanted)
    block_give(block)
    return view
