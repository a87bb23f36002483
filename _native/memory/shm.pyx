"""Shared memory of clients: the registered regions, who may use them, and how their bytes are accessed.

A region is found by its name and the scope of the caller. A block holds its memory: the registry has one
reference, and every request that uses the region has another. Unregistering a region removes its name and the
registry's reference; the memory is released after the last request.

System regions are mapped. The mapping of a trusted client is used in place. Contents of any other mapping are
copied before they are checked or computed with, because the client may change them at any time. If a client shortens
its object, nothing is harmed in either case, see `_native.memory.mapping`.
"""

from libc.errno cimport errno
from libc.stdint cimport SIZE_MAX, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy
from posix.unistd cimport close

from _native.atomic cimport fetch_add32, fetch_add64, load64
from _native.memory.mapping cimport mapping_broken, mapping_free, mapping_guard, mapping_new
from _native.memory.resource cimport SHARED_WITH_FRIEND, SHARED_WITH_STRANGER, block_give, block_share, block_wrap
from _native.protobuf.codec cimport Str
from _native.status cimport STATUS_INTERNAL, STATUS_RESOURCE_EXHAUSTED
from _native.text cimport clip, format_text
from _native.threads cimport lock, mutex_destroy, mutex_init, unlock

import os
import resource
from typing import NamedTuple

cdef enum:
    ALREADY_EXISTS = 6       # the gRPC status
    KEPT_SHARE = 4           # one of so many descriptors of the server may keep an object; connections need the others

cdef int64_t kept_objects = 0
cdef int64_t UNLIMITED = resource.RLIM_INFINITY

cdef const char *SHM_DISABLED = (
    b"Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable. Without it, clients "
    b"on a unix socket of the native front door may use objects that their user owns.")

DISABLED = SHM_DISABLED.decode()
SYSTEM = REGION_SYSTEM
CUDA = REGION_CUDA
SHARED = SCOPE_SHARED
NONE = SCOPE_NONE


