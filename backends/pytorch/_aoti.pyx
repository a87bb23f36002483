"""Libraries compiled by AOTInductor, called through their C ABI: without the GIL, and on the CPU without Python.

The ABI is that of torch/csrc/inductor/aoti_runtime/interface.h (the functions that each library exports) and of
torch/csrc/inductor/aoti_torch/c/shim.h (those of PyTorch that handle tensors). A library takes the handles of its
inputs over, and gives handles of its outputs away.
"""

from cpython.pycapsule cimport PyCapsule_New, PyCapsule_SetContext
from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy
from posix.dlfcn cimport RTLD_LOCAL, RTLD_NOW, dlclose, dlerror, dlopen, dlsym

from _native.batch cimport NativeBatch, batch_fail, execute_fn
from _native.clock cimport now_ns
from _native.datatype cimport (
    DT_BF16,
    DT_BOOL,
    DT_FP16,
    DT_FP32,
    DT_FP64,
    DT_INT8,
    DT_INT16,
    DT_INT32,
    DT_INT64,
    DT_INVALID,
    DT_UINT8,
    DT_UINT16,
    DT_UINT32,
    DT_UINT64,
    Datatype,
    datatype_name,
    datatype_parse,
    datatype_size,
)
from _native.dlpack cimport DLPACK_CPU, DLPACK_CUDA, DLManagedTensor, dlpack_capsule
from _native.gather cimport batch_gather
from _native.memory cimport Block, block_share, block_take, block_wrap
from _native.request cimport STATUS_INVALID_ARGUMENT, request_fail
from _native.scatter cimport batch_set_output, batch_wants
from _native.signature cimport MAX_RANK
from _native.supply cimport GatheredInput
from _native.text cimport format_text, text_or_no_memory

cdef enum:
    NOWHERE = 0xffffffff     # a result that the configuration does not name
    TYPES = 16               # of the protocol, and then some

ctypedef void *Handle        # of a tensor
ctypedef int32_t (*number_fn)() noexcept nogil
ctypedef int32_t (*from_blob_fn)(void *data, int64_t rank, const int64_t *sizes, const int64_t *strides, int64_t offset,
                                 int32_t dtype, int32_t device_type, int32_t device, Handle *out, int32_t layout,
                                 const uint8_t *metadata, int64_t metadata_size) noexcept nogil
ctypedef int32_t (*run_fn)(void *container, Handle *inputs, size_t input_count, Handle *outputs, size_t output_count,
                           void *stream, void *proxy_executor) noexcept nogil

cdef struct Torch:
    # what PyTorch itself exports; each returns 0 for good
    from_blob_fn from_blob
    int32_t (*delete)(Handle tensor) noexcept nogil
    int32_t (*data)(Handle tensor, void **out) noexcept nogil
    int32_t (*rank)(Handle tensor, int64_t *out) noexcept nogil
    int32_t (*sizes)(Handle tensor, int64_t **out) noexcept nogil
    int32_t (*strides)(Handle tensor, int64_t **out) noexcept nogil
    int32_t (*dtype)(Handle tensor, int32_t *out) noexcept nogil
    int32_t types[TYPES]     # PyTorch's number of each datatype of the protocol
    int32_t cpu
    int32_t cuda
    int32_t strided

cdef struct Dim:
    int64_t lowest
    int64_t highest
    int32_t symbol           # dimensions with the same one vary together; -1: none
    int64_t factor           # the dimension is factor * symbol + offset
    int64_t offset

cdef struct Argument:
    uint32_t input           # of the signature
    bint checked
    uint32_t rank
    Dim dims[MAX_RANK]

cdef struct Program:
    # a library, and how it is called for one configuration
    void *container
    run_fn run
    int32_t (*last_error)(const char **text) noexcept nogil    # NULL: the library is older than it
    Argument *arguments
    uint32_t argument_count
    uint32_t *results        # of each output of the library: that of the signature, or NOWHERE
    uint32_t result_count
    int64_t *symbols         # room for their values in one batch
    uint32_t symbol_count
    Handle *inputs           # room for the handles of one batch
    Handle *outputs

cdef Torch torch
cdef bint torch_ready = False

