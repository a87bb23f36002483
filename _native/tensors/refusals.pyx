"""Texts of errors in requests, as Triton's front end and core write them."""

from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from inferd._native.protobuf.codec cimport Str
from inferd._native.request.request cimport Request, request_fail
from inferd._native.request.signature cimport Signature, TensorSignature
from inferd._native.status cimport STATUS_INVALID_ARGUMENT
from inferd._native.text cimport clip, format_text, shape_text


cdef void refuse_invalid(Request *request, char *text) noexcept nogil:
    cdef Str id = request.id
    cdef char *whole
    if text == NULL:
        request_fail(request, STATUS_INVALID_ARGUMENT, NULL)
        return
    if id.size:
        whole = format_text("[request id: %.*s] %s", clip(id), id.data, text)
    else:
        whole = format_text("[request id: <id_unknown>] %s", text)
    free(text)
    request_fail(request, STATUS_INVALID_ARGUMENT, whole)


cdef char *names_text(Request *request, bint present) noexcept nogil:
    # "'A','B'": the inputs that are present, or the required ones that are not
    cdef const Signature *signature = request.signature
    cdef size_t size = 1
    cdef size_t at = 0
    cdef uint32_t i
    cdef char *out
    for i in range(signature.input_count):
        size += signature.inputs[i].name.size + 3
    out = <char *>malloc(size)
    if out == NULL:
        return NULL
    for i in range(signature.input_count):
        if request.inputs[i].present != present or (not present and signature.inputs[i].optional):
            continue
        if at:
            out[at] = c","
            at += 1
        out[at] = c"'"
        memcpy(out + at + 1, signature.inputs[i].name.data, signature.inputs[i].name.size)
        at += signature.inputs[i].name.size + 1
        out[at] = c"'"
        at += 1
    out[at] = 0
    return out


cdef void refuse_missing(Request *request, uint32_t present) noexcept nogil:
    cdef const Signature *signature = request.signature
    cdef char *given = names_text(request, True)
    cdef char *missing = names_text(request, False)
    cdef char *text = NULL
    if given != NULL and missing != NULL:
        if signature.required_inputs == signature.input_count:
            text = format_text(
                "expected %u inputs but got %u inputs for model '%.*s'. Got input(s) [%s], but missing required "
                "input(s) [%s]. Please provide all required input(s).",
                signature.input_count, present, signature.name.size, signature.name.data, given, missing)
        else:
            text = format_text(
                "expected number of inputs between %u and %u but got %u inputs for model '%.*s'. Got input(s) [%s], "
                "but missing required input(s) [%s]. Please provide all required input(s).",
                signature.required_inputs, signature.input_count, present, signature.name.size, signature.name.data,
                given, missing)
    free(given)
    free(missing)
    refuse_invalid(request, text)


cdef void refuse_shape(Request *request, const TensorSignature *tensor, const int64_t *shape,
                       uint32_t rank) noexcept nogil:
    cdef const Signature *signature = request.signature
    cdef bint batches = signature.max_batch_size > 0 and not tensor.values
    cdef char want[512]
    cdef char got[512]
    refuse_invalid(request, format_text(
        "unexpected shape for input '%.*s' for model '%.*s'. Expected %s, got %s.%s",
        tensor.name.size, tensor.name.data, signature.name.size, signature.name.data,
        shape_text(want, sizeof(want), batches, <const long *>tensor.dims, tensor.rank),
        shape_text(got, sizeof(got), False, <const long *>shape, rank),
        b" NOTE: max_batch_size is not zero, so the shape starts with the batch dimension, which the "
        b"configuration's dims leave out." if batches else b""))


cdef const char *contents_name(uint32_t field) noexcept nogil:
    if field == 1:
        return "bool_contents"
    if field == 2:
        return "int_contents"
    if field == 3:
        return "int64_contents"
    if field == 4:
        return "uint_contents"
    if field == 5:
        return "uint64_contents"
    if field == 6:
        return "fp32_contents"
    if field == 7:
        return "fp64_contents"
    if field == 8:
        return "bytes_contents"
    return "raw_input_contents, the only form for its datatype"
