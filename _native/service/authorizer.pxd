# The authorizer of both front doors.

from libc.stdint cimport int64_t, uint32_t

from inferd._native.protobuf.codec cimport Str
from inferd._native.service.access cimport AccessPolicy, Verdict
from inferd._native.service.tokens cimport TokenTable
from inferd._native.transport.stream cimport Stream

# Refuse a native call, and note it for the log; `model` is the model that it calls, empty if unknown.
cdef void access_deny(AccessPolicy *access, Stream *stream, Verdict verdict, Str model) noexcept nogil
# Note a refusal for the log, with the peer of the stream; `text` is that of the refusal.
cdef void access_note(AccessPolicy *access, const Stream *stream, const char *text) noexcept nogil


cdef struct ListenerAccess:
    # the check of the native calls of one listener
    AccessPolicy *access
    uint32_t groups          # bits of the RPC groups that are served there
    bint trusted             # no token and no header of a restricted protocol is required


cdef class Authorizer:
    # an AccessPolicy for Python
    cdef AccessPolicy access
    cdef readonly bytes key      # of the hash that makes the tokens' ids
    cdef TokenTable table        # in force
    cdef dict notes              # the number of refusals by (peer, method, text)
    cdef public object on_note   # called after each new refusal
    cdef tuple told(self, Verdict verdict, uint32_t group, bytes model)
    cdef int remember(self, str peer, str method, str text, int64_t user) except -1
