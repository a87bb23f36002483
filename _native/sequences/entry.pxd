# Assigns arriving requests to sequences.

from libc.stdint cimport int64_t

from inferd._native.request.lane cimport Pushed
from inferd._native.request.request cimport Request
from inferd._native.sequences.slots cimport Slots

# Anything but PUSHED: the request still belongs to the caller. LANE_REFUSED: it has its error.
cdef Pushed slots_push(Slots *slots, Request *request, int64_t now) noexcept nogil
# The time until which the sequence of a request may wait for a slot, from `now` on; 0: no limit.
cdef int64_t slot_deadline(const Slots *slots, const Request *request, int64_t now) noexcept nogil
