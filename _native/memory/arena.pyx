"""Arenas: memory that the server shares with the processes that it starts.

An arena is a memfd, an anonymous file that is in no file system and ends with the last process that has it. It is
sparse: it has its maximum size from the beginning, but only pages that were written exist. So every process maps it
once as a whole, and its use may grow without communication. The pages of free ranges are released
(FALLOC_FL_PUNCH_HOLE). Seals prevent other processes from changing its size.

The server alone allocates from the arena, and keeps the metadata in private memory. So a process that writes where it
should not can corrupt contents, but nothing that the server's own work depends on. And no process can die while it
holds a lock of the arena, because there is none in it. The arena is one slab of a pool (`inferd._native.memory.pool`):
adjacent free ranges are merged, so address space does not fragment. Pages of free memory beyond POOL_LIMIT bytes are
released at once.
"""

from libc.errno cimport errno
from libc.stdint cimport uint8_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset
from posix.unistd cimport close

from inferd._native.atomic cimport fetch_add64, load64
from inferd._native.memory.pool cimport (
    Backing,
    pool_cool,
    pool_free,
    pool_leave,
    pool_new,
    pool_reserve,
    pool_unuse,
    pool_use,
)
from inferd._native.memory.resource cimport (
    LIVE_ARENAS,
    Block,
    BlockView,
    block_give,
    block_view,
    live_add,
    resource_take,
)
from inferd._native.threads cimport lock, unlock

cdef extern from *:
    """
    #ifndef _GNU_SOURCE
    #define _GNU_SOURCE
    #endif
    #include <fcntl.h>
    #include <stdint.h>
    #include <sys/mman.h>
    #include <sys/syscall.h>
    #include <unistd.h>
    #ifndef MFD_CLOEXEC
    #define MFD_CLOEXEC 1U
    #define MFD_ALLOW_SEALING 2U
    #endif
    #ifndef F_ADD_SEALS
    #define F_ADD_SEALS 1033
    #define F_SEAL_SEAL 1
    #define F_SEAL_SHRINK 2
    #define F_SEAL_GROW 4
    #endif
    #ifndef FALLOC_FL_KEEP_SIZE
    #define FALLOC_FL_KEEP_SIZE 1
    #define FALLOC_FL_PUNCH_HOLE 2
    #endif
    extern int fallocate(int fd, int mode, off_t offset, off_t length);
    static inline int inferd_memfd(const char *name, uint64_t size) {
        int fd = (int)syscall(SYS_memfd_create, name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
        if (fd < 0) return -1;
        if (ftruncate(fd, (off_t)size) || fcntl(fd, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW)) {
            close(fd);
            return -1;
        }
        return fd;
    }
    static inline void *inferd_map_arena(int fd, uint64_t size) {
        void *address = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (address == MAP_FAILED) return NULL;
        madvise(address, size, MADV_DONTDUMP);
        return address;
    }
    static inline void inferd_punch(int fd, uint64_t offset, uint64_t size) {
        fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)size);
    }
    """
    int make_memfd "inferd_memfd"(const char *name, uint64_t size) nogil
    void *map_arena "inferd_map_arena"(int fd, uint64_t size) nogil
    void punch "inferd_punch"(int fd, uint64_t offset, uint64_t size) nogil
    int munmap(void *address, size_t size) nogil

cdef uint64_t PAGE = 4096
cdef uint64_t GRAIN = <uint64_t>2 << 20             # of the slab
cdef uint64_t LARGEST_SPACE = <uint64_t>256 << 30
cdef uint64_t SMALLEST_SPACE = <uint64_t>256 << 20  # the least that a limited address space must have
cdef uint64_t POOL_LIMIT = <uint64_t>128 << 20


cdef inline uint64_t rounded(uint64_t size, uint64_t grain) noexcept nogil:
    return (size + grain - 1) // grain * grain


# ---------------------------------------------------------------------------------------------------------------------
# The backing of the pool

cdef void *obtain(void *context, size_t size, void **mark) noexcept nogil:
    # the arena's one slab ends where the mapping ends
    cdef Arena *arena = <Arena *>context
    return arena.base + arena.size - size


cdef void release(void *context, void *address, size_t size, void *mark) noexcept nogil:
    pass  # the whole mapping is unmapped at the end


cdef void cool(void *context, void *address, size_t size) noexcept nogil:
    cdef Arena *arena = <Arena *>context
    punch(arena.fd, <uint64_t>(<uint8_t *>address - arena.base), size)