cdef dict TORCH_NAMES = {
    DT_BOOL: "bool", DT_UINT8: "uint8", DT_UINT16: "uint16", DT_UINT32: "uint32", DT_UINT64: "uint64",
    DT_INT8: "int8", DT_INT16: "int16", DT_INT32: "int32", DT_INT64: "int64", DT_FP16: "float16", DT_FP32: "float32",
    DT_FP64: "float64", DT_BF16: "bfloat16",
}


class AotiError(RuntimeError):
    """A library cannot be loaded, or a call of it has failed."""


# ---------------------------------------------------------------------------------------------------------------------
# Finding functions

cdef void *symbol(void *library, str name) except NULL:
    cdef void *found = dlsym(library, name.encode())
    if found == NULL:
        raise AotiError(f"it has no function {name}: it was made by, or runs with, another version of PyTorch")
    return found


cdef int32_t number(void *library, str name) except? -1:
    return (<number_fn>symbol(library, name))()


cdef int find_torch(str path) except -1:
    # PyTorch is loaded already: this finds its library again
    global torch_ready
    cdef void *library
    if torch_ready:
        return 0
    library = dlopen(path.encode(), RTLD_NOW | RTLD_LOCAL)
    if library == NULL:
        raise AotiError((<bytes>dlerror()).decode(errors="replace"))
    torch.from_blob = <from_blob_fn>symbol(library, "aoti_torch_create_tensor_from_blob_v2")
    torch.delete = <int32_t (*)(Handle) noexcept nogil>symbol(library, "aoti_torch_delete_tensor_object")
    torch.data = <int32_t (*)(Handle, void **) noexcept nogil>symbol(library, "aoti_torch_get_data_ptr")
    torch.rank = <int32_t (*)(Handle, int64_t *) noexcept nogil>symbol(library, "aoti_torch_get_dim")
    torch.sizes = <int32_t (*)(Handle, int64_t **) noexcept nogil>symbol(library, "aoti_torch_get_sizes")
    torch.strides = <int32_t (*)(Handle, int64_t **) noexcept nogil>symbol(library, "aoti_torch_get_strides")
    torch.dtype = <int32_t (*)(Handle, int32_t *) noexcept nogil>symbol(library, "aoti_torch_get_dtype")
    for datatype, name in TORCH_NAMES.items():
        torch.types[<int>datatype] = number(library, f"aoti_torch_dtype_{name}")
    torch.cpu = number(library, "aoti_torch_device_type_cpu")
    torch.cuda = number(library, "aoti_torch_device_type_cuda")
    torch.strided = number(library, "aoti_torch_layout_strided")
    torch_ready = True
    return 0


# ---------------------------------------------------------------------------------------------------------------------
# Tensors

cdef Datatype datatype_of(Handle tensor) noexcept nogil:
    cdef int32_t dtype = 0
    cdef int i
    torch.dtype(tensor, &dtype)
    for i in range(DT_BOOL, DT_BF16 + 1):
        if torch.types[i] == dtype and datatype_size(i):
            return <Datatype>i
    return DT_INVALID


cdef int32_t tensor_over(const void *data, Datatype datatype, const int64_t *shape, uint32_t rank, int32_t device_type,
                         int32_t device, Handle *out) noexcept nogil:
    # a contiguous tensor in memory of somebody else
    cdef int64_t strides[MAX_RANK]
    cdef int64_t stride = 1
    cdef uint32_t i
    for i in range(rank):
        strides[rank - 1 - i] = stride
        stride *= max(shape[rank - 1 - i], <int64_t>1)
    return torch.from_blob(<void *>data, rank, shape, strides, 0, torch.types[<int>datatype], device_type, device, out,
                           torch.strided, NULL, 0)


cdef bint is_contiguous(const int64_t *sizes, const int64_t *strides, int64_t rank) noexcept nogil:
    cdef int64_t expected = 1
    cdef int64_t i
    for i in range(rank - 1, -1, -1):
        if sizes[i] > 1 and strides[i] != expected:
            return False
        expected *= sizes[i]
    return True


