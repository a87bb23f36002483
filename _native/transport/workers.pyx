"""The thread pool: threads that compress and inflate large messages, which would block the event loop too long.

Jobs run without the GIL. Finished ones wait in a list, and an eventfd signals the loop, which calls their `done`. The
threads have a higher nice value than the rest of the process: when cores are scarce, the loop and instances go first.
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


cdef void thread_pool_submit(ThreadPool *thread_pool, Job *job) noexcept nogil:
    lock(&thread_pool.guard)
    list_append(&thread_pool.waiting, job)
    job.waits = True
    notify_one(&thread_pool.work)
    unlock(&thread_pool.guard)


cdef bint thread_pool_withdraw(ThreadPool *thread_pool, Job *job) noexcept nogil:
    cdef bint waited
    lock(&thread_pool.guard)
    waited = job.waits
    if waited:
        take_out(thread_pool, job)
    unlock(&thread_pool.guard)
    return waited


cdef inline void take_out(ThreadPool *thread_pool, Job *job) noexcept nogil:
    list_remove(&thread_pool.waiting, job)
    job.waits = False


cdef Job *take(ThreadPool *thread_pool) noexcept nogil:
    # the next job, NULL when the pool is closing
    cdef Job *job = NULL
    lock(&thread_pool.guard)
    while thread_pool.waiting.first == NULL and not thread_pool.closing:
        wait(&thread_pool.work, &thread_pool.guard)
    if not thread_pool.closing:
        job = thread_pool.waiting.first
        take_out(thread_pool, job)
    unlock(&thread_pool.guard)
    return job


cdef void give_back(ThreadPool *thread_pool, Job *job) noexcept nogil:
    cdef uint64_t one = 1
    cdef bint alone
    lock(&thread_pool.guard)
    alone = thread_pool.finished.first == NULL
    list_append(&thread_pool.finished, job)
    unlock(&thread_pool.guard)
    if alone:
        write(thread_pool.event_fd, &one, sizeof(one))


cdef void thread_pool_drain(ThreadPool *thread_pool) noexcept nogil:
    cdef uint64_t count
    cdef Job *job
    cdef Job *following
    read(thread_pool.event_fd, &count, sizeof(count))
    lock(&thread_pool.guard)
    job = thread_pool.finished.first
    thread_pool.finished.first = NULL
    thread_pool.finished.last = NULL
    unlock(&thread_pool.guard)
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
        self.thread_pool.event_fd = -1
        mutex_init(&self.thread_pool.guard, NULL)
        condition_init(&self.thread_pool.work)
        self.event_fd = self.thread_pool.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.threads = [
            threading.Thread(target=self._run, name=f"worker_{index}", daemon=True) for index in range(threads)
        ]

    def __dealloc__(self):
        if self.thread_pool.event_fd >= 0:
            close(self.thread_pool.event_fd)
        condition_destroy(&self.thread_pool.work)
        mutex_destroy(&self.thread_pool.guard)

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
        cdef Job *job = take(&self.thread_pool)
        while job != NULL:
            job.run(job)
            give_back(&self.thread_pool, job)
            job = take(&self.thread_pool)

    def close(self) -> None:
        """End the threads. Jobs that have not begun are not run, but their `done` is called like that of the others."""
        cdef Job *job
        with nogil:
            lock(&self.thread_pool.guard)
            self.thread_pool.closing = True
            notify_all(&self.thread_pool.work)
            unlock(&self.thread_pool.guard)
        for thread in self.threads:
            if thread.ident is not None:
                thread.join()
        self.threads.clear()
        while self.thread_pool.waiting.first != NULL:
            job = self.thread_pool.waiting.first
            take_out(&self.thread_pool, job)
            give_back(&self.thread_pool, job)
        thread_pool_drain(&self.thread_pool)
