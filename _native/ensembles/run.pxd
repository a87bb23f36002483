# One request of an ensemble.

from libc.stdint cimport int32_t, int64_t, uint32_t

from inferd._native.ensembles.frame cimport Run, StepCall
from inferd._native.ensembles.plan cimport EnsemblePlan
from inferd._native.request.lane cimport Lane
from inferd._native.request.request cimport Request
from inferd._native.scheduling.levels cimport Level
from inferd._native.service.submission cimport Submission

cdef struct StepLimit:
    # the limit of a step: so many of its requests may run at a time
    uint32_t running
    StepCall *first          # calls that wait for it, the oldest first
    StepCall *last

cdef struct Ensemble:
    Lane lane
    EnsemblePlan plan
    int32_t closed           # atomic
    # Used in the front only:
    Submission *submission
    uint32_t requests        # requests in the ensemble
    uint32_t max_inflight    # limit of the requests of one step; 0: any number
    Level policy             # limits how long a request may take
    StepLimit *step_limits   # by step
    bint beginning           # calls that waited are being started

# NULL: no memory.
cdef Run *run_new(Ensemble *ensemble, Request *request) noexcept nogil
# Start with the tensors of the request. The run may have ended, and be freed, afterwards.
cdef void run_start(Run *run) noexcept nogil
# The request has other terms: pass them to the running steps.
cdef void run_reconsider(Run *run) noexcept nogil
# End the run with the current contents of its request's final response; running steps are abandoned.
cdef void run_end(Run *run) noexcept nogil
