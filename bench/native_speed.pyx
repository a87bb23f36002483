"""How long blocks and lanes take, without the GIL and without Python objects; see bench.micro."""

from libc.stdint cimport uint32_t
from libc.string cimport memcpy, memset

from inferd._native.clock cimport now_ns
from inferd._native.execution.batch cimport NativeBatch, batch_begin, batch_free, batch_init
from inferd._native.execution.gather cimport batch_describe, batch_gather_input
from inferd._native.memory.resource cimport Block, block_give, block_share, block_take
from inferd._native.request.lane cimport Lane
from inferd._native.request.request cimport Request, request_free, request_new
from inferd._native.scheduling.dispatcher cimport Consumer
from inferd._native.scheduling.queue cimport QueueLane
from inferd._native.scheduling.waking cimport consumer_take
from inferd._native.tensors.binding cimport request_bind, request_decode
from inferd._native.tensors.placement cimport RegionAccess

cdef enum:
    MOST = 64


def block_ns(size_t size, long loops):
    """Nanoseconds to take a block of `size` bytes and to give it back, the mean over `loops`."""
    cdef Block *block = NULL
    cdef long start
    with nogil:
        start = now_ns()
        for _ in range(loops):
            block = block_take(size)
            if block == NULL:
                break
            block_give(block)
        start = now_ns() - start
    if block == NULL:
        raise MemoryError
    return start / <double> loops


def share_ns(long loops):
    """Nanoseconds for one more reference to a block and for giving it back."""
    cdef Block *block = block_take(64)
    cdef long start
    if block == NULL:
        raise MemoryError
    with nogil:
        start = now_ns()
        for _ in range(loops):
            block_give(block_share(block))
        start = now_ns() - start
        block_give(block)
    return start / <double> loops


cdef RegionAccess no_regions
no_regions.registry = NULL


cdef Request *bound_request(bytes message, Lane *lane) except NULL:
    cdef Request *request = request_new()
    cdef Block *block = block_take(len(message))
    if request == NULL or block == NULL:
        raise MemoryError
    memcpy(block.data, <const char *> message, len(message))
    if not (request_decode(request, block, block.data, len(message))
            and request_bind(request, &lane.signature, &no_regions)):
        details = request.response.details.decode()
        request_free(request)
        raise ValueError(details)
    return request


def bind_ns(spec, bytes message not None, long loops):
    """Nanoseconds to make a request of a message: block, decode, check against the signature, free.

    `spec` is the ModelSpec of the model that the message is for.
    """
    cdef QueueLane handle = QueueLane(spec, 1)
    cdef long start = now_ns()
    for _ in range(loops):
        request_free(bound_request(message, handle.lane))
    return (now_ns() - start) / <double> loops


def lane_ns(spec, bytes message not None, uint32_t batch, long loops):
    """Nanoseconds a request to push `batch` requests and to take them as one batch, on one thread."""
    cdef QueueLane handle = QueueLane(spec, 1)
    cdef Lane *lane = handle.lane
    cdef Consumer consumer
    cdef Request *requests[MOST]
    cdef Request *chain
    cdef uint32_t made = 0, taken = 0, i
    cdef long start
    if batch == 0 or batch > MOST:
        raise ValueError(f"expected 1 to {MOST} requests, got {batch}")
    memset(&consumer, 0, sizeof(Consumer))
    try:
        while made < batch:
            requests[made] = bound_request(message, lane)
            made += 1
        with nogil:
            start = now_ns()
            for _ in range(loops):
                for i in range(batch):
                    lane.scheduler.push(lane, requests[i])
                chain = consumer_take(lane, &consumer)
                while chain != NULL:
                    taken += 1
                    chain = chain.next
            start = now_ns() - start
        if taken != batch * loops:
            raise ValueError(f"expected batches of {batch}, took {taken} requests in {loops} batches")
        return start / <double> (loops * batch)
    finally:
        for i in range(made):
            requests[i].next = requests[i].previous = NULL
            request_free(requests[i])


def gather_ns(spec, bytes message not None, uint32_t batch, long loops):
    """Nanoseconds a request to gather the inputs of `batch` requests, each with a message of its own, in one block."""
    cdef QueueLane handle = QueueLane(spec, 1)
    cdef Lane *lane = handle.lane
    cdef NativeBatch gathered
    cdef Request *chain = NULL
    cdef Request *request
    cdef Block *block = NULL
    cdef size_t at
    cdef uint32_t i, _
    cdef long start
    batch_init(&gathered, lane)
    try:
        for _ in range(batch):
            request = bound_request(message, lane)
            request.next = chain
            chain = request
        batch_begin(&gathered, chain)
        block = block_take(batch * len(message))
        if block == NULL:
            raise MemoryError
        with nogil:
            start = now_ns()
            for _ in range(loops):
                batch_describe(&gathered)
                at = 0
                for i in range(lane.signature.input_count):
                    batch_gather_input(&gathered, i, block.data + at)
                    at += gathered.inputs[i].size
            start = now_ns() - start
        return start / <double> (loops * batch)
    finally:
        block_give(block)
        for i in range(gathered.count):
            request_free(gathered.requests[i])
        batch_free(&gathered)
