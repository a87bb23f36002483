"""Shared memory of clients: the registered regions, who may use them, and how their bytes are accessed.

A region is found by its name and the scope of the caller (`inferd._native.memory.registry`). A block holds its memory:
the registry has one reference, and every request that uses the region has another. Unregistering a region removes its
name and the registry's reference; the memory is released after the last request.

System regions are mapped. The mapping of a trusted client is used in place. Contents of any other mapping are
copied before they are checked or computed with, because the client may change them at any time. A client may also
shorten its object at any time: see `inferd._native.memory.mapping`.
"""

from libc.errno cimport errno
from libc.stdint cimport SIZE_MAX, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy
from posix.unistd cimport close

from inferd._native.atomic cimport fetch_add64, load64
from inferd._native.list cimport list_append, list_remove
from inferd._native.memory.mapping cimport mapping_broken, mapping_free, mapping_guard, mapping_new
from inferd._native.memory.registry cimport (
    ENTERED,
    EVERY_KIND,
    NAME_TAKEN,
    NO_MEMORY,
    REGION_CUDA,
    REGION_SYSTEM,
    SCOPE_FULL,
    Entered,
    Region,
    RegionKind,
    Registry,
    RegionWatch,
    Share,
    regions_give,
    registry_enter,
    registry_find,
    registry_forget,
    registry_leave,
    registry_new,
    registry_remove,
    registry_take,
    registry_use_all,
)
from inferd._native.memory.resource cimport SHARED_WITH_FRIEND, SHARED_WITH_STRANGER, block_give, block_wrap
from inferd._native.protobuf.codec cimport Str
from inferd._native.status cimport STATUS_INTERNAL, STATUS_RESOURCE_EXHAUSTED
from inferd._native.text cimport clip, format_text
from inferd._native.threads cimport Mutex, lock, mutex_init, unlock

import os
import resource
from typing import NamedTuple

cdef enum:
    ALREADY_EXISTS = 6       # the gRPC status
    KEPT_SHARE = 4           # regions keep at most 1/KEPT_SHARE of the descriptors open; connections need the others

cdef int64_t kept_objects = 0  # descriptors that regions keep open; atomic
cdef int64_t regions_made = 0
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
# Regions

cdef Region *region_find(Registry *registry, int64_t scope, Str name) noexcept nogil:
    mapping_guard()
    return registry_find(registry, scope, name)


cdef void region_close(void *owner) noexcept nogil:
    # the last user has left
    cdef Region *region = <Region *>owner
    cdef Registry *registry = region.registry
    tell_watches(region)
    region.close(region)
    if registry != NULL:
        registry_forget(registry, region)
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
    region.number = <uint64_t>fetch_add64(&regions_made, 1) + 1
    region.fd = -1
    region.scope = scope
    region.size = size
    return region


# ---------------------------------------------------------------------------------------------------------------------
# Watches

cdef Mutex watching          # of the lists of watches
mutex_init(&watching, NULL)


cdef void tell_watches(Region *region) noexcept nogil:
    cdef RegionWatch *watch
    lock(&watching)
    while region.watches.first != NULL:
        watch = region.watches.first
        list_remove(&region.watches, watch)
        watch.region = NULL
        watch.closed(watch.owner, region.number)
    unlock(&watching)


cdef bint region_watch(Region *region, RegionWatch *watches, uint32_t count) noexcept nogil:
    cdef RegionWatch *vacant = NULL
    cdef bint watched = False
    cdef uint32_t i
    lock(&watching)
    for i in range(count):
        if watches[i].region == region:
            watched = True
            break
        if watches[i].region == NULL and vacant == NULL:
            vacant = &watches[i]
    if not watched and vacant != NULL:
        vacant.region = region
        list_append(&region.watches, vacant)
        watched = True
    unlock(&watching)
    return watched


cdef void region_unwatch(RegionWatch *watches, uint32_t count) noexcept nogil:
    cdef uint32_t i
    lock(&watching)
    for i in range(count):
        if watches[i].region != NULL:
            list_remove(&watches[i].region.watches, &watches[i])
            watches[i].region = NULL
    unlock(&watching)


# ---------------------------------------------------------------------------------------------------------------------
# Access

