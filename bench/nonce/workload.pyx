"""The workload: makes the request of a call's nonce and verifies the response."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from bench.nonce.encode cimport put_request
from bench.nonce.plan cimport (
    MAX_NAME, MAX_RANK, MAX_TENSORS, NO_FAULT, UNKNOWN_MODEL, Catalogue, Model, Plan, Tensor, payload_bound,
    payload_fill, plan_draw,
)
from bench.nonce.verify cimport verify_response
from inferd_client.driver.call cimport Call
from inferd_client.driver.workload cimport (
    CORRECT, EARLY_DEADLINE, MALFORMED, WRONG_STATUS, Verdict, Workload, call_reserve,
)

cdef enum:
    # of grpc-status
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5

# name, bytes of an element, field of InferTensorContents (0: none), sign extension
DATATYPES = (
    ("BYTES", 0, 8, False), ("BOOL", 1, 1, False), ("INT8", 1, 2, True), ("INT16", 2, 2, True), ("INT32", 4, 2, True),
    ("INT64", 8, 3, True), ("UINT8", 1, 4, False), ("UINT16", 2, 4, False), ("UINT32", 4, 4, False),
    ("UINT64", 8, 5, False), ("FP32", 4, 6, False), ("FP64", 8, 7, False), ("FP16", 2, 0, False), ("BF16", 2, 0, False),
)


cdef bint nonce_prepare(void *context, Call *call) noexcept nogil:
    # scratch: the plan, the payloads, the framed message
    cdef Plan plan
    cdef uint8_t *place
    cdef uint8_t *end
    cdef uint32_t i, size
    cdef uint64_t payloads = 0
    plan_draw(<Catalogue *> context, call.nonce, &plan)
    for i in range(plan.model.tensor_count):
        payloads += payload_bound(&plan.model.tensors[i], &plan.parts[i]) + 8
    # a typed element of one raw byte takes up to ten
    if not call_reserve(call, sizeof(Plan) + payloads + (10 * payloads if plan.typed else payloads) + 2048):
        return False
    place = call.scratch + sizeof(Plan)
    for i in range(plan.model.tensor_count):
        plan.parts[i].raw = place
        plan.parts[i].size = payload_fill(&plan.model.tensors[i], &plan.parts[i], place)
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


cdef Verdict nonce_verify(void *context, Call *call) noexcept nogil:
    cdef const Plan *plan = <const Plan *> call.scratch
    cdef uint32_t size
    cdef uint64_t allowed
    cdef int expected = 0
    if call.exchange.grpc_status == DEADLINE_EXCEEDED and call.timeout_us:
        allowed = call.elapsed_ns + (<Catalogue *> context).early_ns
        return CORRECT if allowed >= <uint64_t> call.timeout_us * 1000 else EARLY_DEADLINE
    if plan.fault != NO_FAULT:
        expected = NOT_FOUND if plan.fault == UNKNOWN_MODEL else INVALID_ARGUMENT
    if call.exchange.grpc_status != expected or call.exchange.http_status != 200:
        return WRONG_STATUS
    if expected != 0:
        return CORRECT if call.response_size == 0 else MALFORMED
    if call.response_size < 5 or call.response[0] != 0:
        return MALFORMED
    size = (<uint32_t> call.response[1] << 24 | <uint32_t> call.response[2] << 16 | <uint32_t> call.response[3] << 8
            | call.response[4])
    if size != call.response_size - 5:
        return MALFORMED
    return verify_response(call.response + 5, size, plan)


cdef class NonceWorkload(Workload):
    """Requests to a set of identity models.

    Args:
        models: `bench.repository.Identity`; each returns INPUTn as OUTPUTn.
        fault_fraction: this share of the requests is wrong on purpose and must be refused with the right status.
        large_fraction: this share of the tensors has a first dimension of up to `large_elements`.
        early_us: a call may be answered DEADLINE_EXCEEDED this much before its deadline.
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
        self.verify = nonce_verify

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
        """The serialized request of a nonce, as the driver sends it, for tests and to replay a failure."""
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
        """The `Verdict` (as int, 0 is correct) on this serialized response to a nonce's request."""
        cdef bytes framed = b"\0" + len(response).to_bytes(4, "big") + response if grpc_status == 0 else b""
        cdef Call call
        memset(&call, 0, sizeof(Call))
        call.nonce, call.exchange.grpc_status, call.exchange.http_status = nonce, grpc_status, 200
        try:
            if not nonce_prepare(&self.catalogue, &call):
                raise MemoryError
            call.response = <uint8_t *> <char *> framed
            call.response_size = len(framed)
            return <int> nonce_verify(&self.catalogue, &call)
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
