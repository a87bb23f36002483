# What takes too long.

from _native.transport.stream cimport Host

# To be called about once a second: end what has not arrived, or was not taken, in time. A request, or a message of a
# stream of requests, may take Host.receive_ns and a second more for each 16 KiB of it; a slower peer has the call
# ended, within headers the connection. A response may take Host.send_ns in the same way. Calls that are parked or
# incomplete at the client's deadline are ended, too.
cdef void host_expire(Host *host) noexcept nogil