cdef char *region_refusal(const Region *region, int64_t offset, int64_t byte_size) noexcept nogil:
    # negative numbers count as very large ones, as in Triton
    cdef uint64_t start = <uint64_t>offset
    cdef uint64_t size = <uint64_t>byte_size
    cdef int length = clip(region.name)
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
        max_count: the most regions at a time; one that was unregistered counts while requests use it.
        max_byte_size: the most bytes of all these regions together.
        scope_count, scope_byte_size: the same for the regions of one scope; None: as for all regions.
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
            regions_give(registry_take(self.registry, 0, EVERY_KIND, 0))
            registry_leave(self.registry)

    def add_system(self, scope: int, name: str, key: str, fd: int, offset: int, byte_size: int, *, trusted: bool,
                   writable: bool, reopened: bool = False, owner: int = 0) -> None:
        """Register a part of a shared memory object.

        Args:
            scope: the user whose region it is, or SHARED.
            name: of the region, in this scope.
            key: of the object, as the client gave it.
            fd: the object, opened for reading, and if `writable` for writing, too. The caller may close it afterwards.
            offset, byte_size: the part, which lies within the object now.
            trusted: use its contents in place; otherwise copy them before use.
            writable: the server may write outputs to it.
            reopened: workers may open and map the object, too.
            owner: `remove_owned` with this number unregisters the region; 0: no owner.

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
        cdef Share own
        cdef Entered entered = registry_enter(registry, region, &own)
        if entered == ENTERED:
            return 0
        if entered == NO_MEMORY:
            raise MemoryError
        name = region.name.data[:region.name.size].decode()
        if entered == NAME_TAKEN:
            raise RegionError(ALREADY_EXISTS, f"shared memory region '{name}' already in manager")
        if entered == SCOPE_FULL:
            raise RegionError(
                STATUS_RESOURCE_EXHAUSTED,
                f"failed to register shared memory region '{name}': {own.count} regions of {own.byte_size} bytes are "
                f"registered or in use, expected at most {registry.scope_count} of {registry.scope_byte_size} bytes "
                f"with this one of {region.size} bytes")
        raise RegionError(  # without figures: a user must not learn about the regions of other users
            STATUS_RESOURCE_EXHAUSTED,
            f"failed to register shared memory region '{name}' of {region.size} bytes: all users together have as "
            "much as the server allows")

    def remove(self, scope: int, kind: int, name: str) -> bool:
        """Unregister a region; whether there was one of this name and kind. Requests that use it are not disturbed."""
        cdef bytes encoded = name.encode()
        cdef Region *region = registry_remove(self.registry, scope, kind, Str(encoded, <uint32_t>len(encoded)))
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
            count = regions_give(registry_take(self.registry, 0, EVERY_KIND, whose))
        return count

    def remove_all(self, scope: int, kind: int) -> int:
        """Unregister all regions of a kind in a scope; how many there were."""
        cdef int64_t whose = scope
        cdef int which = kind
        cdef uint32_t count
        with nogil:
            count = regions_give(registry_take(self.registry, whose, which, 0))
        return count

    def close(self) -> None:
        """Unregister everything."""
        with nogil:
            regions_give(registry_take(self.registry, 0, EVERY_KIND, 0))

    def find(self, scope: int, name: str) -> RegionStatus | None:
        """The region with this name."""
        cdef bytes encoded = name.encode()
        cdef Region *region = region_find(self.registry, scope, Str(encoded, <uint32_t>len(encoded)))
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
        with nogil:
            count = registry_use_all(self.registry, whose, which, &regions)
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
    # Keep the object for workers, which map it, too. If the descriptor cannot be kept, workers get copies.
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


cdef class Use:
    """For tests: keeps a region in use, and reads and writes its bytes as a request does."""

    cdef Region *region

    def __init__(self, Regions regions not None, scope: int, name: str):
        cdef bytes encoded = name.encode()
        self.region = region_find(regions.registry, scope, Str(encoded, <uint32_t>len(encoded)))
        if self.region == NULL:
            raise KeyError(name)

    def __dealloc__(self):
        self.leave()

    def leave(self) -> None:
        """End the use: no other method may be called afterwards."""
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
        """These bytes of the region; None when its object has been shortened."""
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
