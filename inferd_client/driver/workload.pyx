"""Workloads make requests and verify responses: their base, and one that sends given messages in turn."""

from libc.stdint cimport uint8_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp

from inferd_client.driver.call cimport Call

from inferd_client.driver.report import frame as frame_message


cdef class Workload:
    """Base of workloads; of no use by itself."""


cdef struct Bodies:
    size_t count
    const uint8_t **requests
    size_t *request_sizes
    const uint8_t **responses
    size_t *response_sizes


cdef bint fixed_prepare(void *context, Call *call) noexcept nogil:
    cdef Bodies *bodies = <Bodies *> context
    cdef size_t i = call.index % bodies.count
    call.body = bodies.requests[i]
    call.body_size = bodies.request_sizes[i]
    call.body_stays = True
    return True


cdef Verdict fixed_verify(void *context, Call *call) noexcept nogil:
    cdef Bodies *bodies = <Bodies *> context
    cdef size_t i = call.index % bodies.count
    if call.exchange.grpc_status > 0 or call.exchange.http_status != 200:
        return WRONG_STATUS
    if call.response_size != bodies.response_sizes[i]:
        return MALFORMED
    return CORRECT if memcmp(call.response, bodies.responses[i], call.response_size) == 0 else WRONG_BYTES


cdef class Fixed(Workload):
    """Sends the given messages in turn and, with `expect`, compares the responses byte by byte.

    Args:
        messages: serialized requests, without the gRPC prefix; no messages at all sends one empty body, not framed.
        compressed: whether the messages are compressed, by the algorithm in the run's header grpc-encoding.
        expect: the serialized responses, one for each message; a tuple where the call has several responses, as a
            stream has. None: responses are not compared.
    """
    cdef list kept
    cdef Bodies bodies

    def __cinit__(self, messages=(), expect=None, *, compressed=False):
        framed = [frame_message(message, compressed=compressed) for message in messages] or [b""]
        responses = [
            b"".join(frame_message(each) for each in (message if isinstance(message, tuple) else (message,)))
            for message in (expect if expect is not None else ())
        ]
        if responses and len(responses) != len(framed):
            raise ValueError(f"expected {len(framed)} responses for as many messages, got {len(responses)}")
        self.kept = framed + responses
        self.bodies.count = len(framed)
        self.bodies.requests = <const uint8_t **> calloc(2 * len(framed), sizeof(void *))
        self.bodies.request_sizes = <size_t *> calloc(2 * len(framed), sizeof(size_t))
        if self.bodies.requests == NULL or self.bodies.request_sizes == NULL:
            raise MemoryError
        self.bodies.responses = self.bodies.requests + len(framed)
        self.bodies.response_sizes = self.bodies.request_sizes + len(framed)
        for i, body in enumerate(self.kept):
            self.bodies.requests[<size_t> i] = <const uint8_t *> <const char *> (<bytes> body)
            self.bodies.request_sizes[<size_t> i] = len(body)
        self.context = &self.bodies
        self.prepare = fixed_prepare
        if responses:
            self.verify = fixed_verify

    def __dealloc__(self):
        free(self.bodies.requests)
        free(self.bodies.request_sizes)
