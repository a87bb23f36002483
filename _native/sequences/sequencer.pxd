# The lane of a model whose requests belong to sequences.

from libc.stdint cimport int64_t, uint32_t

from inferd._native.request.bridge cimport PostedCallback
from inferd._native.request.lane cimport Lane, LaneHandle
from inferd._native.scheduling.dispatcher cimport Dispatcher, Line
from inferd._native.sequences.slots cimport Slots
from inferd._native.timers cimport Timer

cdef struct Notice:
    # a posted callback about the lane; counts as in flight on it
    PostedCallback callback
    Sequencer *lane

cdef struct Sequencer:
    Lane lane
    # its own, or the limiter's; its lock protects all below but the timer, and the Request.state of waiting requests
    Dispatcher *dispatcher
    Dispatcher own
    Slots slots
    Line **lines             # for each instance: slots.slot_set_count lines
    # used in the front
    Timer timer              # for idle sequences
    bint armed               # the timer is set, and counts as in flight
    Notice leaving           # clears the timer after the lane was closed
    Notice drained           # wakes the front when the last sequence of a draining lane has ended
    bint drained_posted


cdef class SequenceLane(LaneHandle):
    cdef inline Sequencer *sequencer(self) noexcept:
        return <Sequencer *>self.lane
    cdef uint32_t look(self, const uint32_t *count) noexcept
