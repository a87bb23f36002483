# ModelStreamInfer on the native front door: the requests of one stream, and their responses.

from libc.stdint cimport uint32_t, uint64_t

from inferd._native.request.request cimport Response
from inferd._native.service.submission cimport Submission
from inferd._native.transport.errorinfo cimport LoadReport
from inferd._native.transport.stream cimport Service, Stream

cdef struct Exchange

cdef struct Exchanges:
    # all streams of a door
    Exchange *first
    Exchange *last

cdef struct ExchangeDoor:
    # Method.context of ModelStreamInfer
    Submission *submission
    uint32_t window          # requests of one stream that may be open
    const LoadReport *report  # for load balancers, sent with the status
    # One stream is over: the sequences that are tied to it end. Called in the front, outside of all calls of streams.
    void (*over)(void *context, uint64_t number) noexcept nogil
    void *over_context
    Exchanges exchanges
    uint64_t streams         # how many there have been
    uint64_t received        # bytes of the messages of requests
    uint64_t sent            # bytes of the messages of responses
    const char *stopping     # why the server takes no more requests; NULL: it does

cdef Service EXCHANGE

# `deliver` of the requests of an exchange.
cdef void exchange_deliver(void *sink, Response *response, int status, const char *details) noexcept nogil
# The stream of a sink of exchange_deliver.
cdef const Stream *exchange_stream(const void *sink) noexcept nogil
# The server stops: streams end when the requests that have come are answered.
cdef void exchanges_drain(ExchangeDoor *door, const char *text) noexcept nogil
