"""Decodes ModelInferRequest into Python objects and encodes ModelInferResponse from them, for tests and tools.

The server calls the C functions of codec.pxd and encoding.pxd directly.
"""

from typing import NamedTuple

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from inferd._native.protobuf.codec cimport (
    DECODE_LIMIT,
    DECODE_MALFORMED,
    DECODE_NO_MEMORY,
    DECODE_TOO_MANY,
    DecodeResult,
    InferMessage,
    InputHead,
    OutputHead,
    PARAMETER_BOOL,
    PARAMETER_DOUBLE,
    PARAMETER_INT64,
    PARAMETER_NONE,
    PARAMETER_STRING,
    PARAMETER_UINT64,
    Parameter,
    ParameterKind,
    Str,
    infer_decode,
    infer_message_free,
    infer_message_init,
    parameter_find,
)
from inferd._native.protobuf.contents cimport contents_copy, contents_field, contents_size
from inferd._native.protobuf.datatype cimport Datatype, datatype_parse
from inferd._native.protobuf.encoding cimport (
    ResponseHead,
    ResponseOutput,
    raw_prefix_size,
    raw_prefix_write,
    response_head_size,
    response_head_write,
)

PARAMETER_KINDS = ("", "bool_param", "int64_param", "string_param", "double_param", "uint64_param")


class DecodedInput(NamedTuple):
    name: str
    datatype: str
    shape: tuple
    parameters: dict
    has_contents: bool
    contents_mask: int
    contents_count: int
    contents_bytes: int


class DecodedOutput(NamedTuple):
    name: str
    parameters: dict


class DecodedRequest(NamedTuple):
    model_name: str
    model_version: str
    id: str
    parameters: dict
    inputs: tuple
    outputs: tuple
    raw: tuple


cdef object text_object(Str text):
    return text.data[:text.size].decode("utf-8")


cdef object parameter_object(const Parameter *parameter):
    """(member of the oneof, value); ("", None) when none is set."""
    value = None
    if parameter.kind == PARAMETER_BOOL:
        value = parameter.integer != 0
    elif parameter.kind == PARAMETER_INT64:
        value = parameter.integer
    elif parameter.kind == PARAMETER_STRING:
        value = text_object(parameter.text)
    elif parameter.kind == PARAMETER_DOUBLE:
        value = parameter.real
    elif parameter.kind == PARAMETER_UINT64:
        value = <uint64_t>parameter.integer
    return PARAMETER_KINDS[parameter.kind], value


cdef dict parameter_objects(const Parameter *first, uint32_t count):
    return {text_object(first[i].key): parameter_object(&first[i]) for i in range(count)}


cdef object input_object(InferMessage *message, const InputHead *head):
    return DecodedInput(
        text_object(head.name),
        text_object(head.datatype),
        tuple([message.dims[head.first_dim + i] for i in range(head.rank)]),
        parameter_objects(message.tensor_parameters + head.first_parameter, head.parameter_count),
        bool(head.has_contents),
        head.contents_mask,
        head.contents_count,
        head.contents_bytes,
    )


cdef object output_object(InferMessage *message, const OutputHead *head):
    return DecodedOutput(
        text_object(head.name),
        parameter_objects(message.tensor_parameters + head.first_parameter, head.parameter_count),
    )


cdef class Decoder:
    """A decoder with one InferMessage that it uses again for each message, as the server does."""

    cdef InferMessage message
    cdef bytes data             # the bytes that the pointers in `message` point into

    def __cinit__(self):
        infer_message_init(&self.message)

    def __dealloc__(self):
        infer_message_free(&self.message)

    def decode(self, bytes data not None):
        """Decode a ModelInferRequest.

        Raises ValueError when it is malformed or has more elements than the decoder takes; MemoryError.
        """
        cdef const uint8_t *p = data
        cdef size_t size = len(data)
        cdef DecodeResult result
        self.data = data
        with nogil:
            result = infer_decode(p, size, &self.message)
        if result == DECODE_NO_MEMORY:
            raise MemoryError
        if result == DECODE_TOO_MANY:
            raise ValueError(f"ModelInferRequest has more than {DECODE_LIMIT} elements of one kind")
        if result == DECODE_MALFORMED:
            raise ValueError("malformed ModelInferRequest")
        return self.content()

    def content(self):
        """The content after the last decode, as a DecodedRequest; that of an empty message if it failed."""
        cdef InferMessage *message = &self.message
        return DecodedRequest(
            text_object(message.model_name),
            text_object(message.model_version),
            text_object(message.id),
            parameter_objects(message.parameters, message.parameter_count),
            tuple([input_object(message, &message.inputs[i]) for i in range(message.input_count)]),
            tuple([output_object(message, &message.outputs[i]) for i in range(message.output_count)]),
            tuple([message.raw[i].data[:message.raw[i].size] for i in range(message.raw_count)]),
        )

    def parameter(self, str key not None):
        """The last request parameter with this key, in the form that DecodedRequest has; None: there is none."""
        cdef bytes name = key.encode()
        cdef const Parameter *found = parameter_find(self.message.parameters, self.message.parameter_count, name,
                                                     len(name))
        return parameter_object(found) if found != NULL else None

    def contents(self, uint32_t index, str datatype not None):
        """The typed contents of input `index` as raw tensor bytes of `datatype`.

        Raises IndexError, and ValueError when the input holds elements in a field for another datatype.
        """
        cdef bytes name = datatype.encode()
        cdef Datatype kind = <Datatype>datatype_parse(name, len(name))
        if index >= self.message.input_count:
            raise IndexError(f"input {index} of {self.message.input_count}")
        cdef const InputHead *head = &self.message.inputs[index]
        if contents_field(kind) == 0 or head.contents_mask & ~(<uint32_t>1 << contents_field(kind)):
            raise ValueError(f"contents of input {index} are not {datatype}: fields {head.contents_mask:#b}")
        cdef bytearray out = bytearray(contents_size(head, kind))
        cdef uint8_t *p = out
        with nogil:
            contents_copy(head, kind, p)
        return bytes(out)


