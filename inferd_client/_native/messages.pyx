"""Messages of ModelInfer: builds requests and reads responses.

Requests are written field by field as `proto/grpc_service.proto` has them; large tensors are not copied into them, but
sent from their own memory. Responses and their tensors are read in place.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

from inferd_client._native.pool cimport pool_give

cdef extern from "Python.h":
    const char *PyUnicode_AsUTF8AndSize(object text, Py_ssize_t *size) except NULL

cdef enum:
    PREFIX = 5               # bytes before a gRPC message: compressed or not, length
    COPIED = 1 << 13         # requests with fewer bytes in tensors are one piece


cdef class Content:
    """The bytes of one tensor, held in place.

    Args:
        data: any contiguous buffer.
    """

    def __cinit__(self, data):
        PyObject_GetBuffer(data, &self.view, PyBUF_SIMPLE)

    def __dealloc__(self):
        PyBuffer_Release(&self.view)

    def __len__(self):
        return self.view.len

    def __bytes__(self):
        return PyBytes_FromStringAndSize(<char *> self.view.buf, self.view.len)

    def __reduce__(self):
        return Content, (bytes(self),)


cdef class Message:
    """The bytes of one received message; a writable buffer, since it has a single owner."""

    def __dealloc__(self):
        pool_give(self.data, self.size, self.capacity)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.data, self.size, 0, flags)

    def __len__(self):
        return self.size


cdef Message message_of(uint8_t *data, size_t size, size_t capacity):
    cdef Message message = Message.__new__(Message)
    message.data = data
    message.size = size
    message.capacity = capacity
    return message


# --- writing

cdef bytes varint(uint64_t value):
    cdef uint8_t out[10]
    cdef int size = 0
    while value >= 0x80:
        out[size] = <uint8_t> (value | 0x80)
        value >>= 7
        size += 1
    out[size] = <uint8_t> value
    return PyBytes_FromStringAndSize(<char *> out, size + 1)


cdef bytes field(uint32_t number, bytes content):
    """A field of bytes, text or a message."""
    return varint(number << 3 | 2) + varint(len(content)) + content


cdef bytes text(uint32_t number, value):
    return field(number, value.encode() if isinstance(value, str) else bytes(value))


KINDS = {"bool": 1, "int64": 2, "string": 3, "double": 4, "uint64": 5}
"""Fields of InferParameter."""


def parameter(uint32_t number, str key, str kind, value):
    """An entry of a map of parameters, which is field `number`.

    Raises:
        ValueError: the number does not fit.
    """
    import struct

    cdef uint32_t where = KINDS[kind]
    if kind == "string":
        said = text(where, value)
    elif kind == "double":
        said = varint(where << 3 | 1) + struct.pack("<d", value)
    else:
        least = 0 if kind == "uint64" else -(1 << 63)
        if not least <= int(value) < least + (1 << 64):
            raise ValueError(f"parameter {key!r}: {value} does not fit {kind}")
        said = varint(where << 3) + varint(<uint64_t> (int(value) & 0xFFFFFFFFFFFFFFFF))
    return field(number, text(1, key) + field(2, said))


def input_tensor(name, str datatype, shape, list parameters):
    """A field `inputs` of ModelInferRequest."""
    dims = b"".join([varint(<uint64_t> (int(size) & 0xFFFFFFFFFFFFFFFF)) for size in shape])
    return field(5, text(1, name) + text(2, datatype) + (field(3, dims) if dims else b"") + b"".join(parameters))


def requested_output(name, list parameters):
    """A field `outputs` of ModelInferRequest."""
    return field(6, text(1, name) + b"".join(parameters))


cdef dict _names = {}


cdef bytes name_field(uint32_t number, value):
    """Cached: models' names and versions recur."""
    found = _names.get((number, value))
    if found is None:
        if len(_names) > 1000:
            _names.clear()
        found = _names[(number, value)] = text(number, value)
    return <bytes> found


def request_head(model_name, model_version, request_id, parameters):
    """The fields of ModelInferRequest before its tensors."""
    head = name_field(1, model_name)
    if model_version:
        head += name_field(2, model_version)
    if request_id:
        head += text(3, request_id)
    return head + b"".join(parameters) if parameters else head


cdef inline uint8_t *put_varint(uint8_t *out, uint64_t value) noexcept:
    while value >= 0x80:
        out[0] = <uint8_t> (value | 0x80)
        out += 1
        value >>= 7
    out[0] = <uint8_t> value
    return out + 1


