"""A batch on the CPU, from gathered inputs to outputs that are handed over, without the GIL."""

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t
from libc.stdlib cimport free

from inferd._native.clock cimport now_ns
from inferd._native.execution.batch cimport NativeBatch, batch_fail, batch_fail_by
from inferd._native.execution.gather cimport batch_gather
from inferd._native.execution.scatter cimport batch_set_output, batch_wants
from inferd._native.execution.supply cimport GatheredInput
from inferd._native.memory.resource cimport Block, block_share, block_wrap
from inferd._native.protobuf.datatype cimport Datatype, datatype_name, datatype_size
from inferd._native.request.request cimport request_fail
from inferd._native.request.signature cimport MAX_RANK
from inferd._native.status cimport STATUS_INVALID_ARGUMENT
from inferd._native.text cimport format_text, text_or_no_memory
from inferd.backends.pytorch._shim cimport (
    Handle,
    contiguous_copy,
    datatype_of,
    delete_tensor,
    is_contiguous,
    tensor_over,
    torch,
)

import logging

logger = logging.getLogger("inferd.backends")


cdef const char *reason(const Program *program) noexcept nogil:
    cdef const char *text = NULL
    if program.last_error != NULL and program.last_error(&text) == 0 and text != NULL and text[0]:
        return text
    return "no reason is given; the standard error output of the server may have one"


cdef void refuse_dimension(NativeBatch *batch, uint32_t input, uint32_t dim, int64_t lowest,
                           int64_t highest) noexcept nogil:
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
    # first from the dimensions that are plain symbols, then from those that are computed
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
                refuse_dimension(batch, argument.input, k, size, size)
                return False
    return True


cdef bint check_inputs(NativeBatch *batch, Program *program) noexcept nogil:
    # the library does not check shapes: it would read beyond the end of a smaller input
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
                refuse_dimension(batch, argument.input, k, argument.dims[k].lowest, argument.dims[k].highest)
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
    # the owner of an output's memory: the tensor, unless the model returns one of its inputs
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


cdef void fail(NativeBatch *batch, const Program *program) noexcept:
    cdef str first = reason(program).decode("utf-8", "replace").partition("\n")[0]  # C++ frames follow
    text = batch_fail_by(batch, "PyTorch execute failure: " + first)
    logger.error("model '%s' failed a batch of %d requests: %s",
                 batch.signature.name.data[:batch.signature.name.size].decode("utf-8", "replace"), batch.count, text)


cdef void execute_program(NativeBatch *batch, void *context) noexcept nogil:
    cdef Program *program = <Program *>context
    cdef uint32_t output, i
    cdef bint good = True
    if not batch_gather(batch) or not check_inputs(batch, program) or not wrap_inputs(batch, program):
        return
    batch.input_end_ns = now_ns()
    if program.run(program.container, program.inputs, program.argument_count, program.outputs, program.result_count,
                   NULL, NULL) != 0:
        with gil:
            fail(batch, program)
        return
    batch.output_start_ns = now_ns()
    for i in range(program.result_count):
        output = program.results[i]
        if good and output != NOWHERE and batch_wants(batch, output):
            good = give_output(batch, program, output, program.outputs[i])
        else:
            torch.delete(program.outputs[i])
