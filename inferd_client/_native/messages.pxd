# Messages of ModelInfer: what a request is made of, and what an answer says.

from cpython.buffer cimport Py_buffer
from libc.stdint cimport uint8_t


cdef class Content:
    # The bytes of one tensor, held where they are.
    cdef Py_buffer view

cdef class Message:
    # The bytes of one received message.
    cdef uint8_t *data
    cdef size_t size
    cdef size_t capacity

# Takes the memory, which is of the pool.
cdef Message message_of(uint8_t *data, size_t size, size_t capacity)
