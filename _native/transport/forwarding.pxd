# Headers that models see, as parameters of their requests.


cdef class Forwarder:
    cdef object search           # of the compiled pattern
    cdef bint matches(self, str name) except -1
