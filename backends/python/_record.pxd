# The record of an EXECUTE: a batch in the form that a worker reads. `worker/protocol.py` has its layout.

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint64_t

from inferd._native.execution.batch cimport NativeBatch
from inferd._native.memory.resource cimport Block
from inferd._native.request.request cimport InputData
from inferd.backends.python._channel cimport Channel

cdef struct RecordSize:
    size_t heads             # in front of the tensors
    size_t all

# Whether this input stays where it is, in the arena; others are copied into the record.
cdef bint record_refers(const Channel *channel, const InputData *input) noexcept nogil
# The bytes that are copied for the batch: inputs into the record, outputs to where their clients want them.
cdef size_t record_copies(const Channel *channel, const NativeBatch *batch) noexcept nogil
# `supplied` is from supply_each.
cdef RecordSize record_size(const Channel *channel, const NativeBatch *batch, const InputData *supplied) noexcept nogil
# Write the record to `out`, which has room for it, in the arena or in a packet. `numbers` are those of the requests,
# `outputs` is memory for their outputs (NULL: none yet).
cdef void record_write(Channel *channel, const NativeBatch *batch, const InputData *supplied, const uint64_t *numbers,
                       const Block *outputs, RecordSize size, uint8_t *out, bint in_arena) noexcept nogil
