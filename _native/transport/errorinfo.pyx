"""Rich errors: google.rpc.Status with an ErrorInfo, and a RetryInfo if a retry may help.

They are in `grpc-status-details-bin`, in addition to the plain status and text that every client reads. The few fields
are encoded by hand, because both front doors need them, one of them without Python.

    Status     1 code, 2 message, 3 details (Any: 1 type_url, 2 value)
    ErrorInfo  1 reason, 2 domain
    RetryInfo  1 retry_delay (Duration: 1 seconds, 2 nanos)
"""

from libc.stdint cimport uint8_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, strlen

from inferd._native.protobuf.wire cimport utf8_valid, write_varint
from inferd._native.refusal cimport (
    REFUSAL_DEADLINE,
    Refusal,
    refusal_count,
    refusal_name,
    refusal_or_usual,
    refusal_retries,
    refusal_status,
)
from inferd._native.status cimport STATUS_OK
from inferd._native.text cimport text_or_no_memory
from inferd._native.transport.nghttp2 cimport NGHTTP2_NV_FLAG_NONE, nghttp2_nv
from inferd._native.transport.stream cimport Stream, stream_ended, stream_finish

import binascii

cdef enum:
    # A longer text goes without details: text and details repeat it, and clients refuse more than 8 KiB of headers. A
    # shorter one is never cut, even percent-encoded, so that the two texts are the same, which clients check.
    MAX_TEXT = 1024
    MAX_REASON = 63
    # everything but the text: five type names and numbers, reason and domain
    MAX_STATUS = MAX_TEXT + MAX_REASON + 256
    RETRY_DELAY_MS = 100

cdef const char *DOMAIN = "inferd"
cdef const char *ERROR_INFO = "type.googleapis.com/google.rpc.ErrorInfo"
cdef const char *RETRY_INFO = "type.googleapis.com/google.rpc.RetryInfo"
cdef const char *DETAILS_KEY = "grpc-status-details-bin"
cdef const char *REPORT_KEY = "endpoint-load-metrics-bin"


cdef inline uint8_t *write_bytes(uint8_t *at, uint8_t field, const void *data, size_t size) noexcept nogil:
    at[0] = field << 3 | 2
    at = write_varint(at + 1, size)
    memcpy(at, data, size)
    return at + size


cdef inline uint8_t *write_text(uint8_t *at, uint8_t field, const char *text) noexcept nogil:
    return write_bytes(at, field, text, strlen(text))


cdef uint8_t *write_detail(uint8_t *at, const char *kind, const uint8_t *value, size_t size) noexcept nogil:
    # one google.protobuf.Any in Status.details
    cdef uint8_t any_[256]
    cdef uint8_t *end = write_bytes(write_text(any_, 1, kind), 2, value, size)
    return write_bytes(at, 3, any_, <size_t>(end - any_))


cdef size_t status_write(uint8_t *out, int status, const char *text, Refusal refusal) noexcept nogil:
    # google.rpc.Status into MAX_STATUS bytes; 0: the text is too long, or it is not UTF-8
    cdef uint8_t detail[128]
    cdef uint8_t duration[16]
    cdef uint8_t *at = out
    cdef uint8_t *end
    cdef size_t text_size = strlen(text)
    refusal = refusal_or_usual(refusal, status)
    if text_size > MAX_TEXT:
        return 0
    if not utf8_valid(<const uint8_t *>text, <const uint8_t *>text + text_size):
        return 0
    at[0] = 1 << 3
    at = write_varint(at + 1, <size_t>status)
    at = write_bytes(at, 2, text, text_size)
    end = write_text(write_text(detail, 1, refusal_name(refusal)), 2, DOMAIN)
    at = write_detail(at, ERROR_INFO, detail, <size_t>(end - detail))
    if refusal_retries(refusal):
        duration[0] = 2 << 3
        end = write_varint(duration + 1, <size_t>RETRY_DELAY_MS * 1000000)
        end = write_bytes(detail, 1, duration, <size_t>(end - duration))
        at = write_detail(at, RETRY_INFO, detail, <size_t>(end - detail))
    return <size_t>(at - out)


