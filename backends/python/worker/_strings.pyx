"""The codec of BYTES tensors, natively. A worker whose interpreter cannot import it does without."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint32_t
from libc.string cimport memcpy


def unpack(data) -> list:
    """The elements of an encoded tensor; None when the data ends within an element."""
    cdef Py_buffer buffer
    cdef const uint8_t *at
    cdef Py_ssize_t left
    cdef uint32_t length
    cdef list elements = []
    PyObject_GetBuffer(data, &buffer, PyBUF_SIMPLE)
    try:
        at = <const uint8_t *>buffer.buf
        left = buffer.len
        while left >= 4:
            memcpy(&length, at, 4)
            if length > <size_t>(left - 4):
                return None
            elements.append(PyBytes_FromStringAndSize(<const char *>at + 4, length))
            at += 4 + <size_t>length
            left -= 4 + <Py_ssize_t>length
        return elements if left == 0 else None
    finally:
        PyBuffer_Release(&buffer)


def pack(list elements not None) -> bytes:
    """The encoded tensor of these elements, all of them bytes shorter than 4 GiB."""
    cdef Py_ssize_t size = 0
    cdef uint32_t length
    cdef char *at
    cdef bytes element
    cdef bytes out
    for element in elements:
        size += 4 + PyBytes_GET_SIZE(element)
    out = PyBytes_FromStringAndSize(NULL, size)
    at = PyBytes_AS_STRING(out)
    for element in elements:
        length = <uint32_t>PyBytes_GET_SIZE(element)
        memcpy(at, &length, 4)
        memcpy(at + 4, PyBytes_AS_STRING(element), length)
        at += 4 + <size_t>length
    return out
