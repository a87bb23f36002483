"""Outgoing messages and output: tensor bytes go from the block where a model left them to the socket by reference."""

from libc.stdint cimport uint8_t, uint32_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, memmove

from inferd._native.assertion cimport assert_that
from inferd._native.memory.resource cimport (
    Block,
    block_contains,
    block_give,
    block_share,
    block_take,
    block_view,
)
from inferd._native.transport.ledger cimport MESSAGE_MEMORY, charge_release, charge_resize

cdef enum:
    SCRATCH = 16384          # bytes collected before a new piece begins
    REFERENCE_FROM = 4096    # from this size on, bytes are referenced: a reference costs about as much as copying 4 KiB
    AT_ONCE = 256            # pieces that are written together
    KEPT_FOR_BYTE = 2        # bytes of memory that each waiting byte may keep alive
    KEPT_BESIDE = 1 << 20    # and bytes in addition for a connection's output, so that a short stall copies nothing

cdef extern from "sys/uio.h" nogil:
    struct iovec:
        void *iov_base
        size_t iov_len
    ssize_t writev(int fd, const iovec *parts, int count)


# ---------------------------------------------------------------------------------------------------------------------
# Messages

cdef Outgoing *outgoing_new(uint32_t segments, size_t room) noexcept nogil:
    cdef size_t head = sizeof(Outgoing) + segments * sizeof(Segment)
    cdef Block *home = block_take(head + room)
    cdef Outgoing *message
    if home == NULL:
        return NULL
    message = <Outgoing *>home.data
    message.home = home
    message.segments = <Segment *>(home.data + sizeof(Outgoing))
    message.count = 0
    message.current = 0
    message.offset = 0
    message.left = 0
    message.size = 0
    message.compress = False
    message.charge.account = NULL
    message.room = home.data + head
    return message


cdef void outgoing_add(Outgoing *message, Block *block, const uint8_t *data, size_t size) noexcept nogil:
    cdef Segment *segment = &message.segments[message.count]
    assert_that(<uint8_t *>(segment + 1) <= message.room and block_contains(block, data, size))
    segment.data = data
    segment.size = size
    segment.block = block_share(block)
    message.count += 1
    message.left += size
    message.size += size


cdef void outgoing_free(Outgoing *message) noexcept nogil:
    cdef Block *home = message.home
    cdef uint32_t i
    charge_release(&message.charge)
    for i in range(message.count):
        block_give(message.segments[i].block)
    block_give(home)


cdef inline bint keeps_much(const Segment *part) noexcept nogil:
    return part.block.size > KEPT_FOR_BYTE * max(part.size, <size_t>REFERENCE_FROM)


cdef bint segment_own(Segment *part) noexcept nogil:
    # False: no memory
    cdef Block *own = block_take(part.size)
    if own == NULL:
        return False
    memcpy(own.data, part.data, part.size)
    block_give(part.block)
    part.block = own
    part.data = own.data
    return True


cdef void outgoing_keep(Outgoing *message) noexcept nogil:
    cdef size_t kept = 0
    cdef Segment *segment
    cdef uint32_t i
    for i in range(message.current, message.count):
        segment = &message.segments[i]
        if segment.block == message.home:
            kept += segment.size
            continue
        if keeps_much(segment):
            segment_own(segment)  # without memory for a copy it keeps the block, and is charged for it
        # the rest of a block that is nearly full is slack of its size class: untouched, so not charged
        kept += segment.block.size if segment.block.size // 4 * 3 > segment.size else segment.size
    if message.charge.account != NULL:
        charge_resize(&message.charge, max(kept, message.left) + MESSAGE_MEMORY)


cdef void write_message_prefix(uint8_t *out, size_t size) noexcept nogil:
    out[0] = 0  # not compressed
    out[1] = <uint8_t>(size >> 24)
    out[2] = <uint8_t>(size >> 16)
    out[3] = <uint8_t>(size >> 8)
    out[4] = <uint8_t>size


# ---------------------------------------------------------------------------------------------------------------------
# Output

cdef bint add_piece(Output *output, Block *block, const uint8_t *data, size_t size) noexcept nogil:
    # takes over one reference to the block
    cdef uint32_t capacity
    cdef Segment *grown
    if output.count == output.capacity:
        capacity = max(8, output.capacity * 2)
        grown = <Segment *>realloc(output.pieces, capacity * sizeof(Segment))
        if grown == NULL:
            block_give(block)
            return False
        output.pieces = grown
        output.capacity = capacity
    output.pieces[output.count].block = block
    output.pieces[output.count].data = data
    output.pieces[output.count].size = size
    output.count += 1
    return True


cdef bint output_close(Output *output) noexcept nogil:
    # end the piece that is being collected in the scratch block; without memory for it, it goes on
    cdef size_t start = output.start
    if output.scratch == NULL or output.used == start:
        return True
    if not add_piece(output, block_share(output.scratch), output.scratch.data + start, output.used - start):
        return False
    output.start = output.used
    return True


