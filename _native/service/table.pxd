# The table of model versions: every request looks its model up, loads and unloads change it.

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t

from inferd._native.memory.resource cimport Block
from inferd._native.protobuf.codec cimport Str
from inferd._native.request.lane cimport Lane
from inferd._native.request.request cimport Correlation
from inferd._native.threads cimport Mutex

cdef struct VersionEntry:
    int64_t version
    Lane *lane               # NULL: the version exists and is not ready

cdef struct LabelEntry:
    Str name                 # in bytes that ModelTable.handles keeps
    int64_t version

cdef struct ModelEntry:
    ModelEntry *next         # in the same bucket
    Str name
    VersionEntry *versions   # ascending
    uint32_t version_count   # of those that any request may use
    # While sequences continue on versions that were replaced or unloaded, the lookup depends on the request. The number
    # of versions is then here, and `version_count` is 0.
    uint32_t routed_count
    VersionEntry *departing  # those versions, the one that departed last first
    uint32_t departing_count
    LabelEntry *labels       # names of versions
    uint32_t label_count

cdef struct Table:
    Mutex guard
    ModelEntry **buckets
    uint32_t bucket_count    # a power of two
    uint32_t model_count

# The lane of this version, which is a number or a label; if `version` is empty or "-1", that of the latest version that
# is ready. The lane has one more request in flight. NULL: `status` and `details` (from malloc) say why; with STATUS_OK
# the lane depends on the sequence, so call table_route.
cdef Lane *table_find(Table *table, Str name, Str version, int *status, char **details) noexcept nogil
# The same for a request of this sequence, or of none; `begins`: the request starts the sequence. In the front.
cdef Lane *table_route(Table *table, Str name, Str version, const Correlation *correlation, bint begins, int *status,
                       char **details) noexcept nogil

# The model's name in a message that begins with these bytes; `data` NULL: they do not contain it.
cdef Str message_model(const uint8_t *head, size_t head_size) noexcept nogil
# A block for a message of `size` bytes to this model, in the arena of the model; NULL: it has none, or no room.
cdef Block *table_place(Table *table, Str name, size_t size) noexcept nogil


cdef class ModelTable:
    # a Table for Python
    cdef Table table
    cdef dict handles        # keeps the LaneHandles and the labels' texts alive
    cdef int resize(self, uint32_t count) except -1
    cdef ModelEntry *cut(self, ModelEntry **link, Str name) noexcept
