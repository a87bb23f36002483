# One request of an ensemble.

from libc.stdint cimport int32_t, int64_t, uint32_t

from _native.ensembles.frame cimport Call, Run
from _native.ensembles.plan cimport Plan
from _native.request.request cimport Request
from _native.scheduling.lane cimport Lane
from _native.scheduling.levels cimport Level
from _native.service.submission cimport Submission

cdef struct Turn:
    # of a step, when the number of its requests is limited
    uint32_t running
    Call *first              # that waits for it, the longest
    Call *last

cdef struct Ensemble:
    Lane lane
    Plan plan
    int32_t closed           # atomic
    # Used on the loop only:
    Submission *submission
    uint32_t requests        # in it
    uint32_t max_inflight    # requests of one step at a time; 0: any number
    Level policy             # how long a request may be in it
    Turn *turns              # by step
    bint passing             # turns are being passed on

# NULL: no memory.
cdef Run *run_new(Ensemble *ensemble, Request *request) noexcept nogil
# Begin with the tensors of the request. It may be over, and gone, afterwards.
cdef void run_start(Run *run) noexcept nogil
# End it with what its request's final response says by now; steps that run are abandoned.
cdef void run_end(Run *run) noexcept nogil
