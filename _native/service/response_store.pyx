"""Stores: responses that are kept outside of the server and looked up over a network.

A model with such a cache is too slow to be executed for each request, so Python is fast enough here. The
coalescer (`inferd._native.caching.coalescer`) holds the request back, with identical ones that come meanwhile, until
the lookup has a result. Everything happens in the front.
"""

from cpython.bytes cimport PyBytes_AS_STRING
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from inferd._native.caching.cache_key cimport key_parts
from inferd._native.caching.coalescer cimport Memo, Store, coalescer_found, coalescer_missing
from inferd._native.front cimport PythonEvent, front_enter, front_leave, python_post
from inferd._native.memory.resource cimport Block, block_give, block_take
from inferd._native.protobuf.codec cimport (
    PARAMETER_BOOL,
    PARAMETER_DOUBLE,
    PARAMETER_STRING,
    PARAMETER_UINT64,
    Parameter,
    Str,
)
from inferd._native.protobuf.codec cimport ParameterKind
from inferd._native.protobuf.datatype cimport DT_BYTES, Datatype, datatype_parse, datatype_size
from inferd._native.request.bridge cimport Bridge
from inferd._native.request.request cimport OutputData, Request, Response
from inferd._native.request.signature cimport MAX_RANK, Signature, output_find
from inferd._native.service.encoding cimport encoded_size, encoded_write
from inferd._native.service.submission cimport Submission, submission_wake, submit_work

import abc
import math


cdef class Lookup:
    """The lookup of one key in the store. The store calls `found` or `missing` once."""

    def __init__(self):
        raise TypeError("Lookup cannot be created from Python")

    @property
    def pending(self) -> bool:
        """Whether a request waits for the result."""
        cdef bint waits
        front_enter()
        waits = waiting(self) != NULL
        front_leave()
        return waits

    def parts(self) -> tuple[list, list, list] | None:
        """The parts of the key, in an order that does not depend on the client; None when no request waits any more.

        Inputs as (name, datatype, shape, bytes), requested outputs as (name, number of classes or 0), and
        parameters as (name, kind, value).
        """
        cdef Memo *memo
        front_enter()
        try:
            memo = waiting(self)
            return key_parts(memo.work) if memo != NULL else None
        finally:
            front_leave()

    def found(self, list outputs not None, list parameters not None) -> None:
        """Answer all requests that wait. No effect when no request waits any more.

        Args:
            outputs: (name, datatype, shape, bytes) of each output of the model.
            parameters: of the response: (name, field number in inference.InferParameter, value).

        Raises:
            ValueError: this is not a response for the key; the lookup is still pending.
        """
        cdef Memo *memo
        front_enter()
        try:
            memo = waiting(self)
            if memo != NULL:
                give(memo, outputs, parameters)
        finally:
            front_leave()

    def missing(self) -> None:
        """Let the model answer. No effect when no request waits any more."""
        cdef Memo *memo
        front_enter()
        memo = waiting(self)
        if memo != NULL:
            submit_work(self.submission, coalescer_missing(memo))
            submission_wake(self.submission)
        front_leave()


cdef inline Memo *waiting(Lookup lookup) noexcept:
    cdef Memo *memo = lookup.link.memo if lookup.link != NULL else NULL
    return memo if memo != NULL and memo.asking else NULL


cdef int give(Memo *memo, list outputs, list parameters) except -1:
    cdef list places = [place_of(memo.work, name, datatype, shape, data) for name, datatype, shape, data in outputs]
    cdef uint32_t i
    set_parameters(&memo.work.response, parameters)
    for i in range(memo.work.signature.output_count):
        memo.work.response.outputs[i].wanted = False
    for place, (_, datatype, shape, data) in zip(places, outputs):
        set_output(&memo.work.response.outputs[<uint32_t>place], datatype, shape, data)
    coalescer_found(memo)
    return 0


cdef int place_of(const Request *work, str name, str datatype, list shape, bytes data) except -1:
    # the index of an output, if the output fits the key
    cdef bytes encoded = name.encode()
    cdef bytes type_name = datatype.encode()
    cdef Datatype parsed = datatype_parse(type_name, len(type_name))
    cdef int index = output_find(work.signature, Str(encoded, <uint32_t>len(encoded)))
    if index < 0 or <uint32_t>index >= work.signature.output_count or not work.response.outputs[index].wanted:
        raise ValueError(f"output '{name}' was not asked for")
    if parsed != (DT_BYTES if work.response.outputs[index].classes else work.signature.outputs[index].datatype):
        raise ValueError(f"output '{name}' has another datatype: {datatype}")
    if len(shape) > MAX_RANK or any(size < 0 for size in shape):
        raise ValueError(f"output '{name}' has the shape {shape}")
    if parsed != DT_BYTES and math.prod(shape) * datatype_size(parsed) != len(data):
        raise ValueError(f"output '{name}' of shape {shape} has {len(data)} bytes")
    return index


cdef int set_output(OutputData *out, str datatype, list shape, bytes data) except -1:
    cdef bytes type_name = datatype.encode()
    cdef Block *block = block_take(len(data))  # a copy: whoever gives it back must not wait for the interpreter
    cdef uint32_t i
    if block == NULL:
        raise MemoryError
    memcpy(block.data, PyBytes_AS_STRING(data), len(data))
    block_give(out.block)
    out.block = block
    out.wanted = True
    out.datatype = datatype_parse(type_name, len(type_name))
    out.data = block.data
    out.size = len(data)
    out.rank = <uint32_t>len(shape)
    for i in range(out.rank):
        out.shape[i] = shape[i]
    return 0


