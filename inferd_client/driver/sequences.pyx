"""Requests of sequences: each slot works off one after the other, one request at a time."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from inferd_client.driver.call cimport Call
from inferd_client.driver.splitmix cimport mixed
from inferd_client.driver.workload cimport Workload, call_reserve

cdef enum:
    PREFIX = 5               # of a gRPC message
    ROOM = 96                # for that, and three parameters

cdef const uint8_t *ID = b"\x0a\x0bsequence_id\x12"
cdef const uint8_t *START = b"\x22\x14\x0a\x0esequence_start\x12\x02\x08\x01"
cdef const uint8_t *END = b"\x22\x12\x0a\x0csequence_end\x12\x02\x08\x01"

cdef struct Plan:
    size_t count             # of messages
    const uint8_t **messages
    size_t *sizes
    uint64_t first_id
    uint64_t ids             # how many there are; then the first is used again
    uint64_t begun           # sequences
    uint64_t seed
    uint32_t shortest
    uint32_t longest


cdef uint8_t *put_varint(uint8_t *out, uint64_t value) noexcept nogil:
    while value >= 0x80:
        out[0] = <uint8_t> (value | 0x80)
        out += 1
        value >>= 7
    out[0] = <uint8_t> value
    return out + 1


cdef uint8_t *put_id(uint8_t *out, uint64_t number) noexcept nogil:
    """parameters["sequence_id"].int64_param"""
    cdef uint8_t value[12]
    cdef uint8_t *end
    value[0] = 0x10
    end = put_varint(&value[1], number)
    out[0] = 0x22
    out[1] = <uint8_t> (15 + (end - value))
    memcpy(out + 2, ID, 14)
    out[16] = <uint8_t> (end - value)
    memcpy(out + 17, value, end - value)
    return out + 17 + (end - value)


cdef bint sequence_prepare(void *context, Call *call) noexcept nogil:
    cdef Plan *plan = <Plan *> context
    cdef uint8_t *out
    cdef size_t i, size
    if call.step == call.steps or call.exchange.grpc_status > 0:
        # the previous sequence has ended or failed
        call.step = 0
        call.sequence = plan.first_id + plan.begun % plan.ids
        call.steps = plan.shortest + <uint32_t> (
            mixed(plan.seed, plan.begun) % (plan.longest - plan.shortest + 1))
        plan.begun += 1
    if not call_reserve(call, ROOM):
        return False
    i = call.step % plan.count
    out = put_id(call.scratch + PREFIX, call.sequence)
    if call.step == 0:
        memcpy(out, START, 22)
        out += 22
    call.step += 1
    if call.step == call.steps:
        memcpy(out, END, 20)
        out += 20
    size = out - call.scratch - PREFIX + plan.sizes[i]
    call.scratch[0] = 0
    call.scratch[1], call.scratch[2] = <uint8_t> (size >> 24), <uint8_t> (size >> 16)
    call.scratch[3], call.scratch[4] = <uint8_t> (size >> 8), <uint8_t> size
    call.head = call.scratch
    call.head_size = out - call.scratch
    call.body = plan.messages[i]
    call.body_size = plan.sizes[i]
    call.body_stays = False  # the head does not
    return True


cdef bint sequence_unfinished(void *context, const Call *call) noexcept nogil:
    return call.step != call.steps and call.exchange.grpc_status <= 0


cdef class Sequences(Workload):
    """Sends sequences: each slot (`in_flight`) has one at a time. A run ends when all sequences that it began are over.

    Args:
        messages: serialized requests without parameters about sequences; the steps of a sequence send them in turn.
        length: requests of a sequence.
        variation: the share of `length` by which the length of a sequence may differ.
        first_id, last_id: of sequences; after the last comes the first again.
        seed: of lengths.
    """
    cdef list kept
    cdef Plan plan
    cdef bytearray pointers
    cdef bytearray sizes

    def __cinit__(self, messages, *, uint32_t length=20, double variation=0.0, uint64_t first_id=1,
                  uint64_t last_id=(1 << 32) - 1, uint64_t seed=1):
        cdef size_t i
        cdef bytes message
        self.kept = list(messages)
        if not self.kept or length == 0 or not 0 <= variation < 1 or not 0 < first_id <= last_id:
            raise ValueError("expected messages, length >= 1, 0 <= variation < 1 and 0 < first_id <= last_id")
        self.pointers = bytearray(len(self.kept) * sizeof(void *))
        self.sizes = bytearray(len(self.kept) * sizeof(size_t))
        self.plan.messages = <const uint8_t **> <char *> self.pointers
        self.plan.sizes = <size_t *> <char *> self.sizes
        self.plan.count = len(self.kept)
        for i, message in enumerate(self.kept):
            self.plan.messages[i] = <const uint8_t *> <const char *> message
            self.plan.sizes[i] = len(message)
        self.plan.first_id, self.plan.ids = first_id, last_id - first_id + 1
        self.plan.seed = seed
        self.plan.shortest = <uint32_t> max(1.0, length * (1 - variation))
        self.plan.longest = max(self.plan.shortest, <uint32_t> (length * (1 + variation)))
        self.context = &self.plan
        self.prepare = sequence_prepare
        self.unfinished = sequence_unfinished
