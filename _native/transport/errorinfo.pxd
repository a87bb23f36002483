# Trailing metadata of a native call: the google.rpc.Status of an error, and the load report for balancers.

from libc.stdint cimport uint8_t

from inferd._native.refusal cimport Refusal
from inferd._native.transport.nghttp2 cimport nghttp2_nv
from inferd._native.transport.stream cimport Stream

cdef enum:
    MAX_REPORT = 2048        # bytes of an encoded load report in base64

cdef struct LoadReport:
    # the value of an endpoint-load-metrics-bin header; size 0: no header
    size_t size
    uint8_t text[MAX_REPORT]

# The trailers of a final status: grpc-status-details-bin for an error (REFUSAL_NONE: the usual one of the status),
# and the report if there is one. `count` pairs in one allocation from malloc, for stream_end; NULL for none.
cdef nghttp2_nv *final_trailers(int status, const char *text, Refusal refusal, const LoadReport *report,
                                size_t *count) noexcept nogil
# End a call that is refused, and count it unless it has ended before. Takes over `text`, which is from malloc
# (format_text).
cdef void stream_refuse(Stream *stream, Refusal refusal, char *text) noexcept nogil
# The same of a request that may not be gRPC's: with this HTTP status instead of 200 if nothing has been sent.
cdef void stream_refuse_http(Stream *stream, Refusal refusal, char *text, const char *http_status) noexcept nogil
# End a call whose deadline has passed. That is no refusal, and is not counted.
cdef void stream_expire(Stream *stream) noexcept nogil
# Store an encoded report; False: it is too long.
cdef bint report_set(LoadReport *report, bytes encoded)
