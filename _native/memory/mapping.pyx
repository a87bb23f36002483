"""Shared mappings of files that another process may shorten.

An access to a mapped page that the file does not have any more raises SIGBUS, which ends the process. A handler
of that signal replaces the mapping by zeros and marks it as broken. So the thread continues, and can see afterwards
that the data it has read are invalid. The Wayland library treats the memory of its clients like that
(https://gitlab.freedesktop.org/wayland/wayland, "src/wayland-shm.c").

A process has one handler of SIGBUS, and another library may replace it. `mapping_guard` checks that before each use,
and installs this handler again, in front of the other one. It works in threads that do not block SIGBUS. In a system
call it does not: the call returns EFAULT. So bytes of a mapping are copied before they are passed to a system call.
"""

from libc.stdint cimport uint8_t, uint64_t

from inferd._native.threads cimport Mutex, lock, mutex_init, unlock

cdef extern from *:
    """
    #include <errno.h>
    #include <signal.h>
    #include <string.h>
    #include <sys/mman.h>
    #include <unistd.h>

    enum { INFERD_MAPPINGS = 4096 };
    static inferd_mapping inferd_mappings[INFERD_MAPPINGS];
    static int inferd_mappings_used;             /* 1 + the highest place that was ever in use; atomic */
    static struct sigaction inferd_sigbus_before;

    static uint8_t *inferd_start(const inferd_mapping *mapping) {
        return __atomic_load_n(&mapping->start, __ATOMIC_ACQUIRE);
    }

    /* Reads the start and the size of one mapping; 0 if there is none, or another one takes the place meanwhile. */
    static int inferd_extent(const inferd_mapping *mapping, uint8_t **start, size_t *size) {
        unsigned frees = __atomic_load_n(&mapping->frees, __ATOMIC_ACQUIRE);
        *start = inferd_start(mapping);
        *size = __atomic_load_n(&mapping->size, __ATOMIC_RELAXED);
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        return *start && __atomic_load_n(&mapping->frees, __ATOMIC_RELAXED) == frees;
    }

    /* Puts zeros where the address lies in one of the mappings. It runs in a handler: nothing but system calls. While
       it looks, other threads map and unmap. The mapping with the address stays, because the thread that accesses it
       has a reference. A place that changes is another mapping's: the start of the one before with the size of the one
       after might reach to the address, and the zeros would replace what lies there. */
    static int inferd_patch(uintptr_t address) {
        int used = __atomic_load_n(&inferd_mappings_used, __ATOMIC_ACQUIRE);
        uint8_t *start;
        size_t size;
        for (int i = 0; i < used; i++) {
            inferd_mapping *mapping = &inferd_mappings[i];
            if (!inferd_extent(mapping, &start, &size) || address - (uintptr_t)start >= size) continue;
            __atomic_store_n(&mapping->broken, 1, __ATOMIC_RELEASE);  /* before any thread can read the zeros */
            return mmap(start, size, PROT_READ | PROT_WRITE,
                        MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) != MAP_FAILED;
        }
        return 0;
    }

    /* Whether no other handler is left to try: there is none; or the other one has had this fault already, and has
       raised the signal again, as crash reporters do, or returned to the instruction that faults. */
    static int inferd_is_last(const siginfo_t *info) {
        static __thread const void *passed_on;
        const struct sigaction *before = &inferd_sigbus_before;
        const void *fault = info->si_code > 0 ? info->si_addr : NULL;
        int again = passed_on && (!fault || fault == passed_on);
        passed_on = fault ? fault : (const void *)before;
        return again || (!(before->sa_flags & SA_SIGINFO) &&
                         (before->sa_handler == SIG_DFL || before->sa_handler == SIG_IGN));
    }

    static void inferd_on_sigbus(int number, siginfo_t *info, void *context) {
        int kept = errno;
        if (info->si_code == BUS_ADRERR && inferd_patch((uintptr_t)info->si_addr)) {
            errno = kept;
        } else if (inferd_is_last(info)) {       /* end the process, as it would without this handler */
            signal(number, SIG_DFL);
            raise(number);
        } else if (inferd_sigbus_before.sa_flags & SA_SIGINFO) {
            inferd_sigbus_before.sa_sigaction(number, info, context);
        } else {
            inferd_sigbus_before.sa_handler(number);
        }
    }

    static int inferd_is_guarded(void) {
        struct sigaction now;
        return sigaction(SIGBUS, NULL, &now) == 0 && (now.sa_flags & SA_SIGINFO) &&
               now.sa_sigaction == inferd_on_sigbus;
    }

    static int inferd_catch_sigbus(void) {
        struct sigaction action;
        memset(&action, 0, sizeof action);
        action.sa_sigaction = inferd_on_sigbus;
        /* Not SA_ONSTACK: the thread's own stack is intact when it touches a mapping, but its alternate stack may be
           gone. OpenVINO's CPU plugin gives a thread one and unmaps it from another thread; new mappings, also of
           clients, may then lie there, and the handler would overwrite them. */
        action.sa_flags = SA_SIGINFO;
        sigemptyset(&action.sa_mask);
        return sigaction(SIGBUS, &action, &inferd_sigbus_before);
    }

    static void *inferd_map_shared(int fd, uint64_t offset, size_t size, int writable) {
        int access = writable ? PROT_READ | PROT_WRITE : PROT_READ;
        void *start = mmap(NULL, size, access, MAP_SHARED | MAP_NORESERVE, fd, (off_t)offset);
        return start == MAP_FAILED ? NULL : start;
    }

    /* the first place that is free; NULL when there is none */
    static inferd_mapping *inferd_free_place(void) {
        int i = 0;
        while (i < inferd_mappings_used && inferd_mappings[i].start) i++;
        if (i == INFERD_MAPPINGS) {
            errno = ENOMEM;
            return NULL;
        }
        inferd_mappings[i].broken = 0;
        return &inferd_mappings[i];
    }

    static void inferd_publish(inferd_mapping *mapping, void *start, size_t size) {
        int used = (int)(mapping - inferd_mappings) + 1;
        __atomic_store_n(&mapping->size, size, __ATOMIC_RELAXED);
        __atomic_store_n(&mapping->start, (uint8_t *)start, __ATOMIC_RELEASE);
        if (used > inferd_mappings_used) __atomic_store_n(&inferd_mappings_used, used, __ATOMIC_RELEASE);
    }

    static void inferd_withdraw(inferd_mapping *mapping) {
        __atomic_store_n(&mapping->frees, mapping->frees + 1, __ATOMIC_RELAXED);
        __atomic_thread_fence(__ATOMIC_RELEASE);  /* whoever reads what is written from here on reads this, too */
        __atomic_store_n(&mapping->start, NULL, __ATOMIC_RELAXED);
    }

    static inline int inferd_is_set(const int *flag) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE); }
    static inline size_t inferd_page(void) { return (size_t)sysconf(_SC_PAGESIZE); }
    """
    bint is_guarded "inferd_is_guarded"() noexcept nogil
    int catch_sigbus "inferd_catch_sigbus"() noexcept nogil
    void *map_shared "inferd_map_shared"(int fd, uint64_t offset, size_t size, bint writable) noexcept nogil
    Mapping *free_place "inferd_free_place"() noexcept nogil
    void publish "inferd_publish"(Mapping *mapping, void *start, size_t size) noexcept nogil
    void withdraw "inferd_withdraw"(Mapping *mapping) noexcept nogil
    bint is_set "inferd_is_set"(const int *flag) noexcept nogil
    size_t page_size "inferd_page"() noexcept nogil
    int munmap(void *start, size_t size) noexcept nogil

