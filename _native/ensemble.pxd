# The lane of an ensemble: its requests are executed by other models, step by step.

from libc.stdint cimport int32_t, int64_t, uint32_t

from _native.frame cimport Call
from _native.lane cimport Lane, LaneHandle
from _native.plan cimport Plan
from _native.submission cimport Submission

cdef struct Turn:
    # of a step, when the number of its requests is limited
    uint32_t running
    Call *head               # waits longest
    Call *tail

cdef struct Ensemble:
    Lane lane
    Plan plan
    int32_t closed           # atomic
    # Used on the loop only:
    Submission *submission
    uint32_t requests        # in it
    uint32_t max_inflight    # requests of one step at a time; 0: any number
    uint32_t max_requests    # in it at a time; 0: any number
    int64_t timeout_ns       # how long a request may be in it; 0: as long as it takes
    bint overridable         # a request may name a shorter time
    Turn *turns              # by step
    bint passing             # turns are being passed on


cdef class EnsembleLane(LaneHandle):
    cdef object service      # owns the submission
    cdef inline Ensemble *ensemble(self) noexcept:
        return <Ensemble *>self.lane
