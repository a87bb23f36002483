"""The registry of shared memory regions: found by scope and name, and bounded in number and bytes.

There are bounds for all regions and for those of one scope. A region counts until it is closed, which is after the
last request that uses it. So a client cannot exceed the bounds by unregistering regions that its requests still use.

The registry has a lock, under which no code of Python runs: another thread could have the GIL and wait for the lock.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp

from inferd._native.assertion cimport assert_that
from inferd._native.atomic cimport fetch_add32, fetch_add64, load64
from inferd._native.memory.resource cimport block_give, block_share
from inferd._native.protobuf.codec cimport Str
from inferd._native.threads cimport lock, mutex_destroy, mutex_init, unlock


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


cdef void registry_leave(Registry *registry) noexcept nogil:
    if fetch_add32(&registry.references, -1) == 1:
        mutex_destroy(&registry.guard)
        free(registry)


# ---------------------------------------------------------------------------------------------------------------------
# By name

cdef inline uint32_t bucket_of(int64_t scope, Str name) noexcept nogil:
    # FNV-1a. Clients may choose names that collide, but the number of regions is bounded.
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


cdef Region *registry_find(Registry *registry, int64_t scope, Str name) noexcept nogil:
    cdef Region *region
    lock(&registry.guard)
    region = link_to(registry, scope, name)[0]
    if region != NULL:
        block_share(region.block)
    unlock(&registry.guard)
    return region


cdef Region *registry_remove(Registry *registry, int64_t scope, int kind, Str name) noexcept nogil:
    cdef Region **link
    cdef Region *region
    lock(&registry.guard)
    link = link_to(registry, scope, name)
    region = link[0]
    if region != NULL and <int>region.kind != kind:
        region = NULL
    if region != NULL:
        link[0] = region.next
    unlock(&registry.guard)
    return region


# ---------------------------------------------------------------------------------------------------------------------
# Bounds

cdef Share **share_of(Registry *registry, int64_t scope) noexcept nogil:
    # the pointer to the share of the scope, or to the NULL at the end of the list; with the lock held
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
    assert_that(share != NULL and share.count > 0 and share.byte_size >= size)
    share.count -= 1
    share.byte_size -= size
    if share.count == 0:
        link[0] = share.next
        free(share)


cdef Entered registry_enter(Registry *registry, Region *region, Share *own) noexcept nogil:
    cdef Region **link
    cdef const Share *share
    cdef Entered entered = ENTERED
    own.count = own.byte_size = 0
    lock(&registry.guard)
    link = link_to(registry, region.scope, region.name)
    share = share_of(registry, region.scope)[0]
    if share != NULL:
        own[0] = share[0]
    if link[0] != NULL:
        entered = NAME_TAKEN
    elif not share_fits(registry, share, <int64_t>region.size):
        entered = SCOPE_FULL
    elif (load64(&registry.count) >= registry.max_count
            or <int64_t>region.size > registry.max_byte_size - load64(&registry.byte_size)):
        entered = REGISTRY_FULL
    elif not share_take(registry, region.scope, <int64_t>region.size):
        entered = NO_MEMORY
    else:
        region.registry = registry
        fetch_add32(&registry.references, 1)
        block_share(region.block)
        fetch_add64(&registry.count, 1)
        fetch_add64(&registry.byte_size, <int64_t>region.size)
        link[0] = region
    unlock(&registry.guard)
    return entered


cdef void registry_forget(Registry *registry, const Region *region) noexcept nogil:
    fetch_add64(&registry.count, -1)
    fetch_add64(&registry.byte_size, -<int64_t>region.size)
    lock(&registry.guard)
    share_give(registry, region.scope, <int64_t>region.size)
    unlock(&registry.guard)
    registry_leave(registry)


# ---------------------------------------------------------------------------------------------------------------------
# Several regions

cdef Region *registry_take(Registry *registry, int64_t scope, int kind, uint64_t owner) noexcept nogil:
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


cdef uint32_t registry_use_all(Registry *registry, int64_t scope, RegionKind kind, Region ***out) noexcept nogil:
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


cdef uint32_t regions_give(Region *region) noexcept nogil:
    cdef Region *following
    cdef uint32_t count = 0
    while region != NULL:
        following = region.next
        block_give(region.block)
        region = following
        count += 1
    return count
