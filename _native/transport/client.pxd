# One client, and its use of the server over all its connections. What happens beyond its quota: see quota.pxd.

from libc.stdint cimport uint32_t, uint64_t

from inferd._native.transport.ledger cimport Account

cdef struct Client:
    uint64_t number          # one that no other client has or had; never 0
    const char *name         # for messages: "10.0.0.7", "user 1000", "certificate CN=robot"
    uint32_t calls           # open RPCs
    uint32_t max_calls
    uint32_t streams         # of these, the streams
    uint32_t max_streams
    Account account          # of requests that are not answered, and of responses that are not sent
    double debt              # of all its calls together; eviction computes it

cdef class ClientUse:
    cdef Client client
    cdef bytes text          # the name
    cdef readonly str name
    cdef public int connections  # open ones; the owner of this object counts them
    cdef object __weakref__
