"""The compiled signature of a model version: names, datatypes and shapes in plain C, for checking requests."""

from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy

from _native.codec cimport Str
from _native.datatype cimport DT_INVALID, datatype_parse


cdef int tensor_find(const TensorSignature *tensors, uint32_t count, Str name) noexcept nogil:
    cdef uint32_t i
    for i in range(count):
        if tensors[i].name.size == name.size and memcmp(tensors[i].name.data, name.data, name.size) == 0:
            return <int>i
    return -1


cdef int str_copy(Str *out, str text) except -1:
    cdef bytes encoded = text.encode()
    cdef char *data = <char *>malloc(len(encoded) + 1)
    if data == NULL:
        raise MemoryError
    memcpy(data, <const char *>encoded, len(encoded) + 1)  # terminated, for error texts
    out.data = data
    out.size = <uint32_t>len(encoded)
    return 0


cdef int tensor_build(TensorSignature *tensor, object spec, bint batches) except -1:
    cdef bytes datatype = spec.datatype.encode()
    if len(spec.dims) + batches > MAX_RANK:
        raise ValueError(
            f"tensor '{spec.name}' has {len(spec.dims)} dimensions, at most {MAX_RANK - batches} are served")
    str_copy(&tensor.name, spec.name)
    tensor.datatype = datatype_parse(datatype, len(datatype))
    if tensor.datatype == DT_INVALID:
        raise ValueError(f"tensor '{spec.name}' has unknown datatype '{spec.datatype}'")
    tensor.optional = spec.optional
    tensor.rank = <uint32_t>len(spec.dims)
    for i, dim in enumerate(spec.dims):
        tensor.dims[i] = dim
        if dim < 0:
            tensor.variable = True
    if spec.labels:
        tensor.labels = <Str *>calloc(len(spec.labels), sizeof(Str))
        if tensor.labels == NULL:
            raise MemoryError
        tensor.label_count = <uint32_t>len(spec.labels)
        for i, label in enumerate(spec.labels):
            str_copy(&tensor.labels[i], label)
    return 0


cdef int tensors_build(TensorSignature **out, uint32_t *count, object specs, bint batches) except -1:
    cdef uint32_t i
    out[0] = <TensorSignature *>calloc(max(1, len(specs)), sizeof(TensorSignature))
    if out[0] == NULL:
        raise MemoryError
    count[0] = <uint32_t>len(specs)
    for i in range(count[0]):
        tensor_build(&out[0][i], specs[i], batches)
    return 0


cdef int signature_build(Signature *signature, object spec, int64_t version) except -1:
    cdef uint32_t i
    try:
        str_copy(&signature.name, spec.name)
        str_copy(&signature.version_text, str(version))
        signature.version = version
        signature.max_batch_size = spec.max_batch_size
        tensors_build(&signature.inputs, &signature.input_count, spec.inputs, spec.max_batch_size > 0)
        tensors_build(&signature.outputs, &signature.output_count, spec.outputs, spec.max_batch_size > 0)
        signature.uniform = True
        for i in range(signature.input_count):
            signature.required_inputs += not signature.inputs[i].optional
            if signature.inputs[i].optional or signature.inputs[i].variable:
                signature.uniform = False
    except BaseException:
        signature_clear(signature)
        raise
    return 0


cdef void tensors_clear(TensorSignature *tensors, uint32_t count) noexcept nogil:
    cdef uint32_t i, j
    if tensors == NULL:
        return
    for i in range(count):
        free(<void *>tensors[i].name.data)
        for j in range(tensors[i].label_count):
            free(<void *>tensors[i].labels[j].data)
        free(tensors[i].labels)
    free(tensors)


cdef void signature_clear(Signature *signature) noexcept nogil:
    tensors_clear(signature.inputs, signature.input_count)
    tensors_clear(signature.outputs, signature.output_count)
    free(<void *>signature.name.data)
    free(<void *>signature.version_text.data)
    signature.inputs = signature.outputs = NULL
    signature.input_count = signature.output_count = 0
    signature.name.data = signature.version_text.data = NULL
