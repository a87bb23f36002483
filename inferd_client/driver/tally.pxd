# The counters of a run. `inferd_client.driver.report.Report` has the same for Python.

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t

from inferd_client.driver.call cimport MESSAGE_LIMIT, Call
from inferd_client.driver.histogram cimport Histogram
from inferd_client.driver.workload cimport VERDICT_COUNT, Verdict

cdef enum:
    STATUSES = 18            # grpc-status 0..16, then all others
    NO_STATUS = 17
    SAMPLES = 8

cdef struct Sample:
    # a call that went wrong
    uint64_t index
    Verdict verdict
    int32_t grpc_status
    uint32_t timeout_us
    uint64_t elapsed_ns
    char message[MESSAGE_LIMIT]

cdef struct Entry:
    # an answered call of a run whose calls are listed
    uint64_t index
    uint64_t due_ns
    uint64_t ended_ns
    uint64_t sequence        # 0: none
    uint8_t *response        # its bytes, framed
    size_t response_size

cdef struct Journal:
    # the answered calls of a run, in the order of their ends
    bint kept
    Entry *entries
    size_t count
    size_t capacity

cdef struct Tally:
    uint64_t issued
    uint64_t finished        # each in one of the following four ways
    uint64_t answered
    uint64_t cancelled
    uint64_t reset
    uint64_t lost
    uint64_t deadlines       # calls with a deadline
    uint64_t verdicts[VERDICT_COUNT]
    uint64_t statuses[STATUSES]
    uint64_t bytes_sent
    Histogram latencies      # of the answered ones
    Sample samples[SAMPLES]
    uint32_t sample_count

cdef void tally_response(Tally *tally, const Call *call, Verdict verdict) noexcept nogil
cdef void tally_reset(Tally *tally, const Call *call) noexcept nogil
# Record an answered call, whose response it takes. False if there is no memory.
cdef bint journal_add(Journal *journal, Call *call) noexcept nogil
# The entries for Python, without which the journal is empty again.
cdef list journal_take(Journal *journal)
# A `inferd_client.driver.report.Report` of a run of this many seconds.
cdef object tally_report(Tally *tally, list calls, uint64_t bytes_received, double seconds, double cpu_seconds)
