# A keyed hash for tables whose keys clients choose.

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint64_t

# `key` has two words.
cdef uint64_t siphash(const uint64_t *key, const uint8_t *data, size_t size) noexcept nogil