cdef inline size_t varint_size(uint64_t value) noexcept:
    cdef size_t size = 1
    while value >= 0x80:
        value >>= 7
        size += 1
    return size


cdef inline uint8_t *put_prefix(uint8_t *out, size_t size) noexcept:
    out[0] = 0
    out[1] = <uint8_t> (size >> 24)
    out[2] = <uint8_t> (size >> 16)
    out[3] = <uint8_t> (size >> 8)
    out[4] = <uint8_t> size
    return out + PREFIX


def infer_request(bytes head, inputs, outputs):
    """A ModelInferRequest as gRPC sends it, in pieces: buffers whose bytes follow each other.

    Args:
        head: see `request_head`.
        inputs: each has `_written()`, which returns its encoded field; `_encoded`, the kept result of that, or None;
            and `_content`, the Content to send in the request, or None.
        outputs: each has `_written()`; or None.

    Raises:
        ValueError: the request is longer than a gRPC message can be.
    """
    cdef list fields = [head], contents = []
    for each in inputs:
        encoded = each._encoded
        fields.append(each._written() if encoded is None else encoded)
        content = each._content
        if content is not None:
            contents.append(content)
    if outputs is not None:
        for each in outputs:
            fields.append(each._written())
    return framed_request(fields, contents)


cdef list framed_request(list fields, list contents):
    """A framed message of `fields` (each is encoded) and of raw_input_contents, which `contents` has."""
    cdef size_t size = 0, raw = 0, tags = 0
    cdef bytes each, head
    cdef Content content
    cdef uint8_t *out
    cdef uint8_t *start
    cdef bint copied
    for each in fields:
        size += len(each)
    for content in contents:
        raw += content.view.len
        tags += 1 + varint_size(content.view.len)
    if size + tags + raw > 0xFFFFFFFF:
        raise ValueError(f"a request of {size + tags + raw} bytes: gRPC has no messages of more than {0xFFFFFFFF}")
    copied = raw < COPIED
    head = PyBytes_FromStringAndSize(NULL, PREFIX + size + tags + (raw if copied else 0))
    start = out = put_prefix(<uint8_t *> PyBytes_AS_STRING(head), size + tags + raw)
    for each in fields:
        memcpy(out, PyBytes_AS_STRING(each), len(each))
        out += len(each)
    if copied:
        for content in contents:
            out[0] = 7 << 3 | 2
            out = put_varint(out + 1, content.view.len)
            memcpy(out, content.view.buf, content.view.len)
            out += content.view.len
        return [head]
    pieces = []
    begin = 0
    for content in contents:
        out[0] = 7 << 3 | 2
        out = put_varint(out + 1, content.view.len)
        end = (out - start) + PREFIX
        pieces.append(head[begin:end] if begin or len(contents) > 1 else head)
        pieces.append(content)
        begin = end
    return pieces


def framed(message):
    """A serialised message as gRPC sends it."""
    return b"\0" + len(message).to_bytes(4, "big") + message


# --- strings

def packed_strings(elements):
    """The content of a BYTES tensor: each element after its length, in 4 bytes.

    Args:
        elements: of an array, in C order: bytes, bytearrays, or other objects, of which str() is sent.
    """
    import struct

    pack = struct.Struct("<I").pack
    out = []
    for element in elements:
        if type(element) is not bytes:  # numpy.bytes_ is a subclass
            element = bytes(element) if isinstance(element, (bytes, bytearray)) else str(element).encode()
        out.append(pack(len(<bytes> element)))
        out.append(element)
    return b"".join(out)


def unpacked_strings(data):
    """The elements of the content of a BYTES tensor.

    Raises:
        ValueError: an element is longer than the rest of the content.
    """
    cdef Py_buffer view
    cdef size_t at = 0, end
    cdef uint32_t size
    cdef const uint8_t *raw
    out = []
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        raw = <const uint8_t *> view.buf
        end = view.len
        while at < end:
            if end - at < 4:
                raise ValueError(f"a BYTES tensor ends within the length of element {len(out)}")
            memcpy(&size, raw + at, 4)
            at += 4
            if size > end - at:
                raise ValueError(f"element {len(out)} of a BYTES tensor says {size} bytes, {end - at} are there")
            out.append(PyBytes_FromStringAndSize(<const char *> raw + at, size))
            at += size
    finally:
        PyBuffer_Release(&view)
    return out


# --- reading