cdef size_t base64_write(uint8_t *out, const uint8_t *data, size_t size) noexcept nogil:
    # without padding, as gRPC writes it
    cdef const char *digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    cdef uint8_t *at = out
    cdef size_t i = 0
    cdef size_t part
    cdef unsigned int bits
    while i < size:
        part = min(<size_t>3, size - i)
        bits = <unsigned int>data[i] << 16
        if part > 1:
            bits |= <unsigned int>data[i + 1] << 8
        if part > 2:
            bits |= data[i + 2]
        at[0] = <uint8_t>digits[bits >> 18]
        at[1] = <uint8_t>digits[bits >> 12 & 63]
        if part > 1:
            at[2] = <uint8_t>digits[bits >> 6 & 63]
        if part > 2:
            at[3] = <uint8_t>digits[bits & 63]
        at += part + 1
        i += part
    return <size_t>(at - out)


cdef inline void set_pair(nghttp2_nv *nv, const char *name, const uint8_t *value, size_t size) noexcept nogil:
    nv.name = <uint8_t *>name
    nv.namelen = strlen(name)
    nv.value = <uint8_t *>value
    nv.valuelen = size
    nv.flags = NGHTTP2_NV_FLAG_NONE


cdef nghttp2_nv *final_trailers(int status, const char *text, Refusal refusal, const LoadReport *report,
                                size_t *count) noexcept nogil:
    cdef uint8_t encoded[MAX_STATUS]
    cdef size_t size = status_write(encoded, status, text, refusal) if status != STATUS_OK else 0
    cdef nghttp2_nv *nv
    cdef uint8_t *at
    count[0] = 0
    if size == 0 and report.size == 0:
        return NULL
    nv = <nghttp2_nv *>malloc(2 * sizeof(nghttp2_nv) + (size + 2) // 3 * 4 + report.size)
    if nv == NULL:
        return NULL
    at = <uint8_t *>(nv + 2)
    if size:
        size = base64_write(at, encoded, size)
        set_pair(&nv[0], DETAILS_KEY, at, size)
        at += size
        count[0] = 1
    if report.size:
        memcpy(at, report.text, report.size)
        set_pair(&nv[count[0]], REPORT_KEY, at, report.size)
        count[0] += 1
    return nv


cdef void end_by(Stream *stream, Refusal refusal, const char *text, const char *http_status) noexcept nogil:
    cdef LoadReport no_report
    no_report.size = 0
    stream.sender.trailers = final_trailers(refusal_status(refusal), text, refusal, &no_report,
                                            &stream.sender.trailer_count)
    stream_finish(stream, refusal_status(refusal), text, http_status)


cdef void stream_refuse(Stream *stream, Refusal refusal, char *text) noexcept nogil:
    stream_refuse_http(stream, refusal, text, "200")


cdef void stream_refuse_http(Stream *stream, Refusal refusal, char *text, const char *http_status) noexcept nogil:
    if not stream_ended(stream):
        refusal_count(refusal)
        end_by(stream, refusal, text_or_no_memory(text), http_status)
    free(text)


cdef void stream_expire(Stream *stream) noexcept nogil:
    if not stream_ended(stream):
        end_by(stream, REFUSAL_DEADLINE, "Deadline Exceeded", "200")


cdef bint report_set(LoadReport *report, bytes encoded):
    cdef bytes text = binascii.b2a_base64(encoded, newline=False).rstrip(b"=")
    if len(text) > MAX_REPORT:
        return False
    memcpy(report.text, <const char *>text, len(text))
    report.size = len(text)
    return True


def rich_status(status: int, text: str, refusal: int = 0) -> bytes:
    """An encoded google.rpc.Status for `grpc-status-details-bin`; empty when the text is too long to be sent twice.

    Args:
        status: the gRPC status code; UNAVAILABLE and limits that are exceeded only for a moment carry a RetryInfo.
        text: exactly the call's error text.
        refusal: the number of the refusal whose reason the ErrorInfo has; 0: the usual one of the status.
    """
    cdef uint8_t encoded[MAX_STATUS]
    cdef bytes text_bytes = text.encode("utf-8", "replace")
    cdef size_t size = status_write(encoded, status, text_bytes, <Refusal><int>refusal)
    return (<const char *>encoded)[:size]
