# Batches of sequences.

from libc.stdint cimport int64_t, uint32_t

from _native.inference.request cimport Request
from _native.sequences.slots cimport Slots

# The next batch of an instance as a chain; NULL: none yet, ask again at `wake` at the latest, or when stirred.
cdef Request *slots_take(Slots *slots, uint32_t seat, int64_t now, int64_t *wake) noexcept nogil
