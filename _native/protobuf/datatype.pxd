# Tensor element types. The values are those of inference.DataType in model_config.proto; the names are those of
# the KServe v2 protocol ("FP32", "BYTES", ...).

from libc.stdint cimport int64_t, uint8_t, uint32_t
from libc.string cimport memcpy

cdef enum Datatype:
    DT_INVALID = 0
    DT_BOOL = 1
    DT_UINT8 = 2
    DT_UINT16 = 3
    DT_UINT32 = 4
    DT_UINT64 = 5
    DT_INT8 = 6
    DT_INT16 = 7
    DT_INT32 = 8
    DT_INT64 = 9
    DT_FP16 = 10
    DT_FP32 = 11
    DT_FP64 = 12
    DT_BYTES = 13
    DT_BF16 = 14

cdef extern from *:
    """
    #include <string.h>
    #include <stdint.h>
    static const char *const inferd_datatype_names[15] = {"INVALID", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64",
        "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BYTES", "BF16"};
    static const uint32_t inferd_datatype_sizes[15] = {0, 1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 4, 8, 0, 2};
    static inline int inferd_datatype_parse(const char *name, size_t size) {
        for (int i = 1; i < 15; i++)
            if (strlen(inferd_datatype_names[i]) == size && memcmp(inferd_datatype_names[i], name, size) == 0)
                return i;
        return 0;
    }
    static inline const char *inferd_datatype_name(int dt) { return inferd_datatype_names[dt]; }
    static inline uint32_t inferd_datatype_size(int dt) { return inferd_datatype_sizes[dt]; }
    """
    # The type with this name in the v2 protocol; DT_INVALID for an unknown name.
    Datatype datatype_parse "inferd_datatype_parse"(const char *name, size_t size) noexcept nogil
    const char *datatype_name "inferd_datatype_name"(int datatype) noexcept nogil
    # Bytes of one element; 0 for DT_BYTES, whose elements carry their own length.
    uint32_t datatype_size "inferd_datatype_size"(int datatype) noexcept nogil

# The length of the first `elements` elements of a BYTES tensor, each a 4-byte little-endian length and that many bytes;
# SIZE_MAX: the data end before that.
cdef inline size_t bytes_of_elements(const uint8_t *data, size_t size, int64_t elements) noexcept nogil:
    cdef size_t at = 0
    cdef uint32_t length
    cdef int64_t _
    for _ in range(elements):
        if size - at < 4:
            return <size_t>-1
        memcpy(&length, data + at, 4)
        if size - at - 4 < length:
            return <size_t>-1
        at += 4 + <size_t>length
    return at
