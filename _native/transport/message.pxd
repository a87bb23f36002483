# A request message that has arrived.

from libc.stdint cimport uint8_t
from libc.stdlib cimport free

from inferd._native.chain cimport Link
from inferd._native.memory.resource cimport Block, block_give
from inferd._native.transport.ledger cimport Charge, charge_release

cdef struct Incoming:
    # one complete request message that no handler has taken
    Link link
    Block *block
    const uint8_t *data
    size_t size
    Charge charge
    bint compressed
    bint embedded            # it is Stream.first; otherwise it is from malloc


cdef inline void incoming_free(Incoming *message) noexcept nogil:
    charge_release(&message.charge)
    block_give(message.block)
    message.block = NULL
    if not message.embedded:
        free(message)
