/* Memory of devices and of the host: where it is, who touches it, and whether anything orders that. */

#include "cuda_stub.h"

#include <sys/mman.h>
#include <unistd.h>

Memory *memories;

Memory *find(uint64_t address, int device_side) {
    Memory *dead = NULL;
    for (Memory *m = memories; m; m = m->next)
        if (address >= m->address && address < m->address + m->size &&
            device_side == (m->kind == DEVICE || m->kind == IMPORTED)) {
            if (m->alive) return m;
            dead = m;
        }
    return device_side ? dead : NULL;  /* host addresses are used again, device addresses never */
}

Memory *remember(MemoryKind kind, uint64_t address, size_t size, uint8_t *bytes, int fd) {
    Memory *m = calloc(1, sizeof *m);
    m->kind = kind, m->address = address, m->size = size, m->bytes = bytes, m->fd = fd;
    m->device = current_device, m->alive = 1, m->next = memories;
    return memories = m;
}

void forget(Memory *m) {
    m->alive = 0;
    free(m->written);
    m->written = NULL;
    while (m->accesses) {
        Access *a = m->accesses;
        m->accesses = a->next;
        free(a);
    }
}

uint64_t reserve_addresses(size_t size) {
    void *at = mmap(NULL, size + 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return at == MAP_FAILED ? 0 : (uint64_t)(uintptr_t)at;
}

static int covers(const Clock *clock, const Access *access) { return access->tick <= clock->tick[access->slot]; }

/* Note that an operation touches these bytes; report an earlier access that nothing orders before it. */
void touch(Memory *m, uint64_t address, size_t size, int write, const Stream *stream, const Clock *clock) {
    Access **at = &m->accesses;
    size_t offset = (size_t)(address - m->address);
    while (*at) {
        Access *a = *at;
        int overlap = a->offset < offset + size && offset < a->offset + a->size;
        if (overlap && (write || a->write) && !covers(clock, a))
            violation("stream %d %s %zu bytes at %#llx, which stream %d %s, and no event orders them", stream->slot,
                      write ? "writes" : "reads", size, (unsigned long long)address, a->slot,
                      a->write ? "writes" : "reads");
        if (covers(&host_clock, a) || (write && covers(clock, a) && a->offset >= offset &&
                                       a->offset + a->size <= offset + size)) {
            *at = a->next;
            free(a);
        } else {
            at = &a->next;
        }
    }
    Access *a = malloc(sizeof *a);
    *a = (Access){offset, size, write, stream->slot, clock->tick[stream->slot], m->accesses};
    m->accesses = a;
}

int within(const Memory *m, uint64_t address, size_t size) {
    return m && m->alive && address + size <= m->address + m->size;
}

uint8_t *bytes_of(const Memory *m, uint64_t address) {
    return m ? m->bytes + (address - m->address) : (uint8_t *)(uintptr_t)address;
}

uint64_t checksum(const uint8_t *bytes, size_t size) {
    uint64_t sum = 1469598103934665603ULL, word;
    size_t i = 0;
    for (; i + 8 <= size; i += 8) memcpy(&word, bytes + i, 8), sum = (sum ^ word) * 1099511628211ULL;
    for (; i < size; i++) sum = (sum ^ bytes[i]) * 1099511628211ULL;
    return sum;
}

static CUresult allocate(CUdeviceptr *out, size_t size) {
    if (is_full || memory_used[current_device] + (long long)size > memory_size) return OUT_OF_MEMORY;
    int fd = memfd_create("cuda_stub", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)size)) return OUT_OF_MEMORY;
    uint8_t *bytes = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (bytes == MAP_FAILED) return OUT_OF_MEMORY;
    memset(bytes, RUBBISH, size < 1 << 20 ? size : 1 << 20);
    Memory *m = remember(DEVICE, reserve_addresses(size), size, bytes, fd);
    m->written = calloc(1, size);
    memory_used[current_device] += (long long)size;
    *out = m->address;
    return OK;
}
CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t size) {
    ENTER(out && size) result = allocate(out, size);
    LEAVE;
}
void check_idle(const Memory *m) {
    if (m->pending) violation("%zu bytes of %s memory were freed while %d operations on them were pending", m->size,
                              m->kind == DEVICE || m->kind == IMPORTED ? "device" : "host", m->pending);
    for (const Graph *graph = graphs; graph; graph = graph->next)
        if (graph->is_exec)
            for (const Operation *o = graph->first; o; o = o->next) {
                int used = o->to_memory == m || o->source_memory == m;
                for (int i = 0; i < o->touched_count; i++) used |= o->touched[i].memory == m;
                if (!used) continue;
                violation("%zu bytes of memory were freed that a graph uses, which can still be launched", m->size);
                return;
            }
}
void mark_written(Memory *m, uint64_t address, size_t size) {
    if (m->written) memset(m->written + (address - m->address), 1, size);
}
void check_written(const Memory *m, uint64_t address, size_t size, const char *reader) {
    if (!m->written) return;
    const uint8_t *from = m->written + (address - m->address), *unwritten = memchr(from, 0, size);
    if (unwritten)
        violation("a %s reads %zu bytes at %#llx, of which nobody has written number %zu", reader, size,
                  (unsigned long long)address, (size_t)(unwritten - from));
}
/* What is still pending shall find the memory freed, and not crash the test. */
void unmap(Memory *m) {
    if (!m->pending) munmap(m->bytes, m->size);
    if (m->fd >= 0) close(m->fd);
}
CUresult cuMemFree_v2(CUdeviceptr address) {
    ENTER(1) {
        Memory *m = find(address, 1);
        if (!m || m->kind != DEVICE || m->address != address || !m->alive) {
            violation("an address was freed that is not allocated");
            result = INVALID_VALUE;
        } else {
            check_idle(m);
            memory_used[m->device] -= (long long)m->size;
            unmap(m);
            forget(m);
        }
    }
    LEAVE;
}
CUresult cuMemHostAlloc(void **out, size_t size, unsigned flags) {
    (void)flags;
    ENTER(out && size) {
        void *bytes = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (bytes == MAP_FAILED) result = OUT_OF_MEMORY;
        else remember(PINNED, (uint64_t)(uintptr_t)bytes, size, bytes, -1), *out = bytes;
    }
    LEAVE;
}
CUresult cuMemFreeHost(void *address) {
    ENTER(address) {
        Memory *m = find((uint64_t)(uintptr_t)address, 0);
        if (!m || m->kind != PINNED || m->bytes != address) {
            violation("host memory was freed that is not allocated");
            result = INVALID_VALUE;
        } else {
            check_idle(m);
            unmap(m);
            forget(m);
        }
    }
    LEAVE;
}
CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    ENTER(base && size) {
        Memory *m = find(address, 1);
        if (!m || !m->alive) result = INVALID_VALUE;
        else *base = m->address, *size = m->size;
    }
    LEAVE;
}
CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    ENTER(free_bytes && total) {
        *total = (size_t)memory_size;
        *free_bytes = is_full ? 0 : (size_t)(memory_size - memory_used[current_device]);
    }
    LEAVE;
}
