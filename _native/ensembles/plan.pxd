# The graph of an ensemble, compiled when it is loaded. Nothing but PlanEdge.place changes afterwards.
#
# A step writes a tensor of the ensemble, or the request contains it. Steps behind a decoupled step run once for each of
# its responses: the decoupled step opens a scope inside its own, to which its outputs and everything made of them
# belong. Scope 0 is the whole request. A step reads tensors of its own scope and of those around it.

from libc.stdint cimport int32_t, uint8_t, uint32_t

from inferd._native.protobuf.codec cimport Str

cdef struct PlanEdge:
    # a tensor of a step's model, and the ensemble's tensor that it is mapped to
    Str name
    uint32_t tensor
    bint optional            # an input that the model can omit
    uint32_t place           # index at which the last request found it in the model; the next one looks there first

cdef struct PlanStep:
    Str model
    Str version              # in the form of requests; empty: the latest
    PlanEdge *inputs
    uint32_t input_count
    PlanEdge *outputs
    uint32_t output_count
    int32_t gate             # the tensor that decides whether the step runs; -1: it always runs
    bint inverted            # it runs if the gate is false
    bint either              # a step with the opposite gate writes one of its tensors: only one of them may run
    uint32_t *reads          # input tensors and gate, each once
    uint32_t read_count
    uint32_t scope
    uint32_t place           # index among the steps of its scope
    int32_t opens            # the scope of its outputs, with a frame for each response; -1: not decoupled

cdef struct PlanTensor:
    Str name
    uint32_t scope
    uint32_t place           # index among the tensors of its scope
    int32_t output           # of the ensemble; -1: none
    uint32_t writers         # their number: 0 for an input of the ensemble; 2 with opposite gates, of which one writes
    uint32_t *readers        # steps, each once
    uint32_t reader_count
    bint pinned              # steps of inner scopes read it

cdef struct PlanScope:
    int32_t parent           # -1 for scope 0
    uint32_t *steps
    uint32_t step_count
    uint32_t *tensors
    uint32_t tensor_count

cdef struct EnsemblePlan:
    PlanStep *steps          # in the order of the configuration
    uint32_t step_count
    uint32_t *order          # steps, each behind those on which it depends
    PlanTensor *tensors
    uint32_t tensor_count
    PlanScope *scopes
    uint32_t scope_count
    uint32_t *inputs         # the tensor of each input of the ensemble
    uint32_t input_count
    uint32_t *outputs        # the tensor of each output of the ensemble
    uint32_t output_count

# Build from an inferd.backends.api.ModelSpec with an `ensemble` (read by attribute); raises ValueError or MemoryError.
cdef int plan_build(EnsemblePlan *plan, object spec) except -1
cdef void plan_clear(EnsemblePlan *plan) noexcept nogil

# Flags for the tensors and steps that are needed for these outputs of the ensemble (one flag each).
cdef void plan_needs(const EnsemblePlan *plan, const uint8_t *outputs, uint8_t *tensors, uint8_t *steps) noexcept nogil
# Whether `outer` is `inner`, or a scope around it.
cdef bint plan_encloses(const EnsemblePlan *plan, uint32_t outer, uint32_t inner) noexcept nogil
