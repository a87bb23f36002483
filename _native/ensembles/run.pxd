# One request of an ensemble.

from libc.stdint cimport int32_t, int64_t, uint32_t

from _native.ensembles.frame cimport Run, StepCall
from _native.ensembles.plan cimport EnsemblePlan
from _native.request.request cimport Request
from _native.scheduling.lane cimport Lane
from _native.scheduling.levels cimport Level
from _native.service.submission cimport Submission

cdef struct StepLimit:
    # of a step, when the number of its requests is limited
    uint32_t running
    StepCall *first          # that waits for it, the longest
    StepCall *last

cdef struct Ensemble:
    Lane lane
    EnsemblePlan plan
    int32_t closed           # atomic
    # Used on the loop only:
    Submission *submission
    uint32_t requests        # in it
    uint32_t max_inflight    # requests of one step at a time; 0: any number
    Level policy             # how long a request may be in it
    StepLimit *step_limits   # by step
    bint beginning           # calls that waited are being begun

# NULL: no memory.
cdef Run *run_new(Ensemble *ensemble, Request *request) noexcept nogil
# Begin with the tensors of the request. It may be over, and gone, afterwards.
cdef void run_start(Run *run) noexcept nogil
# End it with what its request's final response says by now; steps that run are abandoned.
cdef void run_end(Run *run) noexcept nogil
