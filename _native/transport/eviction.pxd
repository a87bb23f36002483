# Who goes when the server holds more than it may.

from _native.transport.stream cimport Host, Stream

# To be called between rounds, when nothing is being delivered and no bytes are being received: if the server holds more
# than it may, end calls until it holds clearly less. Others than the connection at hand may have something to say then
# (Host.others_ran).
cdef void host_relieve(Host *host) noexcept nogil
# End this call for what it holds.
cdef void stream_evict(Stream *stream) noexcept nogil