cdef Mutex guard             # of taking and leaving places, and of the handler
mutex_init(&guard, NULL)


cdef bint mapping_guard() noexcept nogil:
    cdef bint good = is_guarded()
    if not good:
        lock(&guard)
        good = is_guarded() or catch_sigbus() == 0
        unlock(&guard)
    return good


cdef Mapping *mapping_new(int fd, uint64_t offset, size_t size, bint writable) noexcept nogil:
    cdef Mapping *mapping
    cdef size_t inside = offset % page_size()
    cdef uint8_t *start
    if not mapping_guard():
        return NULL
    start = <uint8_t *>map_shared(fd, offset - inside, inside + size, writable)
    if start == NULL:
        return NULL
    lock(&guard)
    mapping = free_place()
    if mapping != NULL:
        mapping.data = start + inside
        publish(mapping, start, inside + size)
    unlock(&guard)
    if mapping == NULL:
        munmap(start, inside + size)
    return mapping


cdef void mapping_free(Mapping *mapping) noexcept nogil:
    cdef uint8_t *start = mapping.start
    cdef size_t size = mapping.size
    lock(&guard)
    withdraw(mapping)       # first: after munmap another mapping may get the addresses
    unlock(&guard)
    munmap(start, size)


cdef bint mapping_broken(const Mapping *mapping) noexcept nogil:
    return is_set(&mapping.broken)
