# The lane of a model whose requests belong to sequences.

from libc.stdint cimport int64_t, uint32_t

from _native.request.bridge cimport PostedCallback
from _native.scheduling.dispatcher cimport Dispatcher, Line
from _native.scheduling.lane cimport Lane, LaneHandle
from _native.sequences.slots cimport Slots
from _native.timers cimport Timer

cdef struct Notice:
    # something for the loop about the lane, which counts it as in flight
    PostedCallback callback
    Sequencer *lane

cdef struct Sequencer:
    Lane lane
    Dispatcher *dispatcher   # its own, or the limiter's; its guard guards all below but the timer, and Request.state of
    #                          those that wait
    Dispatcher own
    Slots slots
    Line **lines             # of each instance: slots.slot_set_count of them
    # on the loop
    Timer timer              # for sequences that idle
    bint armed               # it is set, and counts as in flight
    Notice leaving           # takes the timer out when the lane has been closed
    Notice drained           # wakes the loop when the last sequence has ended of a lane that drains
    bint told                # that has been posted


cdef class SequenceLane(LaneHandle):
    cdef inline Sequencer *sequencer(self) noexcept:
        return <Sequencer *>self.lane
