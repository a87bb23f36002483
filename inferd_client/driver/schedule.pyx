"""The calls of a run, and their times: functions of the run's seed and a call's index.

A closed loop starts a call when another has ended. In an open loop calls are due at fixed intervals, or at random,
whether or not earlier ones have ended, and their latency counts from when they were due, so that a stalled server
cannot hide its stall.
"""

from libc.math cimport log1p
from libc.stdint cimport int64_t, uint32_t, uint64_t

from inferd_client._native.clock cimport now_ns
from inferd_client.driver.call cimport Call
from inferd_client.driver.splitmix cimport mix, mixed

cdef extern from *:
    int clz "__builtin_clz"(unsigned int) noexcept nogil


cdef bint schedule_goes_on(const Schedule *schedule, uint64_t issued) noexcept nogil:
    if schedule.limit != 0 and issued >= schedule.limit:
        return False
    return schedule.end_ns == 0 or <uint64_t> now_ns() < schedule.end_ns


cdef uint64_t schedule_gap(const Schedule *schedule, uint64_t index) noexcept nogil:
    cdef double share
    if schedule.gaps != NULL:
        return schedule.gaps[(index - 1) % schedule.gap_count]
    if not schedule.scattered:
        return schedule.interval_ns
    share = <double>(mix(schedule.seed ^ (index * <uint64_t> 0xD1B54A32D192ED03)) >> 11) / <double>(<uint64_t> 1 << 53)
    return <uint64_t>(-log1p(-share) * <double> schedule.interval_ns)


cdef uint32_t draw_deadline(const Schedule *schedule, uint64_t drawn) noexcept nogil:
    """Log-uniform, to the octave, between low and high."""
    cdef uint32_t octaves = clz(schedule.deadline_low_us) - clz(schedule.deadline_high_us) + 1
    cdef uint32_t timeout_us = schedule.deadline_low_us << ((drawn >> 32) % octaves)
    timeout_us += <uint32_t> ((drawn >> 40) % timeout_us)
    return min(timeout_us, schedule.deadline_high_us)


cdef int64_t schedule_draw(const Schedule *schedule, Call *call) noexcept nogil:
    cdef uint64_t drawn
    call.nonce = mixed(schedule.seed, call.index)
    drawn = mix(call.nonce + 1)
    call.timeout_us = draw_deadline(schedule, drawn) if (drawn & 0xFFFF) < schedule.deadline_share else 0
    if ((drawn >> 16) & 0xFFFF) >= schedule.cancel_share:
        return -1
    # half of them as soon as they are written
    return <int64_t> ((drawn >> 48) % schedule.cancel_span) if drawn >> 63 else 0
