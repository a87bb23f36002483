# Memory goes back to the system when a peak is over.

from _native.transport.stream cimport Host

cdef enum:
    PEAK_FROM = 16 << 20         # bytes that are worth giving back
    IDLE_CONNECTION = 16 << 10   # bytes that a connection takes, about

cdef void host_note_peak(Host *host) noexcept nogil

cdef inline size_t host_kept(const Host *host) noexcept nogil:
    # what clients make the server keep
    return host.account.total + <size_t>host.connection_count * IDLE_CONNECTION


cdef inline void host_note(Host *host) noexcept nogil:
    # To be called when `host_kept` has changed, or has for a while.
    if host.peak >= PEAK_FROM or host_kept(host) > host.peak:
        host_note_peak(host)