cdef struct Reader:
    const uint8_t *at
    const uint8_t *end


cdef int read_varint(Reader *reader, uint64_t *value) except -1:
    cdef int shift = 0
    value[0] = 0
    while reader.at < reader.end and shift < 64:
        value[0] |= <uint64_t> (reader.at[0] & 0x7F) << shift
        reader.at += 1
        if (reader.at - 1)[0] < 0x80:
            return 0
        shift += 7
    raise ValueError("the response is no protobuf message: a number does not end")


cdef int read_field(Reader *reader, uint32_t *number, uint32_t *wire, Reader *content) except -1:
    """The next field; `content` is set for fields of bytes, others are skipped. Returns 1, 0 at the end."""
    cdef uint64_t value
    if reader.at >= reader.end:
        return 0
    read_varint(reader, &value)
    number[0] = <uint32_t> (value >> 3)
    wire[0] = value & 7
    content.at = content.end = reader.at
    if wire[0] == 0:
        read_varint(reader, &value)
        content.end = reader.at
        return 1
    if wire[0] == 2:
        read_varint(reader, &value)
    elif wire[0] == 1 or wire[0] == 5:
        value = 8 if wire[0] == 1 else 4
    else:
        raise ValueError(f"the response is no protobuf message: wire type {wire[0]}")
    if value > <uint64_t> (reader.end - reader.at):
        raise ValueError("the response is no protobuf message: a field is longer than what is there")
    content.at = reader.at
    content.end = reader.at = reader.at + value
    return 1


cdef str read_text(const Reader *content):
    return content.at[:content.end - content.at].decode("utf-8", "replace")


cdef tuple read_output(Reader reader):
    """(name, datatype, shape, whether it has contents of its own) of an InferOutputTensor."""
    cdef uint32_t number = 0, wire = 0
    cdef Reader content
    cdef uint64_t value
    name = datatype = ""
    has_contents = False
    shape = []
    while read_field(&reader, &number, &wire, &content):
        if number == 1 and wire == 2:
            name = read_text(&content)
        elif number == 2 and wire == 2:
            datatype = read_text(&content)
        elif number == 3 and (wire == 2 or wire == 0):
            while content.at < content.end:
                read_varint(&content, &value)
                shape.append(<int64_t> value)
        elif number == 5 and wire == 2:
            has_contents = content.end > content.at
    return name, datatype, tuple(shape), has_contents


def read_response(message, size_t start=0, size_t end=0):
    """Read a ModelInferResponse: (model name, version, id, outputs).

    Args:
        message: a buffer.
        start, end: where in it the response lies; 0 and 0 for all of it.

    Returns:
        outputs by name: (datatype, shape, offset in the buffer, bytes); the offset is -1 where the tensor is not raw.

    Raises:
        ValueError: the bytes are no such message.
    """
    cdef Py_buffer view
    cdef Reader reader, content
    cdef uint32_t number = 0, wire = 0
    model = version = identifier = ""
    outputs = []
    raw = []
    PyObject_GetBuffer(message, &view, PyBUF_SIMPLE)
    try:
        reader.at = <const uint8_t *> view.buf + start
        reader.end = <const uint8_t *> view.buf + (end or <size_t> view.len)
        while read_field(&reader, &number, &wire, &content):
            if wire != 2:
                continue
            if number == 6:
                raw.append((content.at - <const uint8_t *> view.buf, content.end - content.at))
            elif number == 5:
                outputs.append(read_output(content))
            elif number == 1:
                model = read_text(&content)
            elif number == 2:
                version = read_text(&content)
            elif number == 3:
                identifier = read_text(&content)
    finally:
        PyBuffer_Release(&view)
    found = {}
    for i, (name, datatype, shape, has_contents) in enumerate(outputs):
        place = raw[i] if i < len(raw) and not has_contents else (-1, 0)
        found.setdefault(name, (datatype, shape, place[0], place[1]))
    return model, version, identifier, found


cdef enum:
    MOST_DIMS = 16           # of an array from `array_of`

# An output whose bytes are raw.
cdef struct RawOutput:
    Reader name
    Reader datatype
    int64_t dims[MOST_DIMS]
    int rank                 # -1: it has more than MOST_DIMS, or contents of its own