class RegionError(Exception):
    """A region that cannot be registered: a gRPC status code and a text for the client."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class RegionStatus(NamedTuple):
    """A registered region."""

    kind: int
    name: str
    key: str
    offset: int
    byte_size: int
    device: int


# ---------------------------------------------------------------------------------------------------------------------
# The registry

cdef inline uint32_t bucket_of(int64_t scope, Str name) noexcept nogil:
    # FNV-1a; peers may choose names that collide, but the number of regions is bounded
    cdef uint32_t value = 2166136261
    cdef uint32_t i
    value ^= <uint32_t>scope
    for i in range(name.size):
        value = (value ^ <unsigned char>name.data[i]) * 16777619
    return value & (BUCKETS - 1)


cdef inline bint is_called(const Region *region, int64_t scope, Str name) noexcept nogil:
    return region.scope == scope and region.name.size == name.size and (
        memcmp(region.name.data, name.data, name.size) == 0)


cdef Region **link_to(Registry *registry, int64_t scope, Str name) noexcept nogil:
    # the pointer to this region, or to the NULL at the end of its chain
    cdef Region **link = &registry.buckets[bucket_of(scope, name)]
    while link[0] != NULL and not is_called(link[0], scope, name):
        link = &link[0].next
    return link


cdef Region *region_find(Registry *registry, int64_t scope, Str name) noexcept nogil:
    cdef Region *region
    mapping_guard()
    lock(&registry.guard)
    region = link_to(registry, scope, name)[0]
    if region != NULL:
        block_share(region.block)
    unlock(&registry.guard)
    return region


cdef void registry_leave(Registry *registry) noexcept nogil:
    if fetch_add32(&registry.references, -1) == 1:
        mutex_destroy(&registry.guard)
        free(registry)


cdef Share **share_of(Registry *registry, int64_t scope) noexcept nogil:
    # what the scope has, or where it would be linked; under the lock
    cdef Share **link = &registry.shares
    while link[0] != NULL and link[0].scope != scope:
        link = &link[0].next
    return link


cdef bint share_fits(const Registry *registry, const Share *share, int64_t size) noexcept nogil:
    cdef int64_t count = share.count if share != NULL else 0
    cdef int64_t byte_size = share.byte_size if share != NULL else 0
    return count < registry.scope_count and size <= registry.scope_byte_size - byte_size


cdef bint share_take(Registry *registry, int64_t scope, int64_t size) noexcept nogil:
    # count one region more; False: no memory
    cdef Share **link = share_of(registry, scope)
    if link[0] == NULL:
        link[0] = <Share *>calloc(1, sizeof(Share))
        if link[0] == NULL:
            return False
        link[0].scope = scope
    link[0].count += 1
    link[0].byte_size += size
    return True


cdef void share_give(Registry *registry, int64_t scope, int64_t size) noexcept nogil:
    cdef Share **link = share_of(registry, scope)
    cdef Share *share = link[0]
    share.count -= 1
    share.byte_size -= size
    if share.count == 0:
        link[0] = share.next
        free(share)


cdef Registry *registry_new(int64_t max_count, int64_t max_byte_size) noexcept nogil:
    cdef Registry *registry = <Registry *>calloc(1, sizeof(Registry))
    if registry == NULL:
        return NULL
    registry.references = 1
    mutex_init(&registry.guard, NULL)
    registry.max_count = max_count
    registry.max_byte_size = max_byte_size
    registry.scope_count = max_count
    registry.scope_byte_size = max_byte_size
    return registry


cdef void region_close(void *owner) noexcept nogil:
    # the last user has left
    cdef Region *region = <Region *>owner
    cdef Registry *registry = region.registry
    region.close(region)
    if registry != NULL:
        fetch_add64(&registry.count, -1)
        fetch_add64(&registry.byte_size, -<int64_t>region.size)
        lock(&registry.guard)
        share_give(registry, region.scope, <int64_t>region.size)
        unlock(&registry.guard)
        registry_leave(registry)
    free(region)


cdef Region *region_new(RegionKind kind, int64_t scope, bytes name, bytes key, void *data, size_t size) noexcept:
    cdef Region *region = <Region *>calloc(1, sizeof(Region) + len(name) + len(key))
    cdef char *text
    if region == NULL:
        return NULL
    region.block = block_wrap(data, size, region_close, region)
    if region.block == NULL:
        free(region)
        return NULL
    text = <char *>region + sizeof(Region)
    memcpy(text, <const char *>name, len(name))
    memcpy(text + len(name), <const char *>key, len(key))
    region.name.data = text
    region.name.size = <uint32_t>len(name)
    region.key.data = text + len(name)
    region.key.size = <uint32_t>len(key)
    region.kind = kind
    region.fd = -1
    region.scope = scope
    region.size = size
    return region


cdef enum:
    EVERY_KIND = -1

cdef Region *take_chain(Registry *registry, int64_t scope, int kind, uint64_t owner) noexcept nogil:
    # out of the registry: the regions of an owner or, without one, of a scope and kind, or all
    cdef Region *taken = NULL
    cdef Region *region
    cdef Region **link
    cdef bint wanted
    cdef int i
    lock(&registry.guard)
    for i in range(BUCKETS):
        link = &registry.buckets[i]
        while link[0] != NULL:
            region = link[0]
            if owner:
                wanted = region.owner == owner
            else:
                wanted = kind == EVERY_KIND or (region.scope == scope and <int>region.kind == kind)
            if wanted:
                link[0] = region.next
                region.next = taken
                taken = region
            else:
                link = &region.next
    unlock(&registry.guard)
    return taken


cdef uint32_t use_all(Registry *registry, int64_t scope, RegionKind kind, Region ***out) noexcept nogil:
    # the regions of a scope and kind, each with one more reference to its block, in memory from malloc
    cdef Region *region
    cdef uint32_t count = 0
    cdef int i
    lock(&registry.guard)
    out[0] = <Region **>malloc(max(1, load64(&registry.count)) * sizeof(Region *))
    for i in range(BUCKETS if out[0] != NULL else 0):
        region = registry.buckets[i]
        while region != NULL:
            if region.scope == scope and region.kind == kind:
                block_share(region.block)
                out[0][count] = region
                count += 1
            region = region.next
    unlock(&registry.guard)
    return count


cdef uint32_t give_chain(Region *region) noexcept nogil:
    cdef Region *following
    cdef uint32_t count = 0
    while region != NULL:
        following = region.next
        block_give(region.block)
        region = following
        count += 1
    return count


# ---------------------------------------------------------------------------------------------------------------------
# Access

cdef char *region_refusal(const Region *region, int64_t offset, int64_t byte_size) noexcept nogil:
    # negative numbers are very large ones, as in Triton
    cdef uint64_t start = <uint64_t>offset
    cdef uint64_t size = <uint64_t>byte_size
    cdef int length = clip(region.name.size)
    if start >= region.size:
        return format_text("Invalid offset for shared memory region: '%.*s', expected less than %zu, got %lld",
                           length, region.name.data, region.size, <long long>offset)
    if size > SIZE_MAX - start:
        return format_text(
            "Integer overflow detected: byte_size (%llu) + offset (%llu) exceeds maximum value (%zu) for region '%.*s'",
            <unsigned long long>size, <unsigned long long>start, <size_t>SIZE_MAX, length, region.name.data)
    if start + size > region.size:
        return format_text(
            "Invalid offset + byte size for shared memory region: '%.*s', expected at most %zu, got %llu + %llu",
            length, region.name.data, region.size, <unsigned long long>start, <unsigned long long>size)
    return NULL


cdef bint region_intact(const Region *region) noexcept nogil:
    return region.mapping == NULL or not mapping_broken(region.mapping)


cdef void placements_free(Placement *placement) noexcept nogil:
    cdef Placement *following
    while placement != NULL:
        following = placement.next
        block_give(placement.region.block)
        free(placement)
        placement = following


cdef void close_system(Region *region) noexcept nogil:
    if region.mapping != NULL:
        mapping_free(region.mapping)
    if region.fd >= 0:
        close(region.fd)
        fetch_add64(&kept_objects, -1)


# ---------------------------------------------------------------------------------------------------------------------
# Python

cdef object status_of(const Region *region):
    return RegionStatus(
        <int>region.kind, region.name.data[:region.name.size].decode(), region.key.data[:region.key.size].decode(),
        region.offset, region.size, region.device)


cdef class Regions:
    """The regions that clients have registered; safe to use from any thread.

    Args:
        max_count: regions at a time; those that lost their names count while requests use them.
        max_byte_size: of all of these together.
        scope_count, scope_byte_size: the same for those of one scope; None: no less than for all.
    """

    def __init__(self, *, max_count: int, max_byte_size: int, scope_count=None, scope_byte_size=None):
        self.registry = registry_new(max_count, max_byte_size)
        if self.registry == NULL:
            raise MemoryError
        if scope_count is not None:
            self.registry.scope_count = scope_count
        if scope_byte_size is not None:
            self.registry.scope_byte_size = scope_byte_size

    def __dealloc__(self):
        if self.registry != NULL:
            give_chain(take_chain(self.registry, 0, EVERY_KIND, 0))
            registry_leave(self.registry)

    def add_system(self, scope: int, name: str, key: str, fd: int, offset: int, byte_size: int, *, trusted: bool,
                   writable: bool, reopened: bool = False, owner: int = 0) -> None:
        """Register a part of a shared memory object.

        Args:
            scope: the user whose region it is, or SHARED.
            name: of the region, in this scope.
            key: of the object, as the client gave it.
            fd: the object, opened for what `writable` says; it is not needed afterwards.
            offset, byte_size: the part; the object has it now.
            trusted: use its contents in place; otherwise copy them before use.
            writable: results may be written to it.
            reopened: other processes of the server may map it, too.
            owner: whose `remove_owned` takes it away; 0 for nobody's.

        Raises:
            RegionError: the name is taken, a bound is reached, or the system does not map it.
        """
        cdef Region *region = region_new(REGION_SYSTEM, scope, name.encode(), key.encode(), NULL, byte_size)
        if region == NULL:
            raise MemoryError
        region.close = close_system
        region.offset = offset
        region.writable = writable
        region.owner = owner
        try:
            map_region(region, fd, trusted)
            if trusted and reopened:
                keep_object(region, fd)
            self.enter(region)
        finally:
            block_give(region.block)

    cdef int enter(self, Region *region) except -1:
        cdef Registry *registry = self.registry
        cdef Region **link
        cdef const Share *share
        cdef int64_t own_count = 0, own_bytes = 0
        cdef bint taken = False, full = False, full_scope = False, starved = False
        lock(&registry.guard)
        link = link_to(registry, region.scope, region.name)
        share = share_of(registry, region.scope)[0]
        if share != NULL:
            own_count, own_bytes = share.count, share.byte_size
        if link[0] != NULL:
            taken = True
        elif not share_fits(registry, share, <int64_t>region.size):
            full_scope = True
        elif (load64(&registry.count) >= registry.max_count
                or <int64_t>region.size > registry.max_byte_size - load64(&registry.byte_size)):
            full = True
        elif not share_take(registry, region.scope, <int64_t>region.size):
            starved = True
        else:
            region.registry = registry
            fetch_add32(&registry.references, 1)
            block_share(region.block)
            fetch_add64(&registry.count, 1)
            fetch_add64(&registry.byte_size, <int64_t>region.size)
            link[0] = region
        unlock(&registry.guard)
        name = region.name.data[:region.name.size].decode()
        if taken:
            raise RegionError(ALREADY_EXISTS, f"shared memory region '{name}' already in manager")
        if starved:
            raise MemoryError
        if full_scope:
            raise RegionError(
                STATUS_RESOURCE_EXHAUSTED,
                f"failed to register shared memory region '{name}': {own_count} regions of {own_bytes} bytes are "
                f"registered or in use, expected at most {registry.scope_count} of {registry.scope_byte_size} bytes "
                f"with this one of {region.size} bytes")
        if full:  # what others have is not said
            raise RegionError(
                STATUS_RESOURCE_EXHAUSTED,
                f"failed to register shared memory region '{name}' of {region.size} bytes: all users together have as "
                "much as the server allows")
        return 0

    def remove(self, scope: int, kind: int, name: str) -> bool:
        """Unregister a region of this kind; whether there was one. Requests that use it are not disturbed."""
        cdef bytes encoded = name.encode()
        cdef Str wanted
        cdef Region **link
        cdef Region *region
        wanted.data = encoded
        wanted.size = <uint32_t>len(encoded)
        lock(&self.registry.guard)
        link = link_to(self.registry, scope, wanted)
        region = link[0]
        if region != NULL and region.kind != kind:
            region = NULL
        if region != NULL:
            link[0] = region.next
        unlock(&self.registry.guard)
        if region == NULL:
            return False
        with nogil:
            block_give(region.block)
        return True

    def remove_owned(self, owner: int) -> int:
        """Unregister all regions of an owner; how many there were."""
        cdef uint64_t whose = owner
        cdef uint32_t count
        if whose == 0:
            return 0
        with nogil:
            count = give_chain(take_chain(self.registry, 0, EVERY_KIND, whose))
        return count

    def remove_all(self, scope: int, kind: int) -> int:
        """Unregister all regions of a kind in a scope; how many there were."""
        cdef int64_t whose = scope
        cdef int which = kind
        cdef uint32_t count
        with nogil:
            count = give_chain(take_chain(self.registry, whose, which, 0))
        return count

    def close(self) -> None:
        """Unregister everything."""
        with nogil:
            give_chain(take_chain(self.registry, 0, EVERY_KIND, 0))

    def find(self, scope: int, name: str) -> RegionStatus | None:
        """The region with this name."""
        cdef bytes encoded = name.encode()
        cdef Str wanted
        cdef Region *region
        wanted.data = encoded
        wanted.size = <uint32_t>len(encoded)
        region = region_find(self.registry, scope, wanted)
        if region == NULL:
            return None
        try:
            return status_of(region)
        finally:
            block_give(region.block)

    def entries(self, scope: int, kind: int) -> list:
        """All regions of a kind in a scope, by name."""
        cdef Region **regions = NULL
        cdef int64_t whose = scope
        cdef RegionKind which = <RegionKind><int>kind
        cdef uint32_t count, i
        # nothing of Python under the lock: another thread could have the GIL and wait for the lock
        with nogil:
            count = use_all(self.registry, whose, which, &regions)
        try:
            found = [status_of(regions[i]) for i in range(count)]
        finally:
            for i in range(count):
                block_give(regions[i].block)
            free(regions)
        return sorted(found, key=lambda status: status.name)

    @property
    def count(self) -> int:
        """Regions that are registered or in use."""
        return load64(&self.registry.count)

    @property
    def byte_size(self) -> int:
        """Bytes of all these regions."""
        return load64(&self.registry.byte_size)


cdef int map_region(Region *region, int fd, bint trusted) except -1:
    region.mapping = mapping_new(fd, region.offset, region.size, region.writable)
    if region.mapping == NULL:
        raise RegionError(
            STATUS_INTERNAL,
            f"failed to register shared memory region '{region.name.data[:region.name.size].decode()}': unable to "
            f"process address space: {os.strerror(errno)}")
    region.block.data = region.mapping.data
    region.block.sharing = SHARED_WITH_FRIEND if trusted else SHARED_WITH_STRANGER
    return 0


cdef void keep_object(Region *region, int fd) noexcept:
    # for workers that map it, too; without one they get copies
    cdef int64_t limit
    if region.size < MAPPED_FROM:
        return
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if fetch_add64(&kept_objects, 1) >= limit // KEPT_SHARE and limit != UNLIMITED:
        fetch_add64(&kept_objects, -1)
        return
    try:
        region.fd = os.dup(fd)
    except OSError:
        fetch_add64(&kept_objects, -1)


# For tests: what a request does with a region.

cdef class Use:
    """Keeps a region in use, and reaches its bytes as a request does."""

    cdef Region *region

    def __init__(self, Regions regions not None, scope: int, name: str):
        cdef bytes encoded = name.encode()
        cdef Str wanted
        wanted.data = encoded
        wanted.size = <uint32_t>len(encoded)
        self.region = region_find(regions.registry, scope, wanted)
        if self.region == NULL:
            raise KeyError(name)

    def __dealloc__(self):
        self.leave()

    def leave(self) -> None:
        """The request has ended: nothing else may be called any more."""
        if self.region != NULL:
            block_give(self.region.block)
            self.region = NULL

    def refusal(self, offset: int, byte_size: int) -> str:
        cdef char *text = region_refusal(self.region, offset, byte_size)
        if text == NULL:
            return ""
        try:
            return text.decode()
        finally:
            free(text)

    def read(self, offset: int, size: int) -> bytes | None:
        """None when the object has been shortened."""
        out = bytearray(size)
        cdef char *data = out
        cdef size_t start = offset, count = size
        with nogil:
            memcpy(data, self.region.block.data + start, count)
        return bytes(out) if region_intact(self.region) else None

    def write(self, offset: int, data: bytes) -> bool:
        cdef const char *source = data
        cdef size_t start = offset, count = len(data)
        with nogil:
            memcpy(self.region.block.data + start, source, count)
        return region_intact(self.region)
