# One call, for the driver and the workloads.

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t

from inferd_client._native.linux cimport iovec
from inferd_client._native.session cimport Exchange

cdef enum:
    MESSAGE_LIMIT = 160      # bytes of grpc-message kept for the report

cdef struct Call:
    Exchange exchange        # its stream is -1 where the slot is free
    iovec parts[2]           # sends `head` and `body`
    uint64_t index           # number of this request within its run, from 0
    uint64_t nonce           # pseudo-random, a function of the run's seed and the index only
    uint64_t due_ns          # when it was (or, in an open loop, should have been) sent
    uint64_t elapsed_ns      # from `due_ns` to its end
    Call *next_free
    int32_t doom             # index in the connection's list of calls to reset; -1: not in it
    uint64_t cancel_at       # it is reset after this many calls of the connection have ended
    bint cancelled
    uint32_t timeout_us      # grpc-timeout; 0: none
    char timeout_text[16]
    # written by `prepare`
    const uint8_t *head      # precedes the body
    size_t head_size         # 0: nothing
    const uint8_t *body      # framed gRPC message, or the rest of it after the head
    size_t body_size
    bint body_stays          # unchanged until the end of the run, so sent by reference
    # memory for the workload, kept between calls
    uint8_t *scratch
    size_t scratch_capacity
    # the sequence of the slot, kept between calls
    uint64_t sequence
    uint32_t step            # requests of the sequence so far
    uint32_t steps           # requests of the sequence in all
    # the response; its bytes are kept only if the workload verifies them
    uint8_t *response
    size_t response_size
    size_t response_capacity
    char message[MESSAGE_LIMIT]
