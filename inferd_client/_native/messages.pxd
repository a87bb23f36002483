# Messages of ModelInfer: builds requests and reads responses.

from cpython.buffer cimport Py_buffer
from libc.stdint cimport uint8_t


cdef class Content:
    # the bytes of one tensor, referenced in their own memory
    cdef Py_buffer view

cdef class Message:
    # the bytes of one received message
    cdef uint8_t *data
    cdef size_t size
    cdef size_t capacity

# Takes over the memory, which is from the pool.
cdef Message message_of(uint8_t *data, size_t size, size_t capacity)
