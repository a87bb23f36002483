"""The slots of the requests that a worker has, and the packets that it may send about each."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport realloc
from libc.string cimport memset

from inferd._native.assertion cimport assert_that
from inferd._native.request.request cimport Request
from inferd.backends.python._wire cimport (
    EMPTY,
    FINAL,
    RESPONSE_OK,
    RESPONSE_OPEN,
    SLOT_MASK,
    SLOTS,
)

cdef enum:
    CREDIT_STEP = 16         # responses that are given back together


cdef bint more_slots(Slots *slots) noexcept nogil:
    cdef uint32_t count = min(<uint32_t>SLOTS, max(64, slots.count * 2))
    cdef Slot *grown
    cdef uint32_t i
    if slots.count == SLOTS:
        return False
    grown = <Slot *>realloc(slots.slots, count * sizeof(Slot))
    if grown == NULL:
        return False
    memset(grown + slots.count, 0, (count - slots.count) * sizeof(Slot))
    for i in range(slots.count, count):
        grown[i].next_free = i + 2 if i + 1 < count else 0
    slots.free_slot = slots.count + 1
    slots.slots = grown
    slots.count = count
    return True


cdef uint64_t slot_take(Slots *slots, Request *request, int64_t taken_ns) noexcept nogil:
    cdef uint32_t index
    cdef Slot *slot
    if slots.free_slot == 0 and not more_slots(slots):
        return 0
    index = slots.free_slot - 1
    slot = &slots.slots[index]
    assert_that(index < slots.count and slot.state == SLOT_FREE)
    slots.free_slot = slot.next_free
    slots.open += 1
    slots.generation += 1
    slot.state = SLOT_GIVEN
    slot.request = request
    slot.number = slots.generation << 16 | index
    slot.busy = False
    slot.final_said = False
    slot.answered = False
    slot.asked = False
    slot.taken_ns = taken_ns
    slot.credit = WINDOW
    slot.returned = 0
    return slot.number


cdef Slot *slot_find(const Slots *slots, uint64_t number) noexcept nogil:
    cdef uint32_t index = <uint32_t>(number & SLOT_MASK)
    if index >= slots.count or slots.slots[index].state == SLOT_FREE or slots.slots[index].number != number:
        return NULL
    return &slots.slots[index]


cdef void slot_give(Slots *slots, Slot *slot) noexcept nogil:
    assert_that(slot.state != SLOT_FREE and not slot.busy and slots.open > 0)
    slot.state = SLOT_FREE
    slot.request = NULL
    slot.next_free = slots.free_slot
    slots.free_slot = <uint32_t>(slot - slots.slots) + 1
    slots.open -= 1


# ---------------------------------------------------------------------------------------------------------------------
# Answers

cdef inline bint was_given(const Slots *slots, uint64_t number) noexcept nogil:
    # whether there was such a request: a thread of a model may answer one that has ended
    cdef uint32_t index = <uint32_t>(number & SLOT_MASK)
    return index < slots.count and 0 < number <= slots.slots[index].number


cdef inline bint takes_one(const Request *request) noexcept nogil:
    return request.single or not request.signature.decoupled


cdef const char *slot_response(Slots *slots, uint64_t number, uint32_t flags, Reading *reading) noexcept nogil:
    cdef Slot *slot = slot_find(slots, number)
    reading[0] = READ_NOTHING
    if flags & EMPTY and not flags & FINAL:
        return "sent an empty response that is not final"
    if slot == NULL:
        if was_given(slots, number):
            return NULL
        return "answered a request that it was never given"
    if slot.state == SLOT_ANSWERED:
        return NULL  # two threads of the model may answer at once
    if slot.final_said:
        if flags & FINAL:
            return "ended a request twice"
        return NULL  # two threads of the model may answer at once
    if not flags & EMPTY:
        if slot.credit == 0:
            return "sent more responses than it had credit for"
        slot.credit -= 1
    if takes_one(slot.request) and slot.answered:
        reading[0] = READ_END if flags & EMPTY else READ_SURPLUS
    else:
        reading[0] = READ_OWN if flags & FINAL or takes_one(slot.request) else READ_FURTHER
    slot.answered = slot.answered or not flags & EMPTY
    slot.busy = True
    return NULL


cdef bint slot_read(Slot *slot, uint32_t flags) noexcept nogil:
    slot.busy = False
    if not flags & FINAL:
        return False
    slot.final_said = True
    return slot.state == SLOT_OPEN


cdef const char *slot_done(Slot *slot, uint8_t status) noexcept nogil:
    if status == RESPONSE_OPEN:
        return NULL
    if slot.final_said:
        return "answered a request that its sender had ended"
    if status == RESPONSE_OK and slot.answered and takes_one(slot.request):
        return "answered a request that its sender had answered"
    if slot.state == SLOT_ANSWERED:
        return "answered a request twice"
    slot.state = SLOT_ANSWERED
    return NULL


cdef bint slot_open(Slot *slot) noexcept nogil:
    slot.state = SLOT_OPEN
    return slot.final_said


# ---------------------------------------------------------------------------------------------------------------------
# Credit

cdef void slot_ask(Slot *slot) noexcept nogil:
    slot.asked = True


cdef void slot_return(Slot *slot, uint32_t credit) noexcept nogil:
    slot.returned += credit


cdef uint32_t slot_credit(Slot *slot) noexcept nogil:
    cdef uint32_t credit = slot.returned
    if not slot.asked or credit < CREDIT_STEP:
        return 0
    slot.asked = False
    slot.returned = 0
    slot.credit += credit
    assert_that(slot.credit <= 2 * WINDOW)  # a request that is abandoned gets as much once more
    return credit
