"""Libraries compiled by AOTInductor, called through their C ABI: without the GIL, and on the CPU without Python.

The ABI is that of torch/csrc/inductor/aoti_runtime/interface.h: the functions that each library exports. A library
takes the handles of its inputs over, and gives handles of its outputs away.
"""

from cpython.pycapsule cimport PyCapsule_New, PyCapsule_SetContext
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint32_t, uintptr_t
from libc.stdlib cimport calloc, free
from posix.dlfcn cimport RTLD_LOCAL, RTLD_NOW, dlclose, dlerror, dlopen, dlsym

from inferd._native.execution.batch cimport execute_fn
from inferd._native.execution.dlpack cimport DLPACK_CPU, DLPACK_CUDA, DLManagedTensor, dlpack_capsule
from inferd._native.protobuf.datatype cimport DT_INVALID, Datatype, datatype_name, datatype_parse
from inferd._native.request.signature cimport MAX_RANK
from inferd.backends.pytorch._program cimport NOWHERE, Argument, Dim, Program, execute_program, reason, run_fn
from inferd.backends.pytorch._shim cimport Handle, datatype_of, find_torch, symbol, tensor_over, torch

from inferd.backends.pytorch._shim import AotiError


cdef struct Exported:
    DLManagedTensor managed
    void *owner              # Result, one reference


cdef void exported_delete(DLManagedTensor *managed) noexcept with gil:
    # the thread that frees the tensor may not have the GIL
    cdef Exported *exported = <Exported *>managed.manager_ctx
    Py_DECREF(<object>exported.owner)
    free(exported)


cdef class Result:
    """An output of a call, for DLPack; it keeps the tensor."""

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
        """Its v2 datatype; "INVALID" if the protocol does not have it."""
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
                                 datatype_of(self.tensor), self.sizes, self.strides, <int32_t>self.rank)
        Py_INCREF(self)
        return capsule


cdef Result result_of(Handle tensor, int32_t device):
    cdef Result result = Result.__new__(Result)
    result.tensor = tensor
    result.device = device
    torch.rank(tensor, &result.rank)
    torch.sizes(tensor, &result.sizes)
    torch.strides(tensor, &result.strides)
    return result


cdef class Executor:
    """A `Program` and its memory; `capsule` is for NativeInstance.executor. One thread uses it."""

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
        cdef execute_fn function = execute_program
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
        # the shapes that each argument may have
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
        path: the path of the shared object.
        torch_library: the path of PyTorch's own libtorch_cpu.so, which is loaded already.
        device: "cpu", or "cuda:0".
        folder: where the library finds the files that it was packed with; must stay as long as the object does.
        copies: how many calls may run at a time; they share the weights.

    Raises:
        AotiError: the library cannot be loaded, or not with this version of PyTorch.
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
        self.run_single = <run_fn>dlsym(self.library, b"AOTInductorModelContainerRunSingleThreaded")
        if self.run_single == NULL:  # a library of an older version
            self.run_single = self.run_many
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
            raise AotiError(f"it cannot be set up on {device.decode()}: {self.why()}")
        self.input_count = self.count("AOTInductorModelContainerGetNumInputs")
        self.output_count = self.count("AOTInductorModelContainerGetNumOutputs")
        return 0

    cdef size_t count(self, str name) except? 0xffffffff:
        cdef size_t found = 0
        (<int32_t (*)(void *, size_t *) noexcept nogil>symbol(self.library, name))(self.container, &found)
        return found

    cdef str why(self):
        cdef Program program
        program.last_error = self.last_error
        return reason(&program).decode(errors="replace").strip()

    def executor(self, arguments, results, expected) -> Executor:
        """An executor of batches on the CPU.

        Args:
            arguments: for each input of the library, its index among the configured inputs.
            results: for each output of the library, its index among the configured outputs; -1: not configured.
            expected: `ExpectedInput` of each input; None: inputs are not checked.
        """
        cdef Executor made = Executor.__new__(Executor)
        made.library = self
        made.prepare(list(arguments), list(results))
        if expected is not None:
            made.expect(expected)
        return made

    def run(self, inputs, stream: int = 0, single: bool = False) -> list:
        """Call the library with tensors on its device, without checking them.

        Args:
            inputs: contiguous tensors, each with `pointer`, `datatype` and `shape`.
            stream: the CUDA stream to which the work is submitted; the inputs must live until the work is done.
            single: no other thread calls the library at the time, and the call neither queries the device nor waits for
                it, because the work is recorded as a graph.

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
                raise AotiError(self.why())
            return [result_of(given[i], self.device) for i in range(self.output_count)]
        finally:
            free(taken)
            free(given)

    cdef int take(self, object inputs, Handle *out) except -1:
        cdef int64_t shape[MAX_RANK]
        cdef uintptr_t address
        cdef Datatype datatype
        cdef bytes name
        cdef size_t taken
        if <size_t>len(inputs) != self.input_count:
            raise AotiError(f"it takes {self.input_count} inputs, got {len(inputs)}")
        for i, each in enumerate(inputs):
            name, address, dims = each.datatype.encode(), each.pointer, each.shape
            datatype = datatype_parse(name, len(name))
            if len(dims) > MAX_RANK or datatype == DT_INVALID:
                wrong = True
            else:
                for k, dim in enumerate(dims):
                    shape[k] = dim
                wrong = tensor_over(<void *>address, datatype, shape, <uint32_t>len(dims),
                                    torch.cpu if self.device < 0 else torch.cuda, max(self.device, 0), &out[i]) != 0
            if wrong:
                for taken in range(<size_t>i):
                    torch.delete(out[taken])
                raise AotiError(f"PyTorch takes no input {i} of {name.decode()} with {len(dims)} dimensions")
        return 0
