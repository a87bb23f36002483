# A store of responses outside of the server, implemented in Python.

from inferd._native.caching.coalescer cimport Memo
from inferd._native.service.submission cimport Submission


cdef class Lookup:
    cdef Memo *memo          # NULL: the lookup is over
    cdef Submission *submission
    cdef StoreBase store
    cdef readonly str model
    cdef readonly int version
    cdef public object key


cdef class StoreBase:
    cdef Submission *submission

# Let the submission's coalescer use the store. Both must live until nothing is in flight.
cdef void store_install(StoreBase store, Submission *submission) noexcept
