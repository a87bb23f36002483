"""The ledger of bytes that peers make the server hold, see the header. These functions are off the path of requests."""

from libc.stdint cimport int64_t

from inferd._native.atomic cimport fetch_add64, load64

from inferd._native.memory.resource import add_counter

cdef int64_t charged = 0     # accounts of connections that hold something


cdef bint account_agrees(const Account *account) noexcept nogil:
    cdef size_t total = 0
    cdef int stage
    for stage in range(<int>STAGES):
        total += account.bytes[stage]
    return total == account.total


cdef void account_turned(bint holds) noexcept nogil:
    fetch_add64(&charged, 1 if holds else -1)


def _charged() -> int:
    return load64(&charged)


add_counter("charged_connections", _charged)
