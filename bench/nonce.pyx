"""Random inference requests whose answers prove themselves.

A request follows from its nonce alone: model, rows, shapes, payload, id, whether tensors travel raw or typed, which
outputs are named, whether it is wrong on purpose. The models are identities (INPUTn comes back as OUTPUTn), so an
answer is right only if its id, shapes and every byte are those of this very request: an answer that belongs to
another call, a row of a batch mate, or bytes of an earlier tensor cannot pass.

Encoding and decoding of messages are written here once more, apart from `_native.protobuf.codec`, because they judge
it.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy, memmove, memset, strlen

from bench.driver cimport (
    CORRECT, EARLY_DEADLINE, MALFORMED, WRONG_BYTES, WRONG_ID, WRONG_MODEL, WRONG_OUTPUTS, WRONG_SHAPE, WRONG_STATUS,
    Call, Verdict, Workload, call_reserve, mix,
)

cdef enum:
    MAX_TENSORS = 4
    MAX_RANK = 6
    MAX_NAME = 64
    MAX_ID = 40
    TYPED_LIMIT = 4096        # raw bytes of a tensor up to which it may travel in typed contents
    COMMON_DIM = 16           # half of all requests have it in every dimension, so that they meet in batches
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5

# name, bytes of an element, field of InferTensorContents (0: none), sign extension
DATATYPES = (
    ("BYTES", 0, 8, False), ("BOOL", 1, 1, False), ("INT8", 1, 2, True), ("INT16", 2, 2, True), ("INT32", 4, 2, True),
    ("INT64", 8, 3, True), ("UINT8", 1, 4, False), ("UINT16", 2, 4, False), ("UINT32", 4, 4, False),
    ("UINT64", 8, 5, False), ("FP32", 4, 6, False), ("FP64", 8, 7, False), ("FP16", 2, 0, False), ("BF16", 2, 0, False),
)

cdef enum Fault:
    # what is wrong with a request on purpose
    NO_FAULT = 0
    UNKNOWN_MODEL = 1         # NOT_FOUND
    SHORT_PAYLOAD = 2         # one byte less than the shape says
    EXCESS_PAYLOAD = 3        # one byte more
    UNKNOWN_DATATYPE = 4
    UNKNOWN_INPUT = 5
    FAULT_COUNT = 6

cdef struct Tensor:
    char input[MAX_NAME]
    char output[MAX_NAME]
    char datatype[8]
    uint32_t element_size     # 0: BYTES
    uint32_t contents_field
    bint is_signed
    bint is_bool
    bint packed_fixed         # FP32 and FP64 travel as they lie; the other typed ones as varints
    uint32_t rank             # without the batch dimension

cdef struct Model:
    char name[MAX_NAME]
    uint32_t max_rows         # 0: no batch dimension
    Tensor tensors[MAX_TENSORS]
    uint32_t tensor_count

cdef struct Part:
    # one tensor of one request
    int64_t shape[MAX_RANK + 1]
    uint32_t rank
    uint64_t elements
    uint64_t payload_seed
    uint8_t *raw
    size_t size
    bint named                # its output is asked for

cdef struct Plan:
    # one request, as its nonce determines it
    Model *model
    Part parts[MAX_TENSORS]
    bint any_named            # the request lists its outputs
    bint typed
    bint versioned
    Fault fault
    char id[MAX_ID]
    uint32_t id_size

cdef struct Catalogue:
    Model *models
    uint32_t model_count
    uint32_t fault_share      # of 65536
    uint32_t large_share
    uint32_t large_elements
    uint64_t early_ns         # how much before its deadline a call may be answered DEADLINE_EXCEEDED


# --- drawing

cdef inline uint64_t draw(uint64_t *state) noexcept nogil:
    state[0] += <uint64_t> 0x9E3779B97F4A7C15
    return mix(state[0])


cdef int64_t draw_dim(uint64_t *state) noexcept nogil:
    """Small dimensions, often the same: 1 .. 40, every fourth power-of-two-ish."""
    cdef uint64_t value = draw(state)
    return <int64_t> (1 << (value % 6)) if value & 0x300 else 1 + <int64_t> ((value >> 32) % 40)


cdef void draw_shape(Catalogue *catalogue, const Tensor *tensor, Part *part, bint common, int64_t rows,
                     uint64_t *state) noexcept nogil:
    cdef uint32_t i
    cdef int64_t dim
    part.rank = 0
    part.elements = 1
    if rows > 0:
        part.shape[0] = rows
        part.rank = 1
        part.elements = rows
    for i in range(tensor.rank):
        dim = COMMON_DIM if common else draw_dim(state)
        if i == 0 and (draw(state) & 0xFFFF) < catalogue.large_share and not common:
            dim = 1 + <int64_t> (draw(state) % catalogue.large_elements)
        part.shape[part.rank] = dim
        part.rank += 1
        part.elements *= dim
    part.payload_seed = draw(state)


cdef void draw_id(Plan *plan, uint64_t nonce, uint64_t *state) noexcept nogil:
    """The nonce in hexadecimal with a tail of 0 to 23 letters; one request in sixteen has no id."""
    cdef uint64_t value = draw(state)
    cdef uint32_t i
    plan.id_size = 0
    if value & 15 == 0:
        return
    for i in range(16):
        plan.id[i] = b"0123456789abcdef"[(nonce >> (4 * i)) & 15]
    plan.id_size = 16 + <uint32_t> ((value >> 8) % 24)
    for i in range(16, plan.id_size):
        plan.id[i] = <char> (97 + (value >> i) % 26)


cdef void draw_plan(Catalogue *catalogue, uint64_t nonce, Plan *plan) noexcept nogil:
    cdef uint64_t state = nonce
    cdef uint64_t value = draw(&state)
    cdef uint32_t i
    cdef int64_t rows
    cdef bint common = value & 1
    plan.model = &catalogue.models[(value >> 8) % catalogue.model_count]
    plan.typed = (value >> 32) & 7 == 0
    plan.versioned = (value >> 40) & 3 == 0
    plan.any_named = (value >> 48) & 1
    value = draw(&state)
    plan.fault = NO_FAULT
    if (value & 0xFFFF) < catalogue.fault_share:
        plan.fault = <Fault> (1 + (value >> 16) % (<int> FAULT_COUNT - 1))
    rows = 1 + <int64_t> ((value >> 32) % min(plan.model.max_rows, 8)) if plan.model.max_rows else 0
    for i in range(plan.model.tensor_count):
        draw_shape(catalogue, &plan.model.tensors[i], &plan.parts[i], common, rows, &state)
        # at least the first output is asked for
        plan.parts[i].named = not plan.any_named or i == 0 or draw(&state) & 1
    draw_id(plan, nonce, &state)


# --- payload

cdef uint64_t payload_bound(const Tensor *tensor, const Part *part) noexcept nogil:
    """Bytes of the payload, rounded up to a multiple of 8; for BYTES the most it can be."""
    return (part.elements * (tensor.element_size if tensor.element_size else 4 + 32) + 8) & ~<uint64_t> 7


cdef size_t fill_strings(uint64_t elements, uint64_t seed, uint8_t *out) noexcept nogil:
    """Elements of 0 to 31 random bytes, each with its length in front; returns the bytes written."""
    cdef uint8_t *start = out
    cdef uint64_t value, _i
    cdef uint32_t size
    for _i in range(elements):
        value = draw(&seed)
        size = value & 31
        memcpy(out, &size, 4)
        out += 4
        while size > 0:
            value = draw(&seed)
            memcpy(out, &value, min(size, 8))
            out += min(size, 8)
            size -= min(size, 8)
    return out - start


cdef size_t fill_payload(const Tensor *tensor, const Part *part, uint8_t *out) noexcept nogil:
    """Write the tensor's elements; `out` has room for payload_bound bytes. Returns the bytes of the payload."""
    cdef uint64_t seed = part.payload_seed
    cdef uint64_t value, i
    cdef size_t size = part.elements * tensor.element_size
    if tensor.element_size == 0:
        return fill_strings(part.elements, seed, out)
    for i in range((size + 7) // 8):
        value = draw(&seed)
        if tensor.is_bool:
            value &= <uint64_t> 0x0101010101010101
        memcpy(out + 8 * i, &value, 8)
    return size


# --- writing protobuf

cdef inline uint8_t *put_varint(uint8_t *out, uint64_t value) noexcept nogil:
    while value >= 0x80:
        out[0] = <uint8_t> (value | 0x80)
        out += 1
        value >>= 7
    out[0] = <uint8_t> value
    return out + 1


cdef uint8_t *put_bytes(uint8_t *out, uint32_t field, const void *data, size_t size) noexcept nogil:
    out = put_varint(put_varint(out, field << 3 | 2), size)
    memcpy(out, data, size)
    return out + size


cdef uint8_t *put_text(uint8_t *out, uint32_t field, const char *text) noexcept nogil:
    return put_bytes(out, field, text, strlen(text))


cdef uint8_t *put_name(uint8_t *out, uint32_t field, const char *name, const char *wrong, bint fault) noexcept nogil:
    return put_text(out, field, wrong if fault else name)


cdef uint8_t *close_nested(uint8_t *start, uint8_t *end, uint32_t field) noexcept nogil:
    """Put tag and length in front of what was written at `start`, moving it up."""
    cdef uint8_t head[16]
    cdef size_t size = end - start
    cdef size_t head_size = put_varint(put_varint(head, field << 3 | 2), size) - head
    memmove(start + head_size, start, size)
    memcpy(start, head, head_size)
    return end + head_size


cdef uint8_t *put_typed(uint8_t *out, const Tensor *tensor, const Part *part) noexcept nogil:
    """The elements as the one field of InferTensorContents that is meant for them."""
    cdef uint8_t *start = out
    cdef const uint8_t *raw = part.raw
    cdef uint64_t i, _i, value
    cdef uint32_t size = tensor.element_size
    if size == 0:
        for _i in range(part.elements):
            memcpy(&size, raw, 4)
            out = put_bytes(out, tensor.contents_field, raw + 4, size)
            raw += 4 + size
        return out
    if tensor.packed_fixed:
        return put_bytes(out, tensor.contents_field, raw, part.size)
    for i in range(part.elements):
        value = 0
        memcpy(&value, raw + i * size, size)
        if tensor.is_signed and size < 8 and value >> (8 * size - 1):
            value |= ~<uint64_t> 0 << (8 * size)
        out = put_varint(out, value)
    return close_nested(start, out, tensor.contents_field)


cdef uint8_t *put_shape(uint8_t *out, const Part *part) noexcept nogil:
    cdef uint8_t *start = out
    cdef uint32_t i
    for i in range(part.rank):
        out = put_varint(out, <uint64_t> part.shape[i])
    return close_nested(start, out, 3)


cdef uint8_t *put_input(uint8_t *out, const Plan *plan, uint32_t i) noexcept nogil:
    cdef uint8_t *start = out
    cdef uint8_t *contents
    cdef const Tensor *tensor = &plan.model.tensors[i]
    out = put_name(out, 1, tensor.input, b"NOSUCH", plan.fault == UNKNOWN_INPUT and i == 0)
    out = put_name(out, 2, tensor.datatype, b"FP99", plan.fault == UNKNOWN_DATATYPE and i == 0)
    out = put_shape(out, &plan.parts[i])
    if plan.typed:
        contents = out
        out = close_nested(contents, put_typed(contents, tensor, &plan.parts[i]), 5)
    return close_nested(start, out, 5)


cdef uint8_t *put_request(uint8_t *out, const Plan *plan) noexcept nogil:
    cdef uint32_t i
    cdef size_t size
    out = put_name(out, 1, plan.model.name, b"nosuch", plan.fault == UNKNOWN_MODEL)
    if plan.versioned:
        out = put_text(out, 2, b"1")
    if plan.id_size:
        out = put_bytes(out, 3, plan.id, plan.id_size)
    for i in range(plan.model.tensor_count):
        out = put_input(out, plan, i)
    if plan.any_named:
        for i in range(plan.model.tensor_count):
            if plan.parts[i].named:
                out = close_nested(out, put_text(out, 1, plan.model.tensors[i].output), 6)
    if not plan.typed:
        for i in range(plan.model.tensor_count):
            size = plan.parts[i].size
            if i == 0 and plan.fault == SHORT_PAYLOAD:
                size -= 1
            elif i == 0 and plan.fault == EXCESS_PAYLOAD:
                size += 1
            out = put_bytes(out, 7, plan.parts[i].raw, size)
    return out


cdef bint may_be_typed(const Plan *plan) noexcept nogil:
    """Typed contents are all or nothing; a payload of the wrong size needs raw contents."""
    cdef uint32_t i
    if plan.fault == SHORT_PAYLOAD or plan.fault == EXCESS_PAYLOAD:
        return False
    for i in range(plan.model.tensor_count):
        if plan.model.tensors[i].contents_field == 0:
            return False
        if payload_bound(&plan.model.tensors[i], &plan.parts[i]) > TYPED_LIMIT:
            return False
    return True


cdef bint nonce_prepare(void *context, Call *call) noexcept nogil:
    # scratch: the plan, the payloads, the framed message
    cdef Plan plan
    cdef uint8_t *place
    cdef uint8_t *end
    cdef uint32_t i, size
    cdef uint64_t payloads = 0
    draw_plan(<Catalogue *> context, call.nonce, &plan)
    plan.typed = plan.typed and may_be_typed(&plan)
    for i in range(plan.model.tensor_count):
        payloads += payload_bound(&plan.model.tensors[i], &plan.parts[i]) + 8
    # a typed element of one raw byte takes up to ten
    if not call_reserve(call, sizeof(Plan) + payloads + (10 * payloads if plan.typed else payloads) + 2048):
        return False
    place = call.scratch + sizeof(Plan)
    for i in range(plan.model.tensor_count):
        plan.parts[i].raw = place
        plan.parts[i].size = fill_payload(&plan.model.tensors[i], &plan.parts[i], place)
        plan.parts[i].raw[plan.parts[i].size] = 0  # the byte that EXCESS_PAYLOAD sends
        place += payload_bound(&plan.model.tensors[i], &plan.parts[i]) + 8
    memcpy(call.scratch, &plan, sizeof(Plan))
    end = put_request(place + 5, &plan)
    size = <uint32_t> (end - place - 5)
    place[0] = 0
    for i in range(4):
        place[1 + i] = <uint8_t> (size >> (24 - 8 * i))
    call.body = place
    call.body_size = end - place
    call.body_stays = False
    return True


# --- reading protobuf

cdef struct Reader:
    const uint8_t *at
    const uint8_t *end
    bint failed

cdef struct Field:
    uint32_t number
    uint64_t value            # wire type 0
    const uint8_t *data       # wire type 2
    size_t size


cdef uint64_t take_varint(Reader *reader) noexcept nogil:
    cdef uint64_t value = 0
    cdef uint8_t byte
    cdef int shift = 0
    while reader.at < reader.end and shift < 64:
        byte = reader.at[0]
        reader.at += 1
        value |= <uint64_t> (byte & 0x7F) << shift
        if byte < 0x80:
            return value
        shift += 7
    reader.failed = True
    return 0


cdef bint take_field(Reader *reader, Field *field) noexcept nogil:
    """The next field; False at the end or when the message is malformed. Only varint and length-delimited fields
    occur in a ModelInferResponse down to the depth read here."""
    cdef uint64_t tag
    if reader.at == reader.end or reader.failed:
        return False
    tag = take_varint(reader)
    field.number = <uint32_t> (tag >> 3)
    field.value = take_varint(reader)
    field.data = NULL
    field.size = 0
    if tag & 7 == 2:
        field.data = reader.at
        field.size = field.value
        if field.value > <uint64_t> (reader.end - reader.at):
            reader.failed = True
        else:
            reader.at += field.value
    elif tag & 7 != 0:
        reader.failed = True
    return not reader.failed


cdef bint equals(const Field *field, const char *text) noexcept nogil:
    return field.size == strlen(text) and memcmp(field.data, text, field.size) == 0


cdef Verdict judge_shape(const Field *packed, const Part *part) noexcept nogil:
    cdef Reader reader = Reader(packed.data, packed.data + packed.size, False)
    cdef uint32_t i
    for i in range(part.rank):
        if reader.at == reader.end or <int64_t> take_varint(&reader) != part.shape[i]:
            return WRONG_SHAPE
    return CORRECT if reader.at == reader.end and not reader.failed else WRONG_SHAPE


cdef int find_output(const Model *model, const Field *name) noexcept nogil:
    cdef uint32_t i
    for i in range(model.tensor_count):
        if equals(name, model.tensors[i].output):
            return <int> i
    return -1


cdef Verdict judge_output(const Field *encoded, const Plan *plan, int *which) noexcept nogil:
    """One InferOutputTensor; `which` becomes its place in the model."""
    cdef Reader reader = Reader(encoded.data, encoded.data + encoded.size, False)
    cdef Field field
    cdef Field datatype = Field(0, 0, NULL, 0), shape = Field(0, 0, NULL, 0)
    which[0] = -1
    while take_field(&reader, &field):
        if field.number == 1:
            which[0] = find_output(plan.model, &field)
        elif field.number == 2:
            datatype = field
        elif field.number == 3:
            shape = field
    if reader.failed:
        return MALFORMED
    if which[0] < 0 or not plan.parts[which[0]].named:
        return WRONG_OUTPUTS
    if not equals(&datatype, plan.model.tensors[which[0]].datatype):
        return WRONG_OUTPUTS
    return judge_shape(&shape, &plan.parts[which[0]])


cdef Verdict judge_response(Reader *reader, const Plan *plan) noexcept nogil:
    cdef int order[MAX_TENSORS]
    cdef uint32_t outputs = 0, raws = 0, i, seen = 0, wanted = 0
    cdef bint named_model = False, same_id = plan.id_size == 0
    cdef const Part *part
    cdef Verdict verdict
    cdef Field field
    while take_field(reader, &field):
        if field.number == 1:
            named_model = equals(&field, plan.model.name)
        elif field.number == 3:
            same_id = field.size == plan.id_size and memcmp(field.data, plan.id, plan.id_size) == 0
        elif field.number == 5:
            if outputs == plan.model.tensor_count:
                return WRONG_OUTPUTS
            verdict = judge_output(&field, plan, &order[outputs])
            if verdict != CORRECT:
                return verdict
            seen |= <uint32_t> 1 << order[outputs]
            outputs += 1
        elif field.number == 6:
            # the schema's order puts every output before the raw contents
            if raws >= outputs:
                return WRONG_OUTPUTS
            part = &plan.parts[order[raws]]
            if field.size != part.size or memcmp(field.data, part.raw, part.size) != 0:
                return WRONG_BYTES
            raws += 1
    if reader.failed:
        return MALFORMED
    if not named_model:
        return WRONG_MODEL
    if not same_id:
        return WRONG_ID
    for i in range(plan.model.tensor_count):
        wanted |= <uint32_t> plan.parts[i].named << i
    return CORRECT if seen == wanted and raws == outputs else WRONG_OUTPUTS


cdef Verdict nonce_judge(void *context, Call *call) noexcept nogil:
    cdef const Plan *plan = <const Plan *> call.scratch
    cdef Reader reader
    cdef uint32_t size
    cdef uint64_t allowed
    cdef int expected = 0
    if call.grpc_status == DEADLINE_EXCEEDED and call.timeout_us:
        allowed = call.elapsed_ns + (<Catalogue *> context).early_ns
        return CORRECT if allowed >= <uint64_t> call.timeout_us * 1000 else EARLY_DEADLINE
    if plan.fault != NO_FAULT:
        expected = NOT_FOUND if plan.fault == UNKNOWN_MODEL else INVALID_ARGUMENT
    if call.grpc_status != expected or call.http_status != 200:
        return WRONG_STATUS
    if expected != 0:
        return CORRECT if call.answer_size == 0 else MALFORMED
    if call.answer_size < 5 or call.answer[0] != 0:
        return MALFORMED
    size = (<uint32_t> call.answer[1] << 24 | <uint32_t> call.answer[2] << 16 | <uint32_t> call.answer[3] << 8
            | call.answer[4])
    if size != call.answer_size - 5:
        return MALFORMED
    reader = Reader(call.answer + 5, call.answer + call.answer_size, False)
    return judge_response(&reader, plan)


# --- Python

cdef class NonceWorkload(Workload):
    """Requests to a set of identity models.

    Args:
        models: what to send to, see `bench.repository.Identity`; each takes INPUTn and gives it back as OUTPUTn.
        fault_fraction: this share of the requests is wrong on purpose and must be refused with the right status.
        large_fraction: this share of the tensors has a first dimension of up to `large_elements`.
        early_us: so much before its deadline a call may be answered DEADLINE_EXCEEDED.
    """
    cdef Catalogue catalogue

    def __cinit__(self, models, *, double fault_fraction=0.05, double large_fraction=0.01,
                  uint32_t large_elements=4096, uint32_t early_us=0):
        models = list(models)
        if not models:
            raise ValueError("expected at least one model")
        self.catalogue.models = <Model *> calloc(len(models), sizeof(Model))
        if self.catalogue.models == NULL:
            raise MemoryError
        for model in models:
            self._add(&self.catalogue.models[self.catalogue.model_count], model)
            self.catalogue.model_count += 1
        self.catalogue.fault_share = <uint32_t> (fault_fraction * 65536)
        self.catalogue.large_share = <uint32_t> (large_fraction * 65536)
        self.catalogue.large_elements = max(large_elements, 1)
        self.catalogue.early_ns = <uint64_t> early_us * 1000
        self.context = &self.catalogue
        self.prepare = nonce_prepare
        self.judge = nonce_judge

    def __dealloc__(self):
        free(self.catalogue.models)

    cdef _add(self, Model *model, source):
        if len(source.tensors) > MAX_TENSORS:
            raise ValueError(f"model '{source.name}' has {len(source.tensors)} tensors, expected at most {MAX_TENSORS}")
        copy_name(model.name, MAX_NAME, source.name)
        model.max_rows = source.max_batch_size
        model.tensor_count = len(source.tensors)
        for i, (datatype, rank) in enumerate(source.tensors):
            describe_tensor(&model.tensors[<size_t> i], i, datatype, rank)

    def request(self, uint64_t nonce):
        """The serialized request of a nonce: what the driver would send, for tests and to replay a failure."""
        cdef Call call
        memset(&call, 0, sizeof(Call))
        call.nonce = nonce
        try:
            if not nonce_prepare(&self.catalogue, &call):
                raise MemoryError
            return (<const char *> call.body)[5:call.body_size]
        finally:
            free(call.scratch)

    def verdict(self, uint64_t nonce, bytes response, int grpc_status=0):
        """What the judge says (a `Verdict` as int, 0 is correct) to this serialized response to a nonce's request."""
        cdef bytes framed = b"\0" + len(response).to_bytes(4, "big") + response if grpc_status == 0 else b""
        cdef Call call
        memset(&call, 0, sizeof(Call))
        call.nonce, call.grpc_status, call.http_status = nonce, grpc_status, 200
        try:
            if not nonce_prepare(&self.catalogue, &call):
                raise MemoryError
            call.answer = <uint8_t *> <char *> framed
            call.answer_size = len(framed)
            return <int> nonce_judge(&self.catalogue, &call)
        finally:
            free(call.scratch)


cdef copy_name(char *place, size_t capacity, str name):
    encoded = name.encode()
    if <size_t> len(encoded) >= capacity:
        raise ValueError(f"expected a name of fewer than {capacity} bytes, got '{name}'")
    memcpy(place, <const char *> (<bytes> encoded), len(encoded) + 1)


cdef describe_tensor(Tensor *tensor, int i, str datatype, uint32_t rank):
    found = {name: row for name, *row in DATATYPES}.get(datatype)
    if found is None or rank > MAX_RANK:
        raise ValueError(f"expected a v2 datatype and at most {MAX_RANK} dimensions, got {datatype} and {rank}")
    copy_name(tensor.input, MAX_NAME, f"INPUT{i}")
    copy_name(tensor.output, MAX_NAME, f"OUTPUT{i}")
    copy_name(tensor.datatype, 8, datatype)
    tensor.element_size, tensor.contents_field, tensor.is_signed = found
    tensor.is_bool = datatype == "BOOL"
    tensor.packed_fixed = datatype in ("FP32", "FP64")
    tensor.rank = rank
