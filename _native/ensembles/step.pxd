# Between a step of an ensemble and its model: makes the request from tensors, and takes tensors from responses.

from inferd._native.ensembles.frame cimport Frame, Sequence, StepCall
from inferd._native.ensembles.plan cimport PlanStep
from inferd._native.request.lane cimport Lane
from inferd._native.request.request cimport Request, Response
from inferd._native.service.table cimport Table

# Whether the step is to run: its gate allows it, and no required input was skipped. False with `status` set: the
# gate is not valid; `details` is from malloc.
cdef bint step_should_run(StepCall *call, int *status, char **details) noexcept nogil
# The lane of the step's model, which counts one more request as in flight. NULL: see `status` (UNAVAILABLE: the model
# is not there) and `details` (from malloc).
cdef Lane *step_lane(Table *table, StepCall *call, int *status, char **details) noexcept nogil
# The request for this lane, checked, without sink. NULL: see `status` and `details` (from malloc); the lane does not
# count it.
cdef Request *step_request(Lane *lane, StepCall *call, int *status, char **details) noexcept nogil
# Let the values of `frame` refer to the outputs of a response; absent ones are missing. They get `sequence`.
cdef void step_accept(Frame *frame, PlanStep *step, Response *response, const Sequence *sequence) noexcept nogil
# Read the sequence for the steps behind from the response. False: see `details` (from malloc).
cdef bint step_sequence(const Response *response, Sequence *sequence, char **details) noexcept nogil
# The step has not written its outputs and will not.
cdef void step_leave(Frame *frame, const PlanStep *step, bint skipped) noexcept nogil
