"""Worker threads for what would keep the event loop too long: compressing and decompressing large messages.

Jobs run without the GIL. Finished ones wait in a list and an eventfd tells the loop, which calls their `done`. The
threads are nicer than the rest of the process: where cores are scarce, the loop and the instances go first.
"""

from libc.stdint cimport uint64_t
from posix.unistd cimport close, read, write

from _native.list cimport list_append, list_remove
from _native.threads cimport (
    condition_destroy,
    condition_init,
    lock,
    mutex_destroy,
    mutex_init,
    notify_all,
    notify_one,
    thread_name,
    unlock,
    wait,
)

import contextlib
import os
import threading

NICER = 10


cdef void crew_submit(Crew *crew, Job *job) noexcept nogil:
    lock(&crew.guard)
    list_append(&crew.waiting, job)
    job.waits = True
    notify_one(&crew.work)
    unlock(&crew.guard)


cdef bint crew_withdraw(Crew *crew, Job *job) noexcept nogil:
    cdef bint waited
    lock(&crew.guard)
    waited = job.waits
    if waited:
        take_out(crew, job)
    unlock(&crew.guard)
    return waited


cdef inline void take_out(Crew *crew, Job *job) noexcept nogil:
    list_remove(&crew.waiting, job)
    job.waits = False


cdef Job *take(Crew *crew) noexcept nogil:
    # the next job, NULL when the crew is closing
    cdef Job *job = NULL
    lock(&crew.guard)
    while crew.waiting.first == NULL and not crew.closing:
        wait(&crew.work, &crew.guard)
    if not crew.closing:
        job = crew.waiting.first
        take_out(crew, job)
    unlock(&crew.guard)
    return job


cdef void give_back(Crew *crew, Job *job) noexcept nogil:
    cdef uint64_t one = 1
    cdef bint alone
    lock(&crew.guard)
    alone = crew.finished.first == NULL
    list_append(&crew.finished, job)
    unlock(&crew.guard)
    if alone:
        write(crew.event_fd, &one, sizeof(one))


cdef void crew_drain(Crew *crew) noexcept nogil:
    cdef uint64_t count
    cdef Job *job
    cdef Job *following
    read(crew.event_fd, &count, sizeof(count))
    lock(&crew.guard)
    job = crew.finished.first
    crew.finished.first = NULL
    crew.finished.last = NULL
    unlock(&crew.guard)
    while job != NULL:
        following = job.next
        job.done(job)
        job = following


cdef class Workers:
    """Threads for the jobs of one event loop.

    Whoever submits jobs registers `event_fd` as a reader of the loop and drains it.

    Args:
        threads: how many; they run from `start` to `close`.
    """

    def __cinit__(self, threads: int):
        self.crew.event_fd = -1
        mutex_init(&self.crew.guard, NULL)
        condition_init(&self.crew.work)
        self.event_fd = self.crew.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.threads = [
            threading.Thread(target=self._run, name=f"worker_{index}", daemon=True) for index in range(threads)
        ]

    def __dealloc__(self):
        if self.crew.event_fd >= 0:
            close(self.crew.event_fd)
        condition_destroy(&self.crew.work)
        mutex_destroy(&self.crew.guard)

    def start(self) -> None:
        """Begin to work, if that has not been said before."""
        for thread in self.threads:
            if thread.ident is None:
                thread.start()

    def _run(self) -> None:
        thread_name(b"inferd-worker")
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + NICER)
        with nogil:
            self.work()

    cdef void work(self) noexcept nogil:
        cdef Job *job = take(&self.crew)
        while job != NULL:
            job.run(job)
            give_back(&self.crew, job)
            job = take(&self.crew)

    def close(self) -> None:
        """End the threads. Jobs that have not begun are not run, but their `done` is called like that of the others."""
        cdef Job *job
        with nogil:
            lock(&self.crew.guard)
            self.crew.closing = True
            notify_all(&self.crew.work)
            unlock(&self.crew.guard)
        for thread in self.threads:
            if thread.ident is not None:
                thread.join()
        self.threads.clear()
        while self.crew.waiting.first != NULL:
            job = self.crew.waiting.first
            take_out(&self.crew, job)
            give_back(&self.crew, job)
        crew_drain(&self.crew)
