"""The thread that releases CUDA resources for which the driver may take long.

Closing a region of a client may wait until the device has finished all its work; releasing page-locked memory unlocks
its pages. The last user of either may be an I/O thread, which must not wait. So the last user passes the resource to
this thread and continues.
"""

from libc.stdint cimport uint64_t

from inferd._native.threads cimport (
    Condition,
    Mutex,
    condition_init,
    lock,
    mutex_init,
    notify_all,
    thread_name,
    unlock,
    wait,
)

import threading

cdef Mutex guard
cdef Condition changed
cdef Closing *first = NULL
cdef Closing *last = NULL
cdef uint64_t handed = 0     # resources handed over, and closed, since the process began
cdef uint64_t closed = 0
mutex_init(&guard, NULL)
condition_init(&changed)

_starting = threading.Lock()
_thread = None


cdef int closing_start() except -1:
    global _thread
    with _starting:
        if _thread is None:
            _thread = threading.Thread(target=_run, name="cuda closing", daemon=True)
            _thread.start()
    return 0


cdef void close_later(Closing *closing) noexcept nogil:
    global first, last, handed
    closing.next = NULL
    lock(&guard)
    if first == NULL:
        first = closing
    else:
        last.next = closing
    last = closing
    handed += 1
    notify_all(&changed)
    unlock(&guard)


def _run():
    thread_name(b"cuda-closing")
    with nogil:
        close_all()


cdef void close_all() noexcept nogil:
    global first, closed
    cdef Closing *closing
    lock(&guard)
    while True:
        while first == NULL:
            wait(&changed, &guard)
        closing = first
        first = closing.next
        unlock(&guard)
        closing.close(closing.argument)  # this frees `closing`, too
        lock(&guard)
        closed += 1
        notify_all(&changed)


def wait_closed() -> None:
    """Wait until all that was handed over so far is closed. Not on the event loop: this may wait for the device."""
    cdef uint64_t until
    with nogil:
        lock(&guard)
        until = handed
        while closed < until:
            wait(&changed, &guard)
        unlock(&guard)
