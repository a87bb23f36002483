# Ends calls when the server holds more bytes than it may.

from _native.transport.stream cimport Host, Stream

# If the server holds more than it may, end calls until it holds clearly less. To be called between rounds, when no
# response is being delivered and no bytes are being received. Other connections than the current one may then have
# output (Host.others_ran).
cdef void host_relieve(Host *host) noexcept nogil
# End this call because of what it holds.
cdef void stream_evict(Stream *stream) noexcept nogil
