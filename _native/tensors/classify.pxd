# The classification extension: the top elements of each row of an output as texts "value:index[:label]".

from libc.stdint cimport uint8_t, uint32_t

from inferd._native.memory.resource cimport Block
from inferd._native.protobuf.codec cimport Str
from inferd._native.protobuf.datatype cimport Datatype


cdef enum ClassifyResult:
    CLASSIFY_OK = 0
    CLASSIFY_UNSUPPORTED = -1    # FP16, BF16, BOOL and BYTES have no classes
    CLASSIFY_TOO_LARGE = -2      # more than CLASSIFY_LIMIT elements in a row
    CLASSIFY_NO_MEMORY = -3

cdef enum:
    CLASSIFY_LIMIT = 1000000

# Classify `rows` rows of `elements` elements each, which lie one row after the other at `data`. `out` becomes a block
# with one reference and *out_size bytes: for each row min(k, elements) BYTES elements (a 4-byte little-endian length,
# then the text), the greatest value first. Equal values are ordered by ascending index; NaN comes after all numbers.
# Floats have six decimals. `labels` has the label of each index (NULL: there are none); an empty or missing label is
# left out, with its colon. After an error `out` is unchanged.
cdef ClassifyResult classify(const uint8_t *data, Datatype datatype, size_t rows, size_t elements, uint32_t k,
                             const Str *labels, size_t label_count, Block **out, size_t *out_size) noexcept nogil
