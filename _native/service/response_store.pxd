# A store of responses outside of the server, implemented in Python.

from libc.stdint cimport uint32_t

from inferd._native.caching.coalescer cimport Memo
from inferd._native.front cimport PythonEvent, PythonEvents
from inferd._native.memory.resource cimport Block
from inferd._native.service.submission cimport Submission


cdef struct LookupLink:
    # A lookup between the front, which has the memo, and Python, which has the Lookup.
    PythonEvent event        # the first member
    PythonEvents *python     # where it is posted
    Memo *memo               # NULL: no request waits any more
    void *store              # the StoreBase; not a reference
    void *lookup             # the Lookup: a reference until the store has heard `forget`; NULL: none
    uint32_t news            # bits of NEWS_*: what the store has not heard of
    Block *response          # the response that the store is to keep; NULL: none
    size_t size              # its bytes


cdef class Lookup:
    cdef LookupLink *link    # NULL: the lookup is over
    cdef Submission *submission
    cdef StoreBase store
    cdef readonly str model
    cdef readonly int version
    cdef public object key
    cdef bint declined       # the store does not look this key up, and does not hear of the lookup again


cdef class StoreBase:
    cdef Submission *submission

# Let the submission's coalescer use the store. Both must live until nothing is in flight.
cdef void store_install(StoreBase store, Submission *submission) noexcept
