"""How long the codec takes for one message, without the GIL and without Python objects.

    python -m bench.codec      prints the table of bench/results/codec.md
"""

from libc.stdint cimport int64_t, uint8_t
from libc.stdlib cimport free, malloc
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from inferd._native.protobuf.codec cimport DECODE_OK, InferMessage, Str
from inferd._native.protobuf.codec cimport infer_decode, infer_message_free, infer_message_init
from inferd._native.protobuf.contents cimport contents_copy, contents_size
from inferd._native.protobuf.datatype cimport DT_FP32, Datatype, datatype_parse
from inferd._native.protobuf.encoding cimport (
    ResponseHead,
    ResponseOutput,
    raw_prefix_write,
    response_head_size,
    response_head_write,
)


cdef double now() noexcept nogil:
    """Seconds of the monotonic clock."""
    cdef timespec t
    clock_gettime(CLOCK_MONOTONIC, &t)
    return t.tv_sec + t.tv_nsec * 1e-9


def decode_ns(bytes data not None, long loops):
    """Nanoseconds to decode `data`, the mean over `loops`; ValueError when it is malformed."""
    cdef const uint8_t *p = data
    cdef size_t size = len(data)
    cdef InferMessage message
    cdef bint good = True
    cdef double seconds
    infer_message_init(&message)
    with nogil:
        seconds = now()
        for _ in range(loops):
            good &= infer_decode(p, size, &message) == DECODE_OK
        seconds = now() - seconds
    infer_message_free(&message)
    if not good:
        raise ValueError("malformed ModelInferRequest")
    return seconds / loops * 1e9


def contents_ns(bytes data not None, str datatype not None, long loops):
    """Nanoseconds to copy the typed contents of the first input; ValueError when there is none."""
    cdef const uint8_t *p = data
    cdef size_t size = len(data)
    cdef bytes name = datatype.encode()
    cdef Datatype kind = <Datatype>datatype_parse(name, len(name))
    cdef InferMessage message
    cdef double seconds = 0
    infer_message_init(&message)
    try:
        if infer_decode(p, size, &message) != DECODE_OK or message.input_count == 0:
            raise ValueError("no input")
        out = <uint8_t *>malloc(contents_size(&message.inputs[0], kind) + 1)
        if out == NULL:
            raise MemoryError
        with nogil:
            seconds = now()
            for _ in range(loops):
                contents_copy(&message.inputs[0], kind, out)
            seconds = now() - seconds
            free(out)
    finally:
        infer_message_free(&message)
    return seconds / loops * 1e9


def encode_ns(long loops):
    """Nanoseconds to size and write the head of a response with one FP32 output, and its raw prefix."""
    cdef uint8_t[256] out
    cdef int64_t[2] shape = [1, 16]
    cdef ResponseOutput output
    cdef ResponseHead head
    cdef size_t total = 0
    cdef double seconds
    output.name = Str("OUTPUT0", 7)
    output.datatype = DT_FP32
    output.shape = &shape[0]
    output.rank = 2
    head = ResponseHead(Str("identity", 8), Str("1", 1), Str("42", 2), &output, 1, NULL, 0)
    with nogil:
        seconds = now()
        for _ in range(loops):
            total += response_head_size(&head)
            total += raw_prefix_write(64, response_head_write(&head, out)) - out
        seconds = now() - seconds
    return seconds / loops * 1e9 if total else 0.0