cdef Str put_text(uint8_t **at, bytes text) noexcept:
    cdef Str put = Str(<const char *>at[0], <uint32_t>len(text))
    memcpy(at[0], PyBytes_AS_STRING(text), put.size)
    at[0] += put.size
    return put


cdef int set_parameters(Response *response, list parameters) except -1:
    cdef list encoded = [(name.encode(), kind, value.encode() if kind == PARAMETER_STRING else value)
                         for name, kind, value in parameters]
    cdef size_t size = len(encoded) * sizeof(Parameter) + sum(
        [len(name) + (len(value) if kind == PARAMETER_STRING else 0) for name, kind, value in encoded])
    cdef Parameter *out
    cdef uint8_t *at
    if not encoded:
        return 0
    block_give(response.parameter_block)
    response.parameter_block = block_take(size)
    if response.parameter_block == NULL:
        raise MemoryError
    response.parameters = out = <Parameter *>response.parameter_block.data
    response.parameter_count = 0
    memset(out, 0, len(encoded) * sizeof(Parameter))
    at = response.parameter_block.data + len(encoded) * sizeof(Parameter)
    for name, kind, value in encoded:
        if not PARAMETER_BOOL <= kind <= PARAMETER_UINT64:
            raise ValueError(f"a parameter of kind {kind}")
        out.key = put_text(&at, name)
        out.kind = <ParameterKind><int>kind
        if kind == PARAMETER_STRING:
            out.text = put_text(&at, value)
        elif kind == PARAMETER_DOUBLE:
            out.real = value
        else:
            out.integer = <int64_t>(value if value < 1 << 63 else value - (1 << 64))
        out += 1
        response.parameter_count += 1
    return 0


# ---------------------------------------------------------------------------------------------------------------------

cdef class StoreBase:
    """The part of a ResponseStore that the coalescer uses."""


class ResponseStore(StoreBase, metaclass=abc.ABCMeta):
    """Keeps responses outside of the server. Its methods run on the event loop, are quick, and raise nothing."""

    @abc.abstractmethod
    def look(self, lookup: Lookup) -> bool:
        """Begin to look the key up. False: the store does not look it up, and will not keep its response."""

    @abc.abstractmethod
    def keep(self, lookup: Lookup, response: bytes) -> None:
        """Keep the model's response to a key that was missing: an encoded inference.ModelInferResponse without id."""

    @abc.abstractmethod
    def forget(self, lookup: Lookup) -> None:
        """End the lookup: the response has come, or no request waits for it any more."""


cdef enum:
    NEWS_LOOK = 1
    NEWS_KEEP = 2
    NEWS_FORGET = 4


cdef inline void note(LookupLink *link, uint32_t news) noexcept nogil:
    link.news |= news
    python_post(link.python, &link.event)


cdef bint look_up(void *owner, Memo *memo) noexcept nogil:
    cdef LookupLink *link = <LookupLink *>calloc(1, sizeof(LookupLink))
    if link == NULL:
        return False
    link.event.run = tell_store
    link.python = &(<Bridge *>memo.work.bridge).timers.python
    link.memo = memo
    link.store = owner
    memo.lookup = link
    note(link, NEWS_LOOK)
    return True


cdef void keep(void *lookup, const Response *response) noexcept nogil:
    cdef LookupLink *link = <LookupLink *>lookup
    cdef size_t size
    if link.lookup == NULL:
        return
    response.request.id.size = 0  # the id of the first request is not for others
    size = encoded_size(response)
    link.response = block_take(size) if size else NULL
    if link.response == NULL:
        return
    link.size = size
    encoded_write(response, link.response.data)
    note(link, NEWS_KEEP)


cdef void forget(void *lookup) noexcept nogil:
    cdef LookupLink *link = <LookupLink *>lookup
    note(link, NEWS_FORGET)
    link.memo = NULL


cdef int tell_store(PythonEvent *event) except -1:
    cdef LookupLink *link = <LookupLink *>event
    cdef StoreBase store = <StoreBase>link.store
    cdef Lookup lookup
    cdef uint32_t news
    cdef bytes response = None
    try:
        news, link.news = link.news, 0
        if news & NEWS_LOOK and link.memo != NULL:
            lookup = lookup_begin(link)
        lookup = <Lookup>link.lookup if link.lookup != NULL else None
        if link.response != NULL:
            response = (<const char *>link.response.data)[:link.size]
            block_give(link.response)
            link.response = NULL
        if news & NEWS_FORGET:
            if lookup is not None:
                lookup.link = NULL
                Py_DECREF(lookup)
            free(link)
            link = NULL
    finally:
        front_leave()
    if lookup is None:
        return 0
    if news & NEWS_LOOK and not store.look(lookup):
        lookup.declined = True
        lookup.missing()
    if lookup.declined:
        return 0
    if response is not None:
        store.keep(lookup, response)
    if link == NULL:
        store.forget(lookup)
    return 0


cdef Lookup lookup_begin(LookupLink *link):
    cdef Lookup lookup = Lookup.__new__(Lookup)
    cdef const Signature *signature = link.memo.work.signature
    lookup.link = link
    lookup.store = <StoreBase>link.store
    lookup.submission = lookup.store.submission
    lookup.model = signature.name.data[:signature.name.size].decode()
    lookup.version = signature.version
    Py_INCREF(lookup)
    link.lookup = <void *>lookup
    return lookup


cdef void store_install(StoreBase store, Submission *submission) noexcept:
    store.submission = submission
    submission.coalescer.store = Store(<void *>store, look_up, keep, forget)
