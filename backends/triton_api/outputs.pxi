"""Tensors and parameters of the backend's responses, for the worker. A part of _host.pyx."""

cdef enum:
    MOST_WRITTEN = 16        # outputs of a response that `written` writes
    LONGEST_WRITTEN = 4096   # and its bytes
    NOT_WANTED = 0xFFFFFFFF


cdef class Memory:
    """The memory of an output, which a backend has written."""

    cdef void *_base
    cdef Py_ssize_t _size

    def __dealloc__(self):
        free(self._base)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self._base, self._size, 0, flags)


cdef class OutputGrant:
    """Memory of the arena for the outputs of one batch, where the server reads them; its requests share it.

    A response of a decoupled model leaves before its batch does, so its outputs cannot lie there.

    Args:
        outputs: the worker's OutputMemory; None: nothing is granted.
    """

    cdef Grant c
    cdef object outputs
    cdef object arena
    cdef uintptr_t base  # of the arena
    cdef object kept  # keeps the server from using the memory, if the backend may write to it after the execution

    def __cinit__(self, outputs):
        cdef Py_buffer view
        self.outputs = outputs
        if outputs is None:
            return
        self.arena, at, end = outputs.begin()
        if end - at <= SENT_IN_RECORD:
            return
        PyObject_GetBuffer(self.arena, &view, PyBUF_SIMPLE)
        self.base = <uintptr_t>view.buf
        PyBuffer_Release(&view)
        inferd_open_grant(&self.c, self.base + <uintptr_t>at, self.base + <uintptr_t>end)

    cdef int close(self) except -1:
        # The execution is over: the backend can take no more of the grant.
        if self.base:
            self.outputs.end(inferd_close_grant(&self.c) - self.base)
        return 0

    cdef int keep(self) except -1:
        # The responses of the execution are made. If the backend has other outputs in the grant, the server must wait.
        if inferd_uses_grant(&self.c):
            self.kept = self.outputs.keep()
        return 0


cdef object output_of(Tensor *tensor, OutputGrant grant):
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
    if tensor.granted:
        return received(name, tensor.datatype, shape, grant.arena, <uintptr_t>tensor.base - grant.base, size)
    if size == 0:
        return received(name, tensor.datatype, shape, b"", 0, 0)
    if tensor.shared:
        return received(name, tensor.datatype, shape, PyBytes_FromStringAndSize(<char *>tensor.base, size), 0, size)
    cdef Memory memory = Memory()
    memory._base = tensor.base
    memory._size = size
    tensor.base = NULL
    return received(name, tensor.datatype, shape, memory, 0, size)


cdef bytes written(Tensor *first, channel, wanted):
    # The response with these outputs as its record (`inferd_worker.protocol`, RESPONSE), without an object for each of
    # its parts. None: only the worker can write it, or say what is wrong.
    cdef uint32_t indices[MOST_WRITTEN]
    cdef ResponseRecord response
    cdef TensorRecord record
    cdef Tensor *tensor = first
    cdef size_t heads = sizeof(ResponseRecord)
    cdef size_t datas = 0
    cdef uint32_t count = 0
    cdef uint32_t each = 0
    cdef dict output_index = channel.output_index
    cdef bytes made
    cdef char *at
    cdef char *data
    while tensor != NULL:
        index = output_index.get(text_of(tensor.name))
        if index is None or count == MOST_WRITTEN or tensor.datatype == TRITONSERVER_TYPE_BYTES or not is_whole(tensor):
            return None
        indices[count] = NOT_WANTED if wanted is not None and index not in wanted else index
        if indices[count] != NOT_WANTED:
            heads += sizeof(TensorRecord) + tensor.rank * sizeof(int64_t)
            datas += aligned(tensor.attributes.byte_size, 8)
            each += 1
        count += 1
        tensor = tensor.next
    if heads + datas > LONGEST_WRITTEN:
        return None
    memset(&response, 0, sizeof(ResponseRecord))
    response.status = RESPONSE_OK
    response.tensors = <uint16_t>each
    response.size = <uint32_t>(heads + datas)
    made = PyBytes_FromStringAndSize(NULL, response.size)
    at = PyBytes_AS_STRING(made)
    data = at + heads
    memcpy(at, &response, sizeof(ResponseRecord))
    at += sizeof(ResponseRecord)
    memset(&record, 0, sizeof(TensorRecord))
    record.place = PLACE_INLINE
    tensor = first
    for each in range(count):
        if indices[each] != NOT_WANTED:
            record.index = <uint16_t>indices[each]
            record.datatype = <uint8_t>tensor.datatype
            record.rank = <uint8_t>tensor.rank
            record.offset = data - PyBytes_AS_STRING(made)
            record.size = tensor.attributes.byte_size
            memcpy(at, &record, sizeof(TensorRecord))
            memcpy(at + sizeof(TensorRecord), tensor.shape, tensor.rank * sizeof(int64_t))
            at += sizeof(TensorRecord) + tensor.rank * sizeof(int64_t)
            memcpy(data, tensor.base, record.size)
            memset(data + record.size, 0, aligned(record.size, 8) - record.size)
            data += aligned(record.size, 8)
        tensor = tensor.next
    return made


cdef bint is_whole(const Tensor *tensor) noexcept:
    # whether the tensor is small, and has as many bytes as its shape needs
    cdef size_t size = TRITONSERVER_DataTypeByteSize(tensor.datatype)
    cdef uint32_t axis
    for axis in range(tensor.rank):
        if tensor.shape[axis] > LONGEST_WRITTEN:
            return False
        size *= tensor.shape[axis]
        if size > LONGEST_WRITTEN:
            return False
    return tensor.base != NULL and tensor.attributes.byte_size == size


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
