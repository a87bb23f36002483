# The line per batch that can be switched on at run time.

from libc.stdint cimport int32_t

cdef int32_t batch_log      # atomic: write it
