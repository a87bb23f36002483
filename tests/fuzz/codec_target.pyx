# Invariant: no message makes the decoder crash, read outside the message or write outside its buffers (the address
# and undefined-behaviour sanitizers watch), and it never disagrees with official protobuf: the same messages are
# accepted, with the same content. The two places where official implementations differ among themselves are in
# tests/native/official.py.
"""The fuzz target of the codec: run(argv) hands the process over to libFuzzer."""

from libc.stdint cimport uint8_t, uint64_t
from libc.stdlib cimport free, malloc

from inferd._native.protobuf.codec cimport DECODE_OK, DECODE_TOO_MANY, DecodeResult, InferMessage, InputHead
from inferd._native.protobuf.codec cimport infer_decode, infer_message_init
from inferd._native.protobuf.contents cimport contents_copy, contents_field, contents_size
from inferd._native.protobuf.datatype cimport Datatype

include "driver.pxi"

from tests.native import official

cdef enum:
    DATATYPES = 15

cdef InferMessage message
infer_message_init(&message)
cdef object decoder = official.messages.Decoder()


cdef void copy_contents(const InputHead *head) noexcept nogil:
    """Copy the contents as each datatype that they fit, into a buffer that has no byte too many."""
    cdef int datatype
    cdef uint8_t *out
    for datatype in range(DATATYPES):
        if head.contents_mask and head.contents_mask == <uint64_t>1 << contents_field(<Datatype>datatype):
            out = <uint8_t *>malloc(contents_size(head, <Datatype>datatype))
            if out != NULL:
                contents_copy(head, <Datatype>datatype, out)
                free(out)


cdef int one(const uint8_t *data, size_t size) noexcept:
    """One message; `data` has exactly `size` bytes, so that the address sanitizer sees a read of one more."""
    cdef DecodeResult result
    cdef uint64_t i
    with nogil:
        result = infer_decode(data, size, &message)
        for i in range(message.input_count):
            copy_contents(&message.inputs[i])
    if result == DECODE_TOO_MANY:
        return 0
    try:
        body = data[:size]
        if result == DECODE_OK or official.parse(body) is not None:
            official.check(body, decoder)
    except BaseException:
        fail()
    return 0


def run(argv):
    """Fuzz with libFuzzer's arguments; ends the process."""
    drive(argv, one)
