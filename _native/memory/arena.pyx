"""Arenas: memory that the server shares with the processes that it starts.

An arena is a memfd, an anonymous file that has no name in any file system and is gone with the last process that has
it. It is sparse: as large as it can ever become from the beginning, but made of no more pages than have been written
to. So it is mapped once, by everybody whole, it grows without a word between the processes, and it shrinks by giving
the pages of free ranges back (FALLOC_FL_PUNCH_HOLE). Seals keep the other processes from changing its size.

Who made the arena allocates from it and keeps the books, in memory of its own: a process that writes where it should
not can spoil contents, but nothing that the server's own work depends on, and there is no lock that it could die
with. Ranges have four sizes for each power of two and stay in the list of their size when they are free; the
address space is large enough for that, and the pages of what exceeds POOL_LIMIT free bytes are given back at once.
"""

from libc.errno cimport errno
from libc.stdint cimport uint8_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from posix.unistd cimport close

from _native.atomic cimport fetch_add32
from _native.memory.resource cimport LIVE_ARENAS, Block, BlockView, block_give, block_view, block_wrap, live_add
from _native.threads cimport lock, mutex_destroy, mutex_init, unlock

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
    static inline int inferd_arena_log2(uint64_t n) { return 63 - __builtin_clzll(n); }
    """
    int make_memfd "inferd_memfd"(const char *name, uint64_t size) nogil
    void *map_arena "inferd_map_arena"(int fd, uint64_t size) nogil
    void punch "inferd_punch"(int fd, uint64_t offset, uint64_t size) nogil
    int munmap(void *address, size_t size) nogil
    int floor_log2 "inferd_arena_log2"(uint64_t n) nogil

cdef enum:
    PAGE_LOG2 = 12

cdef uint64_t LARGEST_SPACE = <uint64_t>256 << 30
cdef uint64_t SMALLEST_SPACE = <uint64_t>256 << 20  # what a limited address space must at least have
cdef uint64_t POOL_LIMIT = <uint64_t>128 << 20


cdef inline int class_of(uint64_t size) noexcept nogil:
    cdef int log2
    if size <= (1 << PAGE_LOG2):
        return 0
    log2 = floor_log2(size - 1)
    return (log2 - PAGE_LOG2) * 4 + <int>(((size - 1) >> (log2 - 2)) & 3) + 1


cdef inline uint64_t class_size(int index) noexcept nogil:
    # whole pages: the quarters of the smallest powers of two are rounded up
    cdef uint64_t size
    if index == 0:
        return 1 << PAGE_LOG2
    size = <uint64_t>(4 + (index - 1) % 4 + 1) << (PAGE_LOG2 + (index - 1) // 4 - 2)
    return (size + 4095) & ~<uint64_t>4095


cdef Arena *arena_new(const char *name, uint64_t reserved) noexcept nogil:
    cdef Arena *arena = <Arena *>calloc(1, sizeof(Arena))
    if arena == NULL:
        return NULL
    arena.size = LARGEST_SPACE
    while True:
        arena.fd = make_memfd(name, arena.size)
        arena.base = <uint8_t *>map_arena(arena.fd, arena.size) if arena.fd >= 0 else NULL
        if arena.base != NULL:
            break
        if arena.fd >= 0:
            close(arena.fd)
        if arena.size <= SMALLEST_SPACE:  # address space is limited (ulimit -v), or there are no memfds
            free(arena)
            return NULL
        arena.size //= 2
    arena.top = (reserved + 4095) & ~<uint64_t>4095
    arena.references = 1
    mutex_init(&arena.guard, NULL)
    live_add(LIVE_ARENAS, 1)
    return arena


cdef Arena *arena_share(Arena *arena) noexcept nogil:
    fetch_add32(&arena.references, 1)
    return arena


cdef void arena_give(Arena *arena) noexcept nogil:
    cdef int index
    cdef Range *piece
    if arena == NULL or fetch_add32(&arena.references, -1) != 1:
        return
    for index in range(ARENA_CLASSES):
        while arena.free[index] != NULL:
            piece = arena.free[index]
            arena.free[index] = piece.next
            free(piece)
    munmap(arena.base, arena.size)
    close(arena.fd)
    mutex_destroy(&arena.guard)
    free(arena)
    live_add(LIVE_ARENAS, -1)


cdef Range *carve(Arena *arena, int index) noexcept nogil:
    # a range that was never used before; under the lock
    cdef uint64_t size = class_size(index)
    cdef Range *piece
    if size > arena.size - arena.top:
        return NULL
    piece = <Range *>malloc(sizeof(Range))
    if piece == NULL:
        return NULL
    piece.arena = arena
    piece.offset = arena.top
    piece.size_class = index
    piece.hollow = True
    arena.top += size
    return piece


cdef Block *arena_take(Arena *arena, uint64_t size) noexcept nogil:
    cdef int index
    cdef Range *piece
    cdef Block *block
    if size > arena.size:
        return NULL
    index = class_of(size)
    if index >= ARENA_CLASSES:
        return NULL
    lock(&arena.guard)
    piece = arena.free[index]
    if piece != NULL:
        arena.free[index] = piece.next
        if not piece.hollow:
            arena.pooled -= class_size(index)
    else:
        piece = carve(arena, index)
    if piece != NULL:
        arena.used += class_size(index)
        arena.taken += 1
    unlock(&arena.guard)
    if piece == NULL:
        return NULL
    block = block_wrap(arena.base + piece.offset, class_size(index), give_range, piece)
    if block == NULL:
        put_back(piece)
        return NULL
    arena_share(arena)
    return block


cdef void put_back(Range *piece) noexcept nogil:
    cdef Arena *arena = piece.arena
    cdef uint64_t size = class_size(piece.size_class)
    lock(&arena.guard)
    piece.hollow = arena.pooled + size > POOL_LIMIT
    if piece.hollow:
        punch(arena.fd, piece.offset, size)
    else:
        arena.pooled += size
    piece.next = arena.free[piece.size_class]
    arena.free[piece.size_class] = piece
    arena.used -= size
    unlock(&arena.guard)


cdef void give_range(void *owner) noexcept nogil:
    cdef Arena *arena = (<Range *>owner).arena
    put_back(<Range *>owner)
    arena_give(arena)


cdef uint64_t arena_trim(Arena *arena) noexcept nogil:
    cdef uint64_t freed = 0
    cdef int index
    cdef Range *piece
    lock(&arena.guard)
    for index in range(ARENA_CLASSES):
        piece = arena.free[index]
        while piece != NULL:
            if not piece.hollow:
                punch(arena.fd, piece.offset, class_size(index))
                piece.hollow = True
                freed += class_size(index)
            piece = piece.next
    arena.pooled = 0
    unlock(&arena.guard)
    return freed


cdef class ArenaHandle:
    """An arena, as Python holds it.

    Args:
        name: what `/proc/<pid>/maps` shows.
        reserved: bytes at the beginning that are never handed out.

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
        return self.arena.used

    @property
    def pooled(self) -> int:
        """Bytes that are free but have their pages, for quick reuse."""
        return self.arena.pooled

    def trim(self) -> int:
        """Give the pages of everything free back to the system; the number of bytes."""
        return arena_trim(self.arena)

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
