# Between a step of an ensemble and its model: the request made of tensors, and the tensors that a response brings.

from _native.ensembles.frame cimport Frame, Sequence, StepCall
from _native.ensembles.plan cimport PlanStep
from _native.request.request cimport Request, Response
from _native.service.table cimport Table

# Whether the step is to run: its gate says so, and no input that it must have was skipped. False with `status` set: the
# gate is not what it should be; `details` is from malloc.
cdef bint step_should_run(StepCall *call, int *status, char **details) noexcept nogil
# The request to the step's model, checked, without sink; its lane counts it as in flight. NULL: `status` and `details`
# (from malloc) say why.
cdef Request *step_request(Table *table, StepCall *call, int *status, char **details) noexcept nogil
# Have the values of `frame` refer to the outputs of a response; what it lacks is missing. They carry `sequence`.
cdef void step_accept(Frame *frame, PlanStep *step, Response *response, const Sequence *sequence) noexcept nogil
# Read what the response says of the sequence to the steps behind it. False: `details` (from malloc) says what is wrong.
cdef bint step_sequence(const Response *response, Sequence *sequence, char **details) noexcept nogil
# The step did not or will not write its outputs.
cdef void step_leave(Frame *frame, const PlanStep *step, bint skipped) noexcept nogil
