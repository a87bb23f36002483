# Headers that models see, as parameters of their requests.


from libc.stdint cimport uint8_t

# Whether a parameter with this name is a header that the Forwarder `context` forwards.
cdef bint forwarder_claims(void *context, const uint8_t *name, size_t size) noexcept nogil


cdef class Forwarder:
    cdef object search           # of the compiled pattern
    cdef frozenset withheld      # names that are never forwarded
    cdef bint matches(self, str name) except -1
    cdef bint finds(self, str name) except -1
