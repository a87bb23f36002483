# Requests come to sequences.

from libc.stdint cimport int64_t

from _native.request.request cimport Request
from _native.scheduling.lane cimport Pushed
from _native.sequences.slots cimport Slots

# Anything but PUSHED: the request is still the caller's. LANE_REFUSED: it carries the reason.
cdef Pushed slots_push(Slots *slots, Request *request, int64_t now) noexcept nogil
