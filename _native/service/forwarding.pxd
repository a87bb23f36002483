# Header forwarding: headers of a call that models see as parameters of its requests.


from libc.stdint cimport uint8_t

# Whether the Forwarder `context` forwards headers with the name of this parameter.
cdef bint forwarder_claims(void *context, const uint8_t *name, size_t size) noexcept nogil


cdef class Forwarder:
    cdef object search           # of the compiled pattern
    cdef frozenset withheld      # names that are never forwarded
    cdef bint matches(self, str name) except -1
    cdef bint finds(self, str name) except -1
