# Forms batches of requests of sequences.

from libc.stdint cimport int64_t, uint32_t

from inferd._native.request.request cimport Request
from inferd._native.scheduling.policy cimport BatchPlan
from inferd._native.sequences.slots cimport Slots

# Whether there is a batch for an instance (plan.count); if not, plan.wake_ns says when to ask again unless
# something changes before.
cdef void slots_plan(Slots *slots, uint32_t instance, int64_t now, BatchPlan *plan) noexcept nogil
# Right after that: the batch, as a chain. NULL: there is none after all, ask again at plan.wake_ns.
cdef Request *slots_cut(Slots *slots, uint32_t instance, int64_t now, BatchPlan *plan) noexcept nogil