cdef Block *contiguous_copy(const uint8_t *data, const int64_t *sizes, const int64_t *strides, int64_t rank,
                            size_t element, size_t size) noexcept nogil:
    # rare: the compiler lays outputs out as the graph was exported
    cdef Block *block = block_take(max(size, <size_t>1))
    cdef int64_t index[MAX_RANK]
    cdef const uint8_t *source
    cdef size_t at
    cdef int64_t i
    if block == NULL:
        return NULL
    for i in range(rank):
        index[i] = 0
    for at in range(size // element):
        source = data
        for i in range(rank):
            source += index[i] * strides[i] * <int64_t>element
        memcpy(block.data + at * element, source, element)
        i = rank - 1
        while i >= 0:
            index[i] += 1
            if index[i] < sizes[i]:
                break
            index[i] = 0
            i -= 1
    return block


cdef void delete_tensor(void *tensor) noexcept nogil:
    torch.delete(tensor)


# ---------------------------------------------------------------------------------------------------------------------
# A batch on the CPU

cdef const char *reason(const Program *program) noexcept nogil:
    cdef const char *text = NULL
    if program.last_error != NULL and program.last_error(&text) == 0 and text != NULL and text[0]:
        return text
    return "no reason is given; the standard error output of the server may have one"


cdef void refuse(NativeBatch *batch, uint32_t input, uint32_t dim, int64_t lowest, int64_t highest) noexcept nogil:
    # all requests of a batch have the same shapes but for their rows, so all of them are wrong
    cdef const GatheredInput *given = &batch.inputs[input]
    cdef char *allowed
    cdef uint32_t i
    if lowest == highest:
        allowed = format_text("%lld", <long long>lowest)
    else:
        allowed = format_text("%lld to %lld", <long long>lowest, <long long>highest)
    for i in range(batch.count):
        request_fail(batch.requests[i], STATUS_INVALID_ARGUMENT, format_text(
            "unexpected shape for input '%s' for model '%s': dimension %u is %lld, the compiled model takes %s there",
            batch.signature.inputs[input].name.data, batch.signature.name.data, dim,
            <long long>given.shape[dim], text_or_no_memory(allowed)))
    free(allowed)


cdef bint bind_symbols(NativeBatch *batch, Program *program, bint plain) noexcept nogil:
    # first from the dimensions that are symbols themselves, then from those that are computed
    cdef const Argument *argument
    cdef const Dim *dim
    cdef int64_t size
    cdef uint32_t i, k
    for i in range(program.argument_count):
        argument = &program.arguments[i]
        for k in range(argument.rank if argument.checked else 0):
            dim = &argument.dims[k]
            if dim.symbol < 0 or plain != (dim.factor == 1 and dim.offset == 0):
                continue
            size = batch.inputs[argument.input].shape[k]
            if program.symbols[dim.symbol] < 0 and (size - dim.offset) % dim.factor == 0:
                program.symbols[dim.symbol] = (size - dim.offset) // dim.factor
            elif size != dim.factor * program.symbols[dim.symbol] + dim.offset:
                size = dim.factor * max(program.symbols[dim.symbol], <int64_t>1) + dim.offset
                refuse(batch, argument.input, k, size, size)
                return False
    return True


cdef bint check_inputs(NativeBatch *batch, Program *program) noexcept nogil:
    # the library itself would read beyond the end
    cdef const Argument *argument
    cdef int64_t size
    cdef uint32_t i, k
    for i in range(program.symbol_count):
        program.symbols[i] = -1
    for i in range(program.argument_count):
        argument = &program.arguments[i]
        for k in range(argument.rank if argument.checked else 0):
            size = batch.inputs[argument.input].shape[k]
            if not argument.dims[k].lowest <= size <= argument.dims[k].highest:
                refuse(batch, argument.input, k, argument.dims[k].lowest, argument.dims[k].highest)
                return False
    return bind_symbols(batch, program, True) and bind_symbols(batch, program, False)


cdef bint wrap_inputs(NativeBatch *batch, Program *program) noexcept nogil:
    cdef const GatheredInput *given
    cdef uint32_t input, i, k
    for i in range(program.argument_count):
        input = program.arguments[i].input
        given = &batch.inputs[input]
        if tensor_over(given.data, batch.signature.inputs[input].datatype, given.shape, given.rank, torch.cpu, 0,
                       &program.inputs[i]) != 0:
            for k in range(i):
                torch.delete(program.inputs[k])
            batch_fail(batch, format_text("PyTorch made no tensor of input '%s'",
                                          batch.signature.inputs[input].name.data))
            return False
    return True


cdef Block *block_of(NativeBatch *batch, Program *program, Handle tensor, const uint8_t *data,
                     size_t size) noexcept nogil:
    # what holds an output's memory: the tensor, unless the model answers with one of its inputs
    cdef const GatheredInput *given
    cdef Block *block
    cdef uint32_t i
    for i in range(program.argument_count):
        given = &batch.inputs[program.arguments[i].input]
        if size and given.data <= data < given.data + given.size:
            block = block_share(given.block)
            torch.delete(tensor)
            return block
    block = block_wrap(data, size, delete_tensor, tensor)
    if block == NULL:
        torch.delete(tensor)
    return block


cdef bint give_output(NativeBatch *batch, Program *program, uint32_t output, Handle tensor) noexcept nogil:
    # takes the tensor over
    cdef Datatype wanted = batch.signature.outputs[output].datatype
    cdef Datatype found = datatype_of(tensor)
    cdef int64_t *sizes = NULL
    cdef int64_t *strides = NULL
    cdef int64_t rank = 0
    cdef void *data = NULL
    cdef size_t size = datatype_size(found)
    cdef Block *block
    cdef int64_t shape[MAX_RANK]
    cdef int64_t i
    torch.rank(tensor, &rank)
    torch.sizes(tensor, &sizes)
    torch.strides(tensor, &strides)
    torch.data(tensor, &data)
    if found != wanted or rank > MAX_RANK:
        batch_fail(batch, format_text(
            "output '%s' is configured as %s, the model returned %s with %lld dimensions",
            batch.signature.outputs[output].name.data, datatype_name(wanted), datatype_name(found), <long long>rank))
        torch.delete(tensor)
        return False
    for i in range(rank):
        shape[i] = sizes[i]
        size *= <size_t>sizes[i]
    if is_contiguous(sizes, strides, rank):
        block = block_of(batch, program, tensor, <const uint8_t *>data, size)
    else:
        block = contiguous_copy(<const uint8_t *>data, sizes, strides, rank, datatype_size(found), size)
        data = block.data if block != NULL else NULL
        torch.delete(tensor)
    if block == NULL:
        batch_fail(batch, format_text("no memory for output '%s'", batch.signature.outputs[output].name.data))
        return False
    return batch_set_output(batch, output, block, <const uint8_t *>data, size, shape, <uint32_t>rank)


cdef void execute(NativeBatch *batch, void *context) noexcept nogil:
    cdef Program *program = <Program *>context
    cdef uint32_t output, i
    cdef bint good = True
    if not batch_gather(batch) or not check_inputs(batch, program) or not wrap_inputs(batch, program):
        return
    batch.input_end_ns = now_ns()
    if program.run(program.container, program.inputs, program.argument_count, program.outputs, program.result_count,
                   NULL, NULL) != 0:
        batch_fail(batch, format_text("PyTorch execute failure: %s", reason(program)))
        return
    batch.output_start_ns = now_ns()
    for i in range(program.result_count):
        output = program.results[i]
        if good and output != NOWHERE and batch_wants(batch, output):
            good = give_output(batch, program, output, program.outputs[i])
        else:
            torch.delete(program.outputs[i])


# ---------------------------------------------------------------------------------------------------------------------
# For Python

cdef class Result:
    """An output, which it holds; for DLPack."""

    cdef Handle tensor
    cdef int32_t device      # of CUDA; -1: the CPU
    cdef int64_t *sizes
    cdef int64_t *strides
    cdef int64_t rank

    def __dealloc__(self):
        if self.tensor != NULL:
            torch.delete(self.tensor)

    @property
    def datatype(self) -> str:
        """Its v2 datatype; "INVALID" for one that the protocol does not have."""
        return datatype_name(datatype_of(self.tensor)).decode()

    @property
    def shape(self) -> tuple:
        """Its dimensions."""
        return tuple([self.sizes[i] for i in range(self.rank)])

    def __dlpack_device__(self) -> tuple:
        return DLPACK_CPU if self.device < 0 else DLPACK_CUDA, max(self.device, 0)

    def __dlpack__(self, **_):
        """A DLPack capsule over the same memory, in order with the stream that it was made on."""
        cdef Exported *exported = <Exported *>calloc(1, sizeof(Exported))
        cdef void *data = NULL
        if exported == NULL:
            raise MemoryError
        exported.owner = <void *>self
        torch.data(self.tensor, &data)
        capsule = dlpack_capsule(&exported.managed, exported, exported_delete,
                                 DLPACK_CPU if self.device < 0 else DLPACK_CUDA, max(self.device, 0), data,
                                 datatype_of(self.tensor), self.sizes, <int32_t>self.rank)
        exported.managed.dl_tensor.strides = self.strides
        Py_INCREF(self)
        return capsule


cdef extern from "Python.h":
    void Py_INCREF(object o)
    void Py_DECREF(object o)

cdef struct Exported:
    DLManagedTensor managed
    void *owner              # Result, one reference


cdef void exported_delete(DLManagedTensor *managed) noexcept:
    cdef Exported *exported = <Exported *>managed.manager_ctx
    Py_DECREF(<object>exported.owner)
    free(exported)


cdef Result result_of(Handle tensor, int32_t device):
    cdef Result result = Result.__new__(Result)
    result.tensor = tensor
    result.device = device
    torch.rank(tensor, &result.rank)
    torch.sizes(tensor, &result.sizes)
    torch.strides(tensor, &result.strides)
    return result


cdef class Executor:
    """A `Program` and what it lies in; `capsule` is for NativeInstance.executor. One thread uses it."""

    cdef Program program
    cdef Library library
    cdef readonly object capsule

    def __dealloc__(self):
        free(self.program.arguments)
        free(self.program.results)
        free(self.program.symbols)
        free(self.program.inputs)
        free(self.program.outputs)

    cdef int prepare(self, list arguments, list results) except -1:
        cdef execute_fn function = execute
        cdef Program *program = &self.program
        program.container = self.library.container
        program.run = self.library.run_many
        program.last_error = self.library.last_error
        program.argument_count = <uint32_t>len(arguments)
        program.result_count = <uint32_t>len(results)
        program.arguments = <Argument *>calloc(len(arguments) + 1, sizeof(Argument))
        program.results = <uint32_t *>calloc(len(results) + 1, sizeof(uint32_t))
        program.inputs = <Handle *>calloc(len(arguments) + 1, sizeof(Handle))
        program.outputs = <Handle *>calloc(len(results) + 1, sizeof(Handle))
        if program.arguments == NULL or program.results == NULL or program.inputs == NULL or program.outputs == NULL:
            raise MemoryError
        for i, input in enumerate(arguments):
            program.arguments[i].input = input
        for i, output in enumerate(results):
            program.results[i] = NOWHERE if output < 0 else output
        self.capsule = PyCapsule_New(<void *>function, "inferd.execute_fn", NULL)
        PyCapsule_SetContext(self.capsule, program)
        return 0

    cdef int expect(self, object expected) except -1:
        # what each argument may look like
        cdef dict symbols = {}
        cdef Dim *dim
        for i, wanted in enumerate(expected):
            self.program.arguments[i].checked = True
            self.program.arguments[i].rank = <uint32_t>len(wanted.dims)
            for k, given in enumerate(wanted.dims):
                dim = &self.program.arguments[i].dims[k]
                dim.lowest, dim.highest = given.lowest, given.highest
                dim.symbol = symbols.setdefault(given.symbol, len(symbols)) if given.symbol else -1
                dim.factor, dim.offset = given.factor, given.offset
        self.program.symbol_count = <uint32_t>len(symbols)
        self.program.symbols = <int64_t *>calloc(len(symbols) + 1, sizeof(int64_t))
        if self.program.symbols == NULL:
            raise MemoryError
        return 0


cdef class Library:
    """The compiled model of a package, on one device. Several threads may call it.

    Args:
        path: of the shared object.
        torch_library: of PyTorch's own, libtorch_cpu.so, which is loaded.
        device: "cpu", or "cuda:0".
        folder: where the library finds the files that it was packed with; must stay as long as the object does.
        copies: calls that may run at a time; weights are shared among them.

    Raises:
        AotiError: it cannot be loaded, or not with this version of PyTorch.
    """

    cdef void *library
    cdef void *container
    cdef run_fn run_many
    cdef run_fn run_single
    cdef int32_t (*last_error)(const char **text) noexcept nogil
    cdef int32_t (*delete)(void *container) noexcept nogil
    cdef int32_t device      # of CUDA; -1: the CPU
    cdef readonly size_t input_count
    cdef readonly size_t output_count

    def __init__(self, path: str, torch_library: str, device: str, folder: str, copies: int) -> None:
        find_torch(torch_library)
        self.device = int(device.partition(":")[2]) if device.startswith("cuda") else -1
        self.library = dlopen(path.encode(), RTLD_NOW | RTLD_LOCAL)
        if self.library == NULL:
            raise AotiError((<bytes>dlerror()).decode(errors="replace"))
        self.find()
        self.create(device.encode(), folder.encode(), copies)

    def __dealloc__(self):
        if self.container != NULL:
            with nogil:
                self.delete(self.container)
        if self.library != NULL:
            dlclose(self.library)

    cdef int find(self) except -1:
        self.run_many = <run_fn>symbol(self.library, "AOTInductorModelContainerRun")
        self.run_single = <run_fn>symbol(self.library, "AOTInductorModelContainerRunSingleThreaded")
        self.delete = <int32_t (*)(void *) noexcept nogil>symbol(self.library, "AOTInductorModelContainerDelete")
        self.last_error = <int32_t (*)(const char **) noexcept nogil>dlsym(self.library, b"AOTInductorGetLastError")
        return 0

    cdef int create(self, bytes device, bytes folder, size_t copies) except -1:
        cdef int32_t (*make)(void **, size_t, const char *, const char *) noexcept nogil
        cdef const char *device_name = device
        cdef const char *folder_name = folder
        cdef int32_t result
        make = <int32_t (*)(void **, size_t, const char *, const char *) noexcept nogil>symbol(
            self.library, "AOTInductorModelContainerCreateWithDevice")
        with nogil:
            result = make(&self.container, copies, device_name, folder_name)
        if result != 0:
            self.container = NULL
            raise AotiError(f"it cannot be set up on {device.decode()}: {self.reason()}")
        self.input_count = self.count("AOTInductorModelContainerGetNumInputs")
        self.output_count = self.count("AOTInductorModelContainerGetNumOutputs")
        return 0

    cdef size_t count(self, str name) except? 0xffffffff:
        cdef size_t found = 0
        (<int32_t (*)(void *, size_t *) noexcept nogil>symbol(self.library, name))(self.container, &found)
        return found

    cdef str reason(self):
        cdef Program program
        program.last_error = self.last_error
        return reason(&program).decode(errors="replace").strip()

    def executor(self, arguments, results, expected) -> Executor:
        """What executes batches on the CPU.

        Args:
            arguments: for each input of the library, which input of the model it is.
            results: for each output of the library, which output of the model; -1 for one that it has not.
            expected: `ExpectedInput` of each input, or None for inputs that are given as they come.
        """
        cdef Executor made = Executor.__new__(Executor)
        made.library = self
        made.prepare(list(arguments), list(results))
        if expected is not None:
            made.expect(expected)
        return made

    def run(self, inputs, stream: int = 0, single: bool = False) -> list:
        """Call it with tensors on its device, and without checking them.

        Args:
            inputs: contiguous, each with `pointer`, `datatype` and `shape`.
            stream: a CUDA stream, to which the work is submitted; the inputs must live until it is done.
            single: nobody else calls it at the time, and it must neither ask nor wait for the device: what is
                recorded as a graph.

        Returns:
            A `Result` for each output.

        Raises:
            AotiError: the call failed.
        """
        cdef Handle *taken = <Handle *>calloc(len(inputs) + 1, sizeof(Handle))
        cdef Handle *given = <Handle *>calloc(self.output_count + 1, sizeof(Handle))
        cdef run_fn function = self.run_single if single else self.run_many
        cdef size_t count = len(inputs)
        cdef uintptr_t on = stream
        cdef int32_t result
        try:
            if taken == NULL or given == NULL:
                raise MemoryError
            self.take(inputs, taken)
            with nogil:
                result = function(self.container, taken, count, given, self.output_count, <void *>on, NULL)
            if result != 0:
                raise AotiError(self.reason())
            return [result_of(given[i], self.device) for i in range(self.output_count)]
        finally:
            free(taken)
            free(given)

    cdef int take(self, object inputs, Handle *out) except -1:
        cdef int64_t shape[MAX_RANK]
        cdef uintptr_t address
        cdef Datatype datatype
        cdef bytes name
        if <size_t>len(inputs) != self.input_count:
            raise AotiError(f"it takes {self.input_count} inputs, got {len(inputs)}")
        for i, each in enumerate(inputs):
            name, address, dims = each.datatype.encode(), each.pointer, each.shape
            datatype = datatype_parse(name, len(name))
            for k, dim in enumerate(dims):
                shape[k] = dim
            tensor_over(<void *>address, datatype, shape, <uint32_t>len(dims),
                        torch.cpu if self.device < 0 else torch.cuda, max(self.device, 0), &out[i])
        return 0
