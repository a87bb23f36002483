"""Tensors and parameters of the backend's responses, for the worker. A part of _host.pyx."""

cdef class Memory:
    """The memory of an output, which a backend has written."""

    cdef void *_base
    cdef Py_ssize_t _size

    def __dealloc__(self):
        free(self._base)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self._base, self._size, 0, flags)


cdef object output_of(Tensor *tensor):
    # A tensor for the worker. It takes over the memory of the backend's tensor.
    name = text_of(tensor.name)
    shape = tuple([tensor.shape[axis] for axis in range(tensor.rank)])
    cdef size_t size = tensor.attributes.byte_size if tensor.base != NULL else 0
    elements = 1
    for dim in shape:
        elements *= dim
    if tensor.datatype == TRITONSERVER_TYPE_BYTES:
        check_strings(name, <const unsigned char *>tensor.base, size, elements)
    elif size != elements * TRITONSERVER_DataTypeByteSize(tensor.datatype):
        raise pb_utils.TritonModelException(
            f"the backend gave output '{name}' {size} bytes, its shape {list(shape)} has "
            f"{elements * TRITONSERVER_DataTypeByteSize(tensor.datatype)}"
        )
    if size == 0:
        return received(name, tensor.datatype, shape, b"", 0, 0)
    cdef Memory memory = Memory()
    memory._base = tensor.base
    memory._size = size
    tensor.base = NULL
    return received(name, tensor.datatype, shape, memory, 0, size)


cdef int check_strings(str name, const unsigned char *at, size_t size, elements) except -1:
    # Four bytes with its length precede each string, and the strings fill the tensor.
    cdef size_t found = 0
    cdef size_t left = size
    cdef uint32_t length
    while left >= 4:
        memcpy(&length, at + (size - left), 4)
        if length > left - 4:
            break
        left -= 4 + <size_t>length
        found += 1
    if left or found != elements:
        raise pb_utils.TritonModelException(
            f"the backend gave output '{name}' {size} bytes that are not the {elements} strings of its shape"
        )
    return 0


cdef dict parameters_of(TRITONSERVER_Parameter *parameter):
    found = {}
    while parameter != NULL:
        name = text_of(parameter.name)
        if parameter.type == TRITONSERVER_PARAMETER_INT:
            found[name] = parameter.integer
        elif parameter.type == TRITONSERVER_PARAMETER_BOOL:
            found[name] = bool(parameter.flag)
        elif parameter.type == TRITONSERVER_PARAMETER_DOUBLE:
            found[name] = parameter.number
        else:
            found[name] = text_of(<const char *>parameter.text)
        parameter = parameter.next
    return found or None
