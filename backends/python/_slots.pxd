# The slots of a worker's requests: a state machine of the packets that it may send about each.
#
#   FREE -> GIVEN      the request is sent with an EXECUTE, and belongs to the instance's batch
#   GIVEN -> ANSWERED  DONE answers it, gives it back to be rescheduled, or fails the batch
#   GIVEN -> OPEN      DONE leaves it to its sender, and from then on it belongs to the channel
#   GIVEN, OPEN        RESPONSEs of its sender come, at most as many as it has credit for; the last one is FINAL
#   -> FREE            it has its final response
#
# While a RESPONSE is read into the request without the lock, the slot is busy, and DONE waits.
#
# Functions are called with the channel's lock. A returned `rule` is the one that the worker has broken; NULL: none.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from inferd._native.request.request cimport Request

cdef enum SlotState:
    SLOT_FREE
    SLOT_GIVEN
    SLOT_OPEN
    SLOT_ANSWERED

cdef struct Slot:
    SlotState state
    Request *request
    uint64_t number
    uint32_t next_free
    bint busy                # a RESPONSE is being read without the lock
    bint final_said          # its sender has sent FINAL
    bint answered            # a RESPONSE with content has come
    bint asked               # its sender has used up its credit and waits
    int64_t taken_ns
    uint32_t credit          # responses that its sender may still send
    uint32_t returned        # credit that was returned and is not sent yet

cdef struct Slots:
    Slot *slots
    uint32_t count           # slots ever used
    uint32_t free_slot       # 1-based; 0: none
    uint32_t open            # in use
    uint64_t generation

cdef enum Reading:
    # what to do with a RESPONSE
    READ_NOTHING             # discard it
    READ_FURTHER             # a further response of a stream: read it into a response of its own
    READ_OWN                 # read it into the response of the request itself
    READ_SURPLUS             # one too many, for a request that takes one response
    READ_END                 # it only says that the previous one was final

# Take a slot for a request; returns the request's number, 0 if there is no free slot.
cdef uint64_t slot_take(Slots *slots, Request *request, int64_t taken_ns) noexcept nogil
# The slot with this number; NULL if its request has ended.
cdef Slot *slot_find(const Slots *slots, uint64_t number) noexcept nogil
cdef void slot_give(Slots *slots, Slot *slot) noexcept nogil

# A RESPONSE with these flags of a head has come for the request with this number. The slot is busy until slot_read,
# unless nothing is to be read or a rule is broken.
cdef const char *slot_response(Slots *slots, uint64_t number, uint32_t flags, Reading *reading) noexcept nogil
# The RESPONSE was read. True: it was the final one, and the caller finishes the request.
cdef bint slot_read(Slot *slot, uint32_t flags) noexcept nogil
# DONE has this RESPONSE_* for the request. Not while the slot is busy. RESPONSE_OPEN changes nothing: see slot_open.
cdef const char *slot_done(Slot *slot, uint8_t status) noexcept nogil
# DONE has left the request to its sender. True: the sender has sent FINAL already, and the caller finishes the request.
cdef bint slot_open(Slot *slot) noexcept nogil

# The sender has used up its credit and asks for more.
cdef void slot_ask(Slot *slot) noexcept nogil
# So many responses have been acknowledged or discarded.
cdef void slot_return(Slot *slot, uint32_t credit) noexcept nogil
# The credit to send to a waiting sender now, which the sender then has; 0: none.
cdef uint32_t slot_credit(Slot *slot) noexcept nogil

cdef enum:
    WINDOW = 64              # responses that a sender may have in flight for a request; in CONFIGURE
