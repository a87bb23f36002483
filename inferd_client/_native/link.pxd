# Calls and connections for Python.

from libc.stdint cimport uint64_t

from inferd_client._native.line cimport Arrived, Line, Wire
from inferd_client._native.linux cimport iovec
from inferd_client._native.nghttp2 cimport nghttp2_nv

cdef enum:
    PARTS = 4                # of a body, without separate memory


cdef class Call:
    cdef Wire wire
    cdef Link link           # on which it is, or was
    cdef iovec few_parts[PARTS]
    cdef iovec *parts        # `few_parts`, or separate memory
    cdef size_t room         # how many parts fit
    cdef nghttp2_nv *headers
    cdef size_t header_count
    cdef list texts          # of the headers
    cdef list pieces         # objects of the parts; the first `sealed` were serialised when `emptied` was the line's
    cdef size_t sealed
    cdef uint64_t emptied
    cdef public object owner
    cdef object future

    cdef iovec *parts_of(self, list pieces, iovec *room) except NULL
    cdef list taken(self, Arrived *arrived)

cdef class Link:
    cdef Line line
    cdef object tls
    cdef set lingering       # calls that have ended and that the session or the output still refers to
    cdef readonly str peer
    cdef readonly bint attended
    cdef public object owner

    cdef keep(self, Call call)
    cdef forget(self)
