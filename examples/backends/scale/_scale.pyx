# cython: language_level=3
"""What takes the time, without Python's lock: the server and the other instances go on meanwhile."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer


def scale(given, float factor, answer):
    """Write `given` times `factor` to `answer`: arrays of float32 of one size, contiguous."""
    cdef Py_buffer source
    cdef Py_buffer target
    cdef Py_ssize_t at
    PyObject_GetBuffer(given, &source, PyBUF_SIMPLE)
    try:
        PyObject_GetBuffer(answer, &target, PyBUF_SIMPLE | PyBUF_WRITABLE)
    except BaseException:
        PyBuffer_Release(&source)
        raise
    cdef const float *read = <const float *>source.buf
    cdef float *write = <float *>target.buf
    with nogil:
        for at in range(min(source.len, target.len) // <Py_ssize_t>sizeof(float)):
            write[at] = read[at] * factor
    PyBuffer_Release(&source)
    PyBuffer_Release(&target)