cdef void end(void *context) noexcept nogil:
    cdef Arena *arena = <Arena *>context
    munmap(arena.base, arena.size)
    close(arena.fd)
    free(arena)
    live_add(LIVE_ARENAS, -1)


# ---------------------------------------------------------------------------------------------------------------------
# The arena

cdef bint map_space(Arena *arena, const char *name) noexcept nogil:
    arena.size = LARGEST_SPACE
    while True:
        arena.fd = make_memfd(name, arena.size)
        arena.base = <uint8_t *>map_arena(arena.fd, arena.size) if arena.fd >= 0 else NULL
        if arena.base != NULL:
            return True
        if arena.fd >= 0:
            close(arena.fd)
        if arena.size <= SMALLEST_SPACE:  # address space is limited (ulimit -v), or there are no memfds
            return False
        arena.size //= 2


cdef Arena *arena_new(const char *name, uint64_t reserved) noexcept nogil:
    cdef Arena *arena = <Arena *>calloc(1, sizeof(Arena))
    cdef Backing backing
    cdef uint64_t space
    if arena == NULL or not map_space(arena, name):
        free(arena)
        return NULL
    memset(&backing, 0, sizeof(Backing))
    backing.obtain = obtain
    backing.release = release
    backing.cool = cool
    backing.end = end
    backing.context = arena
    live_add(LIVE_ARENAS, 1)
    space = arena.size - rounded(reserved, GRAIN)
    arena.pool = pool_new("arena", <long long>space, space, &backing)
    if arena.pool == NULL:
        end(arena)
        return NULL
    arena.pool.most_warm = <long long>POOL_LIMIT
    if not pool_reserve(arena.pool, space):
        pool_free(arena.pool)
        return NULL
    pool_use(arena.pool)  # the arena's holders are users of the pool, as its blocks are; the pool has no other owner
    pool_leave(arena.pool)
    return arena


cdef Arena *arena_share(Arena *arena) noexcept nogil:
    pool_use(arena.pool)
    return arena


cdef void arena_give(Arena *arena) noexcept nogil:
    if arena != NULL:
        pool_unuse(arena.pool)


cdef Block *arena_take(Arena *arena, uint64_t size) noexcept nogil:
    if size > arena.size:
        return NULL
    fetch_add64(&arena.taken, 1)
    return resource_take(&arena.pool.resource, rounded(max(size, <uint64_t>1), PAGE))


cdef uint64_t arena_trim(Arena *arena) noexcept nogil:
    # While pages are released, no thread can take them. A thread that finds nothing else free waits for the lock and
    # looks again.
    cdef uint64_t cooled
    lock(&arena.pool.growth)
    cooled = pool_cool(arena.pool)
    unlock(&arena.pool.growth)
    return cooled


cdef class ArenaHandle:
    """An arena, as Python holds it.

    Args:
        name: what `/proc/<pid>/maps` shows.
        reserved: bytes at the beginning that are never given out.

    Raises:
        OSError: the system gives no memfd, or less than 256 MiB of address space.
    """

    def __cinit__(self, str name not None, reserved: int = 0):
        cdef bytes encoded = name.encode()[:200]
        self.arena = arena_new(encoded, reserved)
        if self.arena == NULL:
            raise OSError(errno, "cannot make an arena of shared memory (memfd_create, mmap)")

    def __dealloc__(self):
        arena_give(self.arena)

    @property
    def fd(self) -> int:
        """The memfd."""
        return self.arena.fd

    @property
    def size(self) -> int:
        """Bytes of address space."""
        return self.arena.size

    @property
    def used(self) -> int:
        """Bytes that are in use."""
        return load64(&self.arena.pool.resource.used)

    @property
    def pooled(self) -> int:
        """Bytes that are free but have their pages, for quick reuse."""
        return load64(&self.arena.pool.warm)

    def trim(self) -> int:
        """Return the pages of all free pieces to the system; returns the number of bytes."""
        cdef uint64_t cooled
        with nogil:
            cooled = arena_trim(self.arena)
        return cooled

    # For tests: a block as Python sees it.

    def _take(self, size: int):
        """(offset, read-only view of `size` bytes); the view holds the block."""
        cdef uint64_t wanted = size
        cdef Block *block = arena_take(self.arena, wanted)
        cdef BlockView view
        if block == NULL:
            raise MemoryError(f"no room for {size} bytes in the arena")
        view = block_view(block, block.data, wanted)
        block_give(block)
        return block.data - self.arena.base, view