cdef bint output_copy(Output *output, const uint8_t *data, size_t size) noexcept nogil:
    if output.scratch == NULL or output.scratch.size - output.used < size:
        if not output_close(output):
            return False
        block_give(output.scratch)
        output.scratch = block_take(max(size, <size_t>SCRATCH))
        output.used = 0
        output.start = 0
        if output.scratch == NULL:
            return False
    memcpy(output.scratch.data + output.used, data, size)
    output.used += size
    output.size += size
    return True


cdef bint output_message(Output *output, Outgoing *message, size_t size) noexcept nogil:
    cdef Segment *segment
    cdef size_t part
    assert_that(size <= message.left)
    message.left -= size
    while size:
        assert_that(message.current < message.count)
        segment = &message.segments[message.current]
        part = min(size, segment.size - message.offset)
        if part >= REFERENCE_FROM:
            if not (output_close(output)
                    and add_piece(output, block_share(segment.block), segment.data + message.offset, part)):
                return False
            output.size += part
        elif not output_copy(output, segment.data + message.offset, part):
            return False
        message.offset += part
        size -= part
        if message.offset == segment.size:
            message.current += 1
            message.offset = 0
    return True


cdef void output_drop(Output *output, size_t size) noexcept nogil:
    # the first `size` bytes have left
    cdef uint32_t gone = 0
    cdef Segment *piece
    assert_that(size <= output.size)
    output.size -= size
    output.taken += size
    while size:
        assert_that(gone < output.count)
        piece = &output.pieces[gone]
        if size < piece.size:
            piece.data += size
            piece.size -= size
            break
        size -= piece.size
        block_give(piece.block)
        gone += 1
    output.count -= gone
    memmove(output.pieces, output.pieces + gone, output.count * sizeof(Segment))


cdef bint output_write(Output *output, int fd) noexcept nogil:
    cdef iovec parts[AT_ONCE]
    cdef uint32_t count, i
    cdef size_t offered
    cdef ssize_t written
    if not output_close(output):
        return False
    while output.count:
        count = min(output.count, <uint32_t>AT_ONCE)
        offered = 0
        for i in range(count):
            parts[i].iov_base = <void *>output.pieces[i].data
            parts[i].iov_len = output.pieces[i].size
            offered += output.pieces[i].size
        written = writev(fd, parts, <int>count)
        if written > 0:
            output_drop(output, <size_t>written)
        if written < <ssize_t>offered:
            return False
    output_clear(output)
    return True


cdef inline bint is_small(const Segment *piece) noexcept nogil:
    return piece.block.size <= SCRATCH


cdef uint32_t measure_run(const Output *output, uint32_t at, size_t *size) noexcept nogil:
    # The number of pieces, from `at` on, that belong to one large block, with the small pieces between them. `size`
    # gets the bytes of that block.
    cdef const Block *block = output.pieces[at].block
    cdef uint32_t end = at
    size[0] = 0
    while end < output.count and (output.pieces[end].block == block or is_small(&output.pieces[end])):
        if output.pieces[end].block == block:
            size[0] += output.pieces[end].size
        end += 1
    return end - at


cdef size_t output_keep(Output *output) noexcept nogil:
    cdef size_t kept = SCRATCH
    cdef size_t size
    cdef uint32_t at = 0
    cdef uint32_t count, i
    output_close(output)
    while at < output.count:
        if is_small(&output.pieces[at]):
            kept += output.pieces[at].size
            at += 1
            continue
        count = measure_run(output, at, &size)
        if output.pieces[at].block.size > KEPT_FOR_BYTE * size + KEPT_BESIDE:
            kept += size
            for i in range(at, at + count):
                if not is_small(&output.pieces[i]) and not segment_own(&output.pieces[i]):
                    kept += output.pieces[i].block.size  # no memory for the copy
        else:
            kept += output.pieces[at].block.size
        for i in range(at, at + count):
            if is_small(&output.pieces[i]):
                kept += output.pieces[i].size
        at += count
    return kept


cdef list output_take(Output *output):
    cdef list out = []
    cdef uint32_t i
    if not output_close(output):
        raise MemoryError("no memory for output")
    for i in range(output.count):
        if output.pieces[i].size < REFERENCE_FROM:
            out.append((<const char *>output.pieces[i].data)[:output.pieces[i].size])
        else:
            out.append(block_view(output.pieces[i].block, output.pieces[i].data, output.pieces[i].size))
    output.taken += output.size
    output_clear(output)
    return out


cdef void output_clear(Output *output) noexcept nogil:
    cdef uint32_t i
    for i in range(output.count):
        block_give(output.pieces[i].block)
    block_give(output.scratch)
    free(output.pieces)
    output.pieces = NULL
    output.count = 0
    output.capacity = 0
    output.scratch = NULL
    output.used = 0
    output.start = 0
    output.size = 0
