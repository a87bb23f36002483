# A store of answers outside of the server, as Python implements it.

from _native.caching.coalescer cimport Memo
from _native.service.submission cimport Submission


cdef class Lookup:
    cdef Memo *memo          # NULL: it is over
    cdef Submission *submission
    cdef StoreBase store
    cdef readonly str model
    cdef readonly int version
    cdef public object key


cdef class StoreBase:
    cdef Submission *submission

# Have the submission's coalescer use it. Both must live until nothing is in flight.
cdef void store_install(StoreBase store, Submission *submission) noexcept
