"""inference.RepositoryIndexResponse, encoded: a server may have ten thousand models to list."""

from libc.stdint cimport uint8_t, uint32_t
from libc.stdlib cimport free
from libc.string cimport memset

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.tuple cimport PyTuple_GET_ITEM
from cpython.unicode cimport PyUnicode_AsUTF8AndSize

from inferd._native.protobuf.writing cimport MESSAGE_BYTES, TEXT_BYTES, Buffer, framed, put_tag, put_text, reserve

cdef enum:
    FIELDS = 4


cdef int add_entry(Buffer *buffer, object entry) except -1:
    cdef const char *texts[FIELDS]
    cdef Py_ssize_t sizes[FIELDS]
    cdef size_t needed = MESSAGE_BYTES
    cdef uint8_t *length
    cdef uint8_t *out
    cdef uint32_t i
    if not isinstance(entry, tuple) or len(entry) < FIELDS:
        raise ValueError(f"expected name, version, state, reason and what is not sent, got {entry}")
    cdef list kept = []
    cdef bytes text
    for i in range(<uint32_t>FIELDS):
        try:
            texts[i] = PyUnicode_AsUTF8AndSize(<object>PyTuple_GET_ITEM(entry, i), &sizes[i])
        except UnicodeEncodeError:  # a file name or a text of a model has a lone surrogate
            text = entry[i].encode("utf-8", "backslashreplace")
            kept.append(text)
            texts[i] = PyBytes_AS_STRING(text)
            sizes[i] = PyBytes_GET_SIZE(text)
        needed += TEXT_BYTES + sizes[i]
    if not reserve(buffer, needed):
        raise MemoryError
    length = put_tag(buffer.data + buffer.size, 1)
    out = length + 1
    for i in range(<uint32_t>FIELDS):
        if sizes[i]:
            out = put_text(out, i + 1, texts[i], sizes[i])
    buffer.size = <size_t>(framed(length, out) - buffer.data)
    return 0


def encode_index(entries) -> bytes:
    """Entries of a RepositoryIndexResponse: tuples that begin with name, version, state and reason."""
    cdef Buffer buffer
    memset(&buffer, 0, sizeof(Buffer))
    try:
        for entry in entries:
            add_entry(&buffer, entry)
        return buffer.data[:buffer.size] if buffer.size else b""
    finally:
        free(buffer.data)
