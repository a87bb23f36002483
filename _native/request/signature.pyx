"""The compiled signature of a model version: names, datatypes and shapes in plain C, for checking requests."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy

from inferd._native.protobuf.codec cimport Str
from inferd._native.protobuf.datatype cimport (
    DT_BOOL,
    DT_FP32,
    DT_INT32,
    DT_INVALID,
    Datatype,
    datatype_name,
    datatype_parse,
)

KINDS = {
    "START": SUPPLY_START,
    "END": SUPPLY_END,
    "READY": SUPPLY_READY,
    "CORRID": SUPPLY_CORRELATION,
    "END_REASON": SUPPLY_END_REASON,
    "STATE": SUPPLY_STATE,
    "BATCH_ELEMENT_COUNT": SUPPLY_ELEMENT_COUNT,
    "BATCH_ACCUMULATED_ELEMENT_COUNT": SUPPLY_ACCUMULATED_ELEMENT_COUNT,
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": SUPPLY_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO,
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": SUPPLY_MAX_ELEMENT_COUNT_AS_SHAPE,
    "BATCH_ITEM_SHAPE": SUPPLY_ITEM_SHAPE,
    "BATCH_ITEM_SHAPE_FLATTEN": SUPPLY_ITEM_SHAPE_FLATTEN,
}
"""The kinds of inferd.backends.api.SuppliedSpec."""


# ---------------------------------------------------------------------------------------------------------------------
# Tensors by name

cdef inline uint32_t hash_of(Str name) noexcept nogil:
    # FNV-1a: the names in the table come from the configuration, not from peers
    cdef uint32_t value = 2166136261
    cdef uint32_t i
    for i in range(name.size):
        value = (value ^ <unsigned char>name.data[i]) * 16777619
    return value


cdef int names_build(Names *names, const TensorSignature *tensors, uint32_t count) except -1:
    cdef uint32_t size = 2
    cdef uint32_t at, i
    while size < 2 * count:
        size *= 2
    names.slots = <uint32_t *>calloc(size, sizeof(uint32_t))
    if names.slots == NULL:
        raise MemoryError
    names.mask = size - 1
    for i in range(count):
        at = hash_of(tensors[i].name) & names.mask
        while names.slots[at]:
            at = (at + 1) & names.mask
        names.slots[at] = i + 1
    return 0


cdef inline int names_find(const Names *names, const TensorSignature *tensors, Str name) noexcept nogil:
    cdef uint32_t at = hash_of(name) & names.mask
    cdef const Str *found
    while names.slots[at]:
        found = &tensors[names.slots[at] - 1].name
        if found.size == name.size and memcmp(found.data, name.data, name.size) == 0:
            return <int>names.slots[at] - 1
        at = (at + 1) & names.mask
    return -1


cdef int input_find(const Signature *signature, Str name) noexcept nogil:
    return names_find(&signature.input_names, signature.inputs, name)


cdef int output_find(const Signature *signature, Str name) noexcept nogil:
    return names_find(&signature.output_names, signature.outputs, name)


# ---------------------------------------------------------------------------------------------------------------------
# Building


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
    if spec.model_shape is not None:
        tensor.reshaped = True
        tensor.model_rank = <uint32_t>len(spec.model_shape)
        if tensor.model_rank + batches > MAX_RANK:
            raise ValueError(f"tensor '{spec.name}' is reshaped to {tensor.model_rank} dimensions, "
                             f"at most {MAX_RANK - batches} are served")
        for i, dim in enumerate(spec.model_shape):
            tensor.model_dims[i] = dim
    tensor.ragged = spec.ragged
    tensor.values = spec.shape_tensor
    if spec.pad_value is not None:
        tensor.padded = True
        tensor.pad_axis = only_variable(tensor, spec)
        encode_padding(tensor, spec.pad_value)
    if spec.labels:
        tensor.labels = <Str *>calloc(len(spec.labels), sizeof(Str))
        if tensor.labels == NULL:
            raise MemoryError
        tensor.label_count = <uint32_t>len(spec.labels)
        for i, label in enumerate(spec.labels):
            str_copy(&tensor.labels[i], label)
    return 0


cdef TensorSignature *tensors_build(object specs, bint batches) except NULL:
    cdef TensorSignature *tensors = <TensorSignature *>calloc(max(1, len(specs)), sizeof(TensorSignature))
    cdef uint32_t i
    if tensors == NULL:
        raise MemoryError
    try:
        for i in range(<uint32_t>len(specs)):
            tensor_build(&tensors[i], specs[i], batches)
    except BaseException:
        tensors_clear(tensors, <uint32_t>len(specs))
        raise
    return tensors


cdef int encode_value(uint8_t *out, Datatype datatype, object value, object name) except -1:
    cdef int32_t integer
    cdef float real
    if datatype == DT_INT32:
        integer = value
        memcpy(out, &integer, sizeof(integer))
    elif datatype == DT_FP32:
        real = value
        memcpy(out, &real, sizeof(real))
    elif datatype == DT_BOOL:
        out[0] = bool(value)
    else:
        raise ValueError(f"control '{name}' is {datatype_name(datatype).decode()}, expected INT32, FP32 or BOOL")
    return 0


cdef int supplied_build(Signature *signature, object specs) except -1:
    # build the inputs that the batch provides, which follow those of requests
    cdef Supplied *supplied
    cdef TensorSignature *tensor
    cdef bytes source
    cdef uint32_t i
    cdef int output
    signature.supplied = <Supplied *>calloc(max(1, len(specs)), sizeof(Supplied))
    if signature.supplied == NULL:
        raise MemoryError
    for i, spec in enumerate(specs):
        supplied = &signature.supplied[i]
        tensor = &signature.inputs[signature.input_count + i]
        supplied.kind = KINDS[spec.kind]
        if supplied.kind in (SUPPLY_START, SUPPLY_END, SUPPLY_READY):
            encode_value(supplied.values[0], tensor.datatype, spec.values[0], spec.tensor.name)
            encode_value(supplied.values[1], tensor.datatype, spec.values[1], spec.tensor.name)
        elif supplied.kind >= SUPPLY_ELEMENT_COUNT:
            supplied.source = input_named(signature, spec.source)
            if tensor.datatype not in (DT_INT32, DT_FP32):
                raise ValueError("batch input data type must be TYPE_INT32 or TYPE_FP32, "
                                 f"'{spec.tensor.name}' is {spec.tensor.datatype}")
        elif supplied.kind == SUPPLY_STATE:
            source = spec.source.encode()
            output = output_find(signature, text_str(source))
            if output < 0 or signature.outputs[output].state:
                raise ValueError(f"state '{spec.tensor.name}' needs an output of its own, got '{spec.source}'")
            supplied.source = signature.state_count
            signature.state_count += 1
            signature.outputs[output].state = signature.state_count
    return 0


cdef uint32_t input_named(const Signature *signature, str name) except? 0xffffffff:
    # the index of an input of requests
    cdef bytes encoded = name.encode()
    cdef int index = input_find(signature, text_str(encoded))
    if index < 0 or <uint32_t>index >= signature.input_count:
        raise ValueError(f"the model has no input '{name}'")
    return <uint32_t>index


cdef uint32_t only_variable(const TensorSignature *tensor, object spec) except? 0xffffffff:
    # the index of the one dimension that is -1
    cdef uint32_t axis = 0
    cdef uint32_t found = 0
    cdef uint32_t i
    for i in range(tensor.rank):
        if tensor.dims[i] == -1:
            axis = i
            found += 1
    if found != 1:
        raise ValueError(f"padding needs exactly one variable dimension, '{spec.name}' has {found}")
    return axis


cdef int encode_padding(TensorSignature *tensor, object value) except -1:
    # in the tensor's datatype
    import numpy

    cdef bytes encoded
    names = {"BOOL": "?", "FP16": "f2", "FP32": "f4", "FP64": "f8"}
    name = datatype_name(tensor.datatype).decode()
    kind = names.get(name) or name.lower()
    if name in ("BYTES", "BF16"):
        raise ValueError(f"inputs of {name} cannot be padded")
    encoded = numpy.array(value).astype(kind).tobytes()
    memcpy(tensor.pad_value, <const char *>encoded, len(encoded))
    return 0


cdef int outputs_build(Signature *signature, object specs) except -1:
    # set which inputs decide the shapes of outputs
    cdef TensorSignature *tensor
    cdef uint32_t i
    for i, spec in enumerate(specs):
        tensor = &signature.outputs[i]
        if spec.like_input:
            tensor.like_input = 1 + input_named(signature, spec.like_input)
        if spec.cut_like:
            tensor.cut_like = 1 + input_named(signature, spec.cut_like)
            tensor.pad_axis = only_variable(tensor, spec)
            if not signature.inputs[tensor.cut_like - 1].padded:
                raise ValueError(f"output '{spec.name}' is cut like input '{spec.cut_like}', which is not padded")
    return 0


cdef int buckets_build(Signature *signature, object lengths) except -1:
    cdef uint32_t i
    signature.buckets = <int64_t *>calloc(max(1, len(lengths)), sizeof(int64_t))
    if signature.buckets == NULL:
        raise MemoryError
    for i, length in enumerate(sorted(lengths)):
        signature.buckets[i] = length
    signature.bucket_count = <uint32_t>len(lengths)
    return 0


cdef Str text_str(bytes encoded):
    # valid as long as the object
    return Str(<const char *>encoded, <uint32_t>len(encoded))


cdef int signature_build(Signature *signature, object spec, int64_t version) except -1:
    cdef uint32_t i
    try:
        str_copy(&signature.name, spec.name)
        str_copy(&signature.version_text, str(version))
        signature.version = version
        signature.max_batch_size = spec.max_batch_size
        supplied = [each.tensor for each in spec.supplied]
        signature.inputs = tensors_build((*spec.inputs, *supplied), spec.max_batch_size > 0)
        signature.input_count = <uint32_t>len(spec.inputs)
        signature.supplied_count = <uint32_t>len(spec.supplied)
        signature.outputs = tensors_build((*spec.outputs, *spec.kept), spec.max_batch_size > 0)
        signature.output_count = <uint32_t>len(spec.outputs)
        signature.kept_count = <uint32_t>len(spec.kept)
        names_build(&signature.input_names, signature.inputs, signature.input_count + signature.supplied_count)
        names_build(&signature.output_names, signature.outputs, signature.output_count + signature.kept_count)
        supplied_build(signature, spec.supplied)
        outputs_build(signature, spec.outputs)
        buckets_build(signature, spec.pad_buckets)
        signature.decoupled = spec.decoupled
        signature.single_responses = spec.single_responses
        signature.splits = spec.splits
        signature.uniform = True
        for i in range(signature.input_count):
            signature.required_inputs += not signature.inputs[i].optional
            if (signature.inputs[i].optional or signature.inputs[i].values
                    or (signature.inputs[i].variable and not signature.inputs[i].ragged)):
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
    tensors_clear(signature.inputs, signature.input_count + signature.supplied_count)
    tensors_clear(signature.outputs, signature.output_count + signature.kept_count)
    free(signature.input_names.slots)
    free(signature.output_names.slots)
    free(signature.supplied)
    free(signature.buckets)
    free(<void *>signature.name.data)
    free(<void *>signature.version_text.data)
    signature.inputs = signature.outputs = NULL
    signature.supplied = NULL
    signature.buckets = NULL
    signature.input_names.slots = signature.output_names.slots = NULL
    signature.input_count = signature.output_count = signature.supplied_count = signature.kept_count = 0
    signature.name.data = signature.version_text.data = NULL
