# Returns memory to the system after a peak.

from inferd._native.transport.stream cimport Host

cdef enum:
    PEAK_FROM = 16 << 20         # smaller peaks are not worth a trim
    IDLE_CONNECTION = 16 << 10   # approximate bytes of a connection

cdef void host_note_peak(Host *host) noexcept nogil

cdef inline size_t host_kept(const Host *host) noexcept nogil:
    # bytes that clients make the server hold
    return host.account.total + <size_t>host.connection_count * IDLE_CONNECTION


cdef inline void host_note(Host *host) noexcept nogil:
    # call this when `host_kept` has changed, or after a while
    if host.peak >= PEAK_FROM or host_kept(host) > host.peak:
        host_note_peak(host)