cdef int read_raw_output(Reader reader, RawOutput *output) except -1:
    cdef uint32_t number = 0, wire = 0
    cdef Reader content
    cdef uint64_t value
    output.name.at = output.name.end = output.datatype.at = output.datatype.end = reader.at
    output.rank = 0
    while read_field(&reader, &number, &wire, &content):
        if number == 1 and wire == 2:
            output.name = content
        elif number == 2 and wire == 2:
            output.datatype = content
        elif number == 3 and (wire == 2 or wire == 0):
            while content.at < content.end and 0 <= output.rank < MOST_DIMS:
                read_varint(&content, &value)
                output.dims[output.rank] = <int64_t> value
                output.rank += 1
            if content.at < content.end:
                output.rank = -1
        elif number == 5 and wire == 2 and content.end > content.at:
            output.rank = -1
            return 0
    return 0


cdef bint find_raw_output(Reader reader, str name, RawOutput *output, Reader *raw) except -1:
    """Find the first output of this name, and its bytes. False: `read_response` must look for it."""
    cdef uint32_t number = 0, wire = 0
    cdef Reader content
    cdef Py_ssize_t size = 0
    cdef const char *wanted = PyUnicode_AsUTF8AndSize(name, &size)
    cdef int before = 0, place = -1  # outputs seen; raw contents before those of the wanted one, once that is seen
    cdef bint found = False
    while read_field(&reader, &number, &wire, &content):
        if wire != 2:
            continue
        if number == 5 and place < 0 and not found:
            read_raw_output(content, output)
            if output.name.end - output.name.at == size and memcmp(output.name.at, wanted, size) == 0:
                if output.rank < 0:
                    return False
                place = before
            before += 1
        elif number == 6:
            if place < 0 and not found:
                return False
            if place == 0:
                raw[0] = content
                found = True
            place -= 1
    return found


cdef bint dims_say(const RawOutput *output, size_t element, size_t size):
    """Whether datatype and shape make this number of bytes, and at least one."""
    cdef size_t said = element
    cdef int i
    for i in range(output.rank):
        if output.dims[i] <= 0 or <size_t> output.dims[i] > size:
            return False
        said *= <size_t> output.dims[i]  # of two numbers of 32 bits
        if said > size:
            return False
    return said == size


def array_of(message, size_t start, size_t end, name, make, dict types):
    """The tensor of an output over the memory of a ModelInferResponse.

    Args:
        message, start, end: as for `read_response`.
        name: of the output.
        make: numpy.ndarray.
        types: by datatypes, pairs (numpy.dtype, bytes of an element).

    Returns:
        None if the whole message must be read to find the reason: there is no such output, its bytes are not raw or do
        not fit its shape, its datatype is none of `types`, or its memory is not aligned for that.

    Raises:
        ValueError: it is no such message.
    """
    cdef Py_buffer view
    cdef Reader reader, raw
    cdef RawOutput output
    cdef size_t element, size
    if type(name) is not str:
        return None
    raw.at = raw.end = NULL
    output.rank = 0
    PyObject_GetBuffer(message, &view, PyBUF_SIMPLE)
    try:
        reader.at = <const uint8_t *> view.buf + start
        reader.end = <const uint8_t *> view.buf + (end or <size_t> view.len)
        if not find_raw_output(reader, <str> name, &output, &raw):
            return None
        kind = types.get(read_text(&output.datatype))
        if kind is None:
            return None
        element = (<tuple> kind)[1]
        size = raw.end - raw.at
        if <size_t> raw.at % element or size > 0xFFFFFFFF or not dims_say(&output, element, size):
            return None
        shape = tuple([output.dims[i] for i in range(output.rank)])
        return make(shape, (<tuple> kind)[0], message, raw.at - <const uint8_t *> view.buf)
    except UnicodeEncodeError:  # of a name that no output can have
        return None
    finally:
        PyBuffer_Release(&view)


def read_stream_response(message):
    """A ModelStreamInferResponse: (error message, start and end of its response in the buffer)."""
    cdef Py_buffer view
    cdef Reader reader, content
    cdef uint32_t number = 0, wire = 0
    error = ""
    start = end = 0
    PyObject_GetBuffer(message, &view, PyBUF_SIMPLE)
    try:
        reader.at = <const uint8_t *> view.buf
        reader.end = reader.at + view.len
        while read_field(&reader, &number, &wire, &content):
            if number == 1 and wire == 2:
                error = read_text(&content)
            elif number == 2 and wire == 2:
                start = content.at - <const uint8_t *> view.buf
                end = content.end - <const uint8_t *> view.buf
    finally:
        PyBuffer_Release(&view)
    return error, start, end
