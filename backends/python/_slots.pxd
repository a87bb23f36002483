# The slots of the requests that a worker has, and what it may say about each: one state machine.
#
#   FREE -> GIVEN      the request is sent with an EXECUTE, and belongs to the instance's batch
#   GIVEN -> ANSWERED  DONE answers it, gives it back to be rescheduled, or fails the batch
#   GIVEN -> OPEN      DONE leaves it to its sender, and from then on it belongs to the channel
#   GIVEN, OPEN        RESPONSEs of its sender come, at most as many as it has credit for; the last one is FINAL
#   -> FREE            it has its final response
#
# While a RESPONSE is read into the request without the guard, the slot is busy, and DONE waits.
#
# Functions are called under the guard of the channel. A `rule` that is returned is the one that the worker has broken;
# NULL: it may do what it does.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from _native.request.request cimport Request

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
    bint busy                # a RESPONSE is being read without the guard
    bint final_said          # its sender has said FINAL
    bint answered            # a RESPONSE with content has come
    bint asked               # its sender has used up its credit and waits
    int64_t taken_ns
    uint32_t credit          # responses that its sender may still send
    uint32_t returned        # credit that has come back and was not sent yet

cdef struct Slots:
    Slot *slots
    uint32_t count           # made so far
    uint32_t free_slot       # 1-based; 0: none
    uint32_t open            # in use
    uint64_t generation

cdef enum Reading:
    # what is to be done with a RESPONSE
    READ_NOTHING             # nobody wants it
    READ_FURTHER             # a further response of a stream: read it into one of its own
    READ_OWN                 # read it into the response of the request itself
    READ_SURPLUS             # one too many, of a request that takes one
    READ_END                 # nothing but that the one that has come was the final one

# A slot for a request, whose number is returned; 0: there is none.
cdef uint64_t slot_take(Slots *slots, Request *request, int64_t taken_ns) noexcept nogil
# The slot with this number, NULL when its request is over.
cdef Slot *slot_find(const Slots *slots, uint64_t number) noexcept nogil
cdef void slot_give(Slots *slots, Slot *slot) noexcept nogil

# A RESPONSE with these flags of a head has come for the request of this number. Unless nothing is to be read or the
# rule is broken, the slot is busy until slot_read.
cdef const char *slot_response(Slots *slots, uint64_t number, uint32_t flags, Reading *reading) noexcept nogil
# It has been read. True: it was the final one, and the request is the caller's to finish.
cdef bint slot_read(Slot *slot, uint32_t flags) noexcept nogil
# DONE says this RESPONSE_* about the request. Not while the slot is busy. RESPONSE_OPEN changes nothing: see slot_open.
cdef const char *slot_done(Slot *slot, uint8_t status) noexcept nogil
# DONE has left it to its sender. True: that has said FINAL already, and the request is the caller's to finish.
cdef bint slot_open(Slot *slot) noexcept nogil

# Its sender has used up its credit and asks for more.
cdef void slot_ask(Slot *slot) noexcept nogil
# So many responses have left, or nobody keeps the sender from sending them any more.
cdef void slot_return(Slot *slot, uint32_t credit) noexcept nogil
# What a waiting sender is to get now, 0 for nothing, which is then its own.
cdef uint32_t slot_credit(Slot *slot) noexcept nogil

cdef enum:
    WINDOW = 64              # responses that a sender may have on their way for a request; as CONFIGURE says
