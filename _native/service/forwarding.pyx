"""Header forwarding: metadata of a call whose name matches a pattern becomes parameters of its requests.

Forwarded headers are encoded as entries of the map `parameters` of a ModelInferRequest, behind the message. They are
decoded separately, so a message that ends within a field cannot swallow them. Parameters of such names in the message
are discarded, even if the client sent no such header: a model sees only headers under these names. If several headers
have the same name, the last counts, as in any map. Both front doors forward in the same way.

    ModelInferRequest  4 parameters (map entry: 1 key, 2 InferParameter: 3 string_param)
"""

from libc.stdint cimport uint8_t
from libc.stdlib cimport malloc
from libc.string cimport memcpy

from inferd._native.protobuf.wire cimport varint_size, write_varint
from inferd._native.refusal cimport REFUSAL_INVALID_REQUEST, REFUSAL_LIMIT_EXCEEDED
from inferd._native.text cimport format_text
from inferd._native.transport.endpoint cimport Endpoint
from inferd._native.transport.errorinfo cimport stream_refuse
from inferd._native.transport.headers cimport header_value
from inferd._native.transport.nghttp2 cimport nghttp2_rcbuf_get_buf, nghttp2_vec
from inferd._native.transport.stream cimport Stream

import re

# Triton's own parameters; and its prefix.
RESERVED = frozenset((
    "sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output",
))
RESERVED_PREFIX = "triton_"
PARAMETERS = 4 << 3 | 2      # tags
KEY = 1 << 3 | 2
VALUE = 2 << 3 | 2
STRING_PARAM = 3 << 3 | 2
LONGEST_NAME = 256           # characters; a longer name matches nothing


class ReservedError(ValueError):
    """A header may not be forwarded; the text names it."""


cdef bytes number(size_t value):
    cdef uint8_t out[10]
    write_varint(out, value)
    return (<const char *>out)[:varint_size(value)]


cdef bytes field(int tag, bytes value):
    return number(<size_t>tag) + number(len(value)) + value


cdef class Forwarder:
    """Forwards the headers of an endpoint's calls. Used on the event loop only.

    Args:
        pattern: a regular expression that is looked for anywhere in the name of a header, in any case.
        withheld: names of headers that are never forwarded: they carry secrets.

    Raises:
        re.error: the pattern is not a regular expression.
    """

    def __init__(self, pattern: str, withheld=()):
        self.withheld = frozenset(withheld)
        self.search = re.compile(pattern, re.IGNORECASE).search

    cdef bint matches(self, str name) except -1:
        # a parameter must be text, which binary metadata is not
        return not name.endswith("-bin") and name not in self.withheld and self.finds(name)

    cdef bint finds(self, str name) except -1:
        # whether the pattern matches, also for names of which headers are not forwarded
        return len(name) <= LONGEST_NAME and self.search(name) is not None

    def parameters(self, metadata) -> bytes:
        """The bytes to append to the encoded requests of a call with this metadata.

        Raises:
            ReservedError: a matching header has the name of one of Triton's own parameters.
        """
        cdef list found = []
        for name, value in metadata:
            if not self.matches(name) or not isinstance(value, str):
                continue
            if is_reserved(name):
                raise ReservedError(
                    f"header '{name}' is reserved for Triton usage and cannot be forwarded as parameter")
            parameter = field(STRING_PARAM, value.encode("utf-8", "replace"))
            found.append(field(PARAMETERS, field(KEY, name.encode("ascii")) + field(VALUE, parameter)))
        return b"".join(found)

    def install(self, Endpoint endpoint not None) -> None:
        """Forward the headers of native calls of an endpoint, which must not outlive this object."""
        endpoint.host.forwarding.wants = wants
        endpoint.host.forwarding.attach = attach
        endpoint.host.forwarding.context = <void *>self


cdef bint wants(void *context, const uint8_t *name, size_t size) noexcept nogil:
    with gil:
        return (<Forwarder>context).matches((<const char *>name)[:size].decode("ascii", "replace"))


cdef bint forwarder_claims(void *context, const uint8_t *name, size_t size) noexcept nogil:
    with gil:
        return claims(<Forwarder>context, (<const char *>name)[:size].decode("utf-8", "replace").lower())


cdef bint claims(Forwarder forwarder, str name) noexcept:
    # the client may set Triton's own parameters; a model would take any other that matches for a header
    return not is_reserved(name) and forwarder.finds(name)


cdef bint is_reserved(str name) except -1:
    return name in RESERVED or name.startswith(RESERVED_PREFIX)


cdef bint attach(void *context, Stream *stream) noexcept nogil:
    with gil:
        return attach_parameters(<Forwarder>context, stream)


cdef bint attach_parameters(Forwarder forwarder, Stream *stream) noexcept:
    cdef nghttp2_vec name, value
    cdef uint8_t *tail
    cdef bytes encoded
    cdef list pairs = []
    for i in range(stream.field_count):
        name = nghttp2_rcbuf_get_buf(stream.fields[i].name)
        value = header_value(stream.fields[i].value)
        pairs.append(((<const char *>name.base)[:name.len].decode("ascii", "replace"),
                      (<const char *>value.base)[:value.len].decode("ascii", "replace")))
    try:
        encoded = forwarder.parameters(pairs)
    except ReservedError as error:
        encoded = str(error).encode()
        stream_refuse(stream, REFUSAL_INVALID_REQUEST, format_text("%s", <const char *>encoded))
        return False
    if not encoded:
        return True
    tail = <uint8_t *>malloc(len(encoded))
    if tail == NULL:
        stream_refuse(stream, REFUSAL_LIMIT_EXCEEDED, format_text("no memory for the request's parameters"))
        return False
    memcpy(tail, <const char *>encoded, len(encoded))
    stream.forwarded = tail
    stream.forwarded_size = len(encoded)
    return True