def decode(bytes data not None):
    """Decode a ModelInferRequest; see Decoder.decode."""
    return Decoder().decode(data)


cdef Str str_of(bytes data):
    cdef Str text
    text.data = data
    text.size = <uint32_t>len(data)
    return text


cdef class ResponseBuilder:
    """The C arrays of one ResponseHead and the bytes objects that they point into."""

    cdef ResponseHead head
    cdef ResponseOutput *outputs
    cdef Parameter *parameters
    cdef list kept

    def __cinit__(self, model_name, model_version, id, parameters, outputs):
        self.kept = []
        self.outputs = <ResponseOutput *>malloc((len(outputs) + 1) * sizeof(ResponseOutput))
        self.parameters = <Parameter *>malloc((len(parameters) + 1) * sizeof(Parameter))
        if self.outputs == NULL or self.parameters == NULL:
            raise MemoryError
        self.head.model_name = self.text(model_name)
        self.head.model_version = self.text(model_version)
        self.head.id = self.text(id)
        self.head.outputs = self.outputs
        self.head.output_count = <uint32_t>len(outputs)
        self.head.parameters = self.parameters
        self.head.parameter_count = <uint32_t>len(parameters)
        for i, (key, (kind, value)) in enumerate(parameters.items()):
            self.set_parameter(&self.parameters[<uint32_t>i], key, PARAMETER_KINDS.index(kind), value)
        for i, (name, datatype, shape) in enumerate(outputs):
            self.set_output(&self.outputs[<uint32_t>i], name, datatype, shape)

    def __dealloc__(self):
        free(self.outputs)
        free(self.parameters)

    cdef Str text(self, str value):
        cdef bytes data = value.encode()
        self.kept.append(data)
        return str_of(data)

    cdef void set_parameter(self, Parameter *parameter, str key, int kind, value) except *:
        memset(parameter, 0, sizeof(Parameter))
        parameter.key = self.text(key)
        parameter.kind = <ParameterKind>kind
        if kind == PARAMETER_STRING:
            parameter.text = self.text(value)
        elif kind == PARAMETER_DOUBLE:
            parameter.real = value
        elif kind != PARAMETER_NONE:
            parameter.integer = <int64_t><uint64_t>(int(value) & 0xFFFFFFFFFFFFFFFF)

    cdef void set_output(self, ResponseOutput *output, str name, str datatype, shape) except *:
        cdef bytes dims = b"".join([int(dim).to_bytes(8, "little", signed=True) for dim in shape])
        cdef bytes type_name = datatype.encode()
        self.kept.append(dims)
        output.name = self.text(name)
        output.datatype = <Datatype>datatype_parse(type_name, len(type_name))
        output.shape = <const int64_t *><const char *>dims
        output.rank = <uint32_t>len(shape)

    cdef bytes encoded(self):
        cdef size_t size = response_head_size(&self.head)
        cdef bytearray out = bytearray(size)
        cdef uint8_t *start = out
        cdef uint8_t *end
        with nogil:
            end = response_head_write(&self.head, start)
        if <size_t>(end - start) != size:
            raise AssertionError(f"response head of {end - start} bytes where {size} were announced")
        return bytes(out)


def encode_response(str model_name, str model_version, str id, parameters, outputs, raw):
    """Encode a ModelInferResponse.

    `parameters` maps names to (member of the oneof, value) as in DecodedRequest, `outputs` are
    (name, datatype, shape), `raw` the bytes of raw_output_contents.
    """
    cdef uint8_t[16] prefix
    cdef ResponseBuilder builder = ResponseBuilder(model_name, model_version, id, parameters, outputs)
    parts = [builder.encoded()]
    for body in raw:
        end = raw_prefix_write(len(body), prefix)
        if <size_t>(end - prefix) != raw_prefix_size(len(body)):
            raise AssertionError("raw prefix has another size than announced")
        parts += [(<char *>prefix)[:end - prefix], body]
    return b"".join(parts)
