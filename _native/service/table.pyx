"""The table of models: name and version to lane, a chained hash table under one lock that is held briefly.

A version that is replaced or unloaded departs: requests of sequences that began on it still find it. While a model has
departing versions, table_find finds none of its versions, and table_route decides by the request's sequence. So lookups
of other models cost no more.
"""

from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy

from inferd._native.atomic cimport fetch_add32
from inferd._native.front cimport front_enter, front_leave
from inferd._native.memory.arena cimport arena_take
from inferd._native.protobuf.codec cimport Str
from inferd._native.request.lane cimport Lane, LaneHandle
from inferd._native.request.request cimport Correlation
from inferd._native.status cimport STATUS_INVALID_ARGUMENT, STATUS_NOT_FOUND, STATUS_OK, STATUS_UNAVAILABLE
from inferd._native.text cimport clip, format_text
from inferd._native.threads cimport lock, mutex_destroy, mutex_init, unlock

cdef enum:
    MODEL_NAME_TAG = 1 << 3 | 2
    FIRST_BUCKETS = 16


cdef inline uint32_t hash_of(Str name) noexcept nogil:
    # FNV-1a; names come from the repository, not from peers
    cdef uint32_t value = 2166136261
    cdef uint32_t i
    for i in range(name.size):
        value = (value ^ <unsigned char>name.data[i]) * 16777619
    return value


cdef ModelEntry *entry_of(Table *table, Str name) noexcept nogil:
    cdef ModelEntry *entry = table.buckets[hash_of(name) & (table.bucket_count - 1)]
    while entry != NULL and (entry.name.size != name.size or memcmp(entry.name.data, name.data, name.size) != 0):
        entry = entry.next
    return entry


cdef inline bint version_number(Str text, int64_t *number) noexcept nogil:
    # decimal digits with an optional minus; False for anything else
    cdef uint32_t i = 0
    cdef bint negative = text.size > 0 and text.data[0] == c"-"
    number[0] = 0
    if negative:
        i = 1
    if text.size == i or text.size - i > 18:
        return False
    while i < text.size:
        if not c"0" <= text.data[i] <= c"9":
            return False
        number[0] = number[0] * 10 + (text.data[i] - c"0")
        i += 1
    if negative:
        number[0] = -number[0]
    return True


cdef inline Lane *lane_of(const ModelEntry *entry, uint32_t count, int64_t version) noexcept nogil:
    # the lane of this version among the first `count`, or of the latest that is ready
    cdef uint32_t i = count
    if version < 0:
        while i:
            i -= 1
            if entry.versions[i].lane != NULL:
                return entry.versions[i].lane
    while i:
        i -= 1
        if entry.versions[i].version == version:
            return entry.versions[i].lane
    return NULL


cdef void refuse_version(const ModelEntry *entry, Str name, int64_t version, int *status,
                         char **details) noexcept nogil:
    # set the error: no version is there, or none is ready
    cdef bint known = False
    cdef uint32_t i
    for i in range(0 if entry == NULL else entry.version_count + entry.routed_count):
        known = known or entry.versions[i].version == version
    status[0] = STATUS_UNAVAILABLE if known else STATUS_NOT_FOUND
    if entry == NULL:
        details[0] = format_text("Request for unknown model: '%.*s' is not found", clip(name), name.data)
    elif version < 0:
        details[0] = format_text("Request for unknown model: '%.*s' has no available versions",
                                 clip(name), name.data)
    else:
        details[0] = format_text("Request for unknown model: '%.*s' version %lld is not %s", clip(name),
                                 name.data, <long long>version, b"at ready state" if known else b"found")


cdef bint choose_version(const ModelEntry *entry, Str version, int64_t *number, int *status,
                         char **details) noexcept nogil:
    # the number of the version with this number or label, -1 for the latest; False: the error is set. A model that is
    # not loaded has no labels yet: it may get this one.
    cdef uint32_t i
    if version_number(version, number):
        if number[0] > 0 or number[0] == -1:
            return True
        status[0] = STATUS_INVALID_ARGUMENT
        details[0] = format_text("invalid model version specified: '%.*s', version should be an integral value > 0",
                                 clip(version), version.data)
        return False
    number[0] = -1
    for i in range(0 if entry == NULL else entry.label_count):
        if entry.labels[i].name.size == version.size and \
                memcmp(entry.labels[i].name.data, version.data, version.size) == 0:
            number[0] = entry.labels[i].version
            return True
    if entry == NULL or lane_of(entry, entry.version_count + entry.routed_count, -1) == NULL:
        return True
    status[0] = STATUS_INVALID_ARGUMENT
    details[0] = format_text(
        "failed to get model version from specified version string '%.*s' (details: stol), version should be an "
        "integral value > 0%s", clip(version), version.data,
        b", or a version label of the model" if entry.label_count else b"")
    return False


cdef Str message_model(const uint8_t *head, size_t head_size) noexcept nogil:
    # model_name is field 1 of ModelInferRequest, and every client writes it first
    cdef Str name
    name.data = NULL
    name.size = 0
    if head_size >= 2 and head[0] == MODEL_NAME_TAG and head[1] < 0x80 and head_size >= 2 + <size_t>head[1]:
        name.data = <const char *>head + 2
        name.size = head[1]
    return name


cdef Block *table_place(Table *table, Str name, size_t size) noexcept nogil:
    cdef ModelEntry *entry
    cdef Lane *lane = NULL
    cdef Block *block = NULL
    lock(&table.guard)
    entry = entry_of(table, name)
    if entry != NULL:
        lane = lane_of(entry, entry.version_count, -1)
    if lane != NULL and lane.arena != NULL:
        block = arena_take(lane.arena, size)
        if block != NULL:
            block.sealed = False  # no worker process knows it yet
    unlock(&table.guard)
    return block


cdef Lane *table_find(Table *table, Str name, Str version, int *status, char **details) noexcept nogil:
    cdef int64_t number = -1
    cdef const ModelEntry *entry
    cdef Lane *lane = NULL
    lock(&table.guard)
    entry = entry_of(table, name)
    if version.size and not choose_version(entry, version, &number, status, details):
        unlock(&table.guard)
        return NULL
    if entry != NULL:
        lane = lane_of(entry, entry.version_count, number)
    if lane != NULL:
        status[0] = STATUS_OK
        fetch_add32(&lane.in_flight, 1)  # under the lock: after `set` or `remove` returned, no lookup finds the lane
    elif entry != NULL and entry.departing_count:
        status[0] = STATUS_OK
    else:
        refuse_version(entry, name, number, status, details)
    unlock(&table.guard)
    return lane


cdef inline bint goes_on(Lane *lane, const Correlation *correlation) noexcept nogil:
    return lane.sequences != NULL and lane.sequences.has != NULL and lane.sequences.has(lane, correlation)


cdef Lane *begun_on(const ModelEntry *entry, int64_t version, const Correlation *correlation) noexcept nogil:
    # the departing version on which the sequence continues; of several (-1), the one that departed last
    cdef const VersionEntry *departing
    cdef uint32_t i
    for i in range(entry.departing_count):
        departing = &entry.departing[i]
        if (version < 0 or departing.version == version) and goes_on(departing.lane, correlation):
            return departing.lane
    return NULL


cdef void refuse_beginning(const ModelEntry *entry, Str name, int64_t version, int *status,
                           char **details) noexcept nogil:
    # set the error of a request that no version serves: its version may be departing
    cdef bint departs = version < 0
    cdef uint32_t i
    for i in range(entry.departing_count):
        departs = departs or entry.departing[i].version == version
    if not departs:
        refuse_version(entry, name, version, status, details)
        return
    status[0] = STATUS_UNAVAILABLE
    details[0] = format_text(
        "Request for unknown model: '%.*s' is unloading: only requests of sequences that have begun on it are served",
        clip(name), name.data)


cdef Lane *route_locked(const ModelEntry *entry, Str name, int64_t version, bint labelled,
                        const Correlation *correlation, bint begins, int *status, char **details) noexcept nogil:
    # A sequence continues where it began, and begins on a version that is served. Its beginning ends an older sequence
    # of its id on a departing version. A label may stand for another version than when the sequence began.
    cdef Lane *lane = lane_of(entry, entry.routed_count, version)
    cdef Lane *before = NULL
    if correlation.given and (lane == NULL or begins or not goes_on(lane, correlation)):
        before = begun_on(entry, -1 if labelled else version, correlation)
    if before != NULL and not begins:
        return before
    if lane == NULL:
        refuse_beginning(entry, name, version, status, details)
    elif before != NULL:
        before.sequences.end(before, correlation)
    return lane


cdef Lane *table_route(Table *table, Str name, Str version, const Correlation *correlation, bint begins, int *status,
                       char **details) noexcept nogil:
    cdef const ModelEntry *entry
    cdef int64_t number = -1
    cdef int64_t given
    cdef bint labelled
    cdef Lane *lane = NULL
    status[0] = STATUS_OK
    lock(&table.guard)
    entry = entry_of(table, name)
    if entry == NULL:
        refuse_version(NULL, name, number, status, details)
    elif version.size == 0 or choose_version(entry, version, &number, status, details):
        labelled = version.size > 0 and not version_number(version, &given)
        lane = route_locked(entry, name, number, labelled, correlation, begins, status, details)
    if lane != NULL:
        fetch_add32(&lane.in_flight, 1)
    unlock(&table.guard)
    return lane


cdef void entry_free(ModelEntry *entry) noexcept nogil:
    free(<void *>entry.name.data)
    free(entry.versions)
    free(entry.departing)
    free(entry.labels)
    free(entry)


cdef VersionEntry *versions_new(list versions) except NULL:
    # `versions` has pairs of a number and a LaneHandle or None
    cdef VersionEntry *entries = <VersionEntry *>calloc(max(1, len(versions)), sizeof(VersionEntry))
    cdef LaneHandle handle
    cdef uint32_t i = 0
    if entries == NULL:
        raise MemoryError
    for version, handle in versions:
        entries[i].version = version
        entries[i].lane = handle.lane if handle is not None else NULL
        i += 1
    return entries


cdef int set_labels(ModelEntry *entry, list labels) except -1:
    # `labels` has pairs of the label's bytes, which stay the caller's, and a number
    cdef bytes label
    entry.labels = <LabelEntry *>calloc(max(1, len(labels)), sizeof(LabelEntry))
    if entry.labels == NULL:
        raise MemoryError
    for label, version in labels:
        entry.labels[entry.label_count] = LabelEntry(Str(label, <uint32_t>len(label)), version)
        entry.label_count += 1
    return 0


cdef ModelEntry *entry_new(bytes name, list versions, list departing, list labels) except NULL:
    cdef ModelEntry *entry = <ModelEntry *>calloc(1, sizeof(ModelEntry))
    cdef char *copy = <char *>malloc(len(name) + 1)
    if entry == NULL or copy == NULL:
        free(copy)
        free(entry)
        raise MemoryError
    memcpy(copy, <const char *>name, len(name) + 1)
    entry.name.data = copy
    entry.name.size = <uint32_t>len(name)
    try:
        entry.versions = versions_new(versions)
        entry.departing = versions_new(departing)
        set_labels(entry, labels)
    except BaseException:
        entry_free(entry)
        raise
    entry.departing_count = <uint32_t>len(departing)
    if departing:
        entry.routed_count = <uint32_t>len(versions)
    else:
        entry.version_count = <uint32_t>len(versions)
    return entry


cdef class ModelTable:
    """Models by name and version. Changes take effect for the next request."""

    def __cinit__(self):
        mutex_init(&self.table.guard, NULL)
        self.handles = {}
        self.resize(FIRST_BUCKETS)

    def __dealloc__(self):
        cdef uint32_t i
        cdef ModelEntry *entry
        for i in range(self.table.bucket_count):
            while self.table.buckets[i] != NULL:
                entry = self.table.buckets[i]
                self.table.buckets[i] = entry.next
                entry_free(entry)
        free(self.table.buckets)
        mutex_destroy(&self.table.guard)

    cdef int resize(self, uint32_t count) except -1:
        cdef ModelEntry **buckets = <ModelEntry **>calloc(count, sizeof(ModelEntry *))
        cdef ModelEntry *entry
        cdef ModelEntry *following
        cdef uint32_t i, at
        if buckets == NULL:
            raise MemoryError
        lock(&self.table.guard)
        for i in range(self.table.bucket_count):
            entry = self.table.buckets[i]
            while entry != NULL:
                following = entry.next
                at = hash_of(entry.name) & (count - 1)
                entry.next = buckets[at]
                buckets[at] = entry
                entry = following
        free(self.table.buckets)
        self.table.buckets = buckets
        self.table.bucket_count = count
        unlock(&self.table.guard)
        return 0

    def set(self, name: str, versions: dict, departing: Sequence[tuple[int, LaneHandle]] = (),
            labels: Sequence[tuple[str, int]] = ()) -> None:
        """Set the versions of a model.

        Args:
            name: of the model.
            versions: number to LaneHandle, or to None for one that is known and not ready.
            departing: versions that serve only sequences that began on them, the one that departed last first.
            labels: other names of versions, none a number.
        """
        cdef list ordered = sorted(versions.items())
        cdef list going = list(departing)
        cdef list named = [(label.encode(), version) for label, version in labels]
        cdef ModelEntry *entry = entry_new(name.encode(), ordered, going, named)
        cdef ModelEntry **link
        cdef ModelEntry *old
        if self.table.model_count >= self.table.bucket_count:
            self.resize(self.table.bucket_count * 2)
        front_enter()
        lock(&self.table.guard)
        link = &self.table.buckets[hash_of(entry.name) & (self.table.bucket_count - 1)]
        old = self.cut(link, entry.name)
        entry.next = link[0]
        link[0] = entry
        if old == NULL:
            self.table.model_count += 1
        unlock(&self.table.guard)
        if old != NULL:
            entry_free(old)
        front_leave()
        self.handles[name] = (ordered, going, named)

    def remove(self, name: str) -> None:
        """Forget a model."""
        cdef bytes encoded = name.encode()
        cdef Str key
        cdef ModelEntry *old
        key.data = encoded
        key.size = <uint32_t>len(encoded)
        front_enter()
        lock(&self.table.guard)
        old = self.cut(&self.table.buckets[hash_of(key) & (self.table.bucket_count - 1)], key)
        if old != NULL:
            self.table.model_count -= 1
        unlock(&self.table.guard)
        if old != NULL:
            entry_free(old)
        front_leave()
        self.handles.pop(name, None)

    cdef ModelEntry *cut(self, ModelEntry **link, Str name) noexcept:
        # unlink the entry with this name from its bucket; NULL when there is none
        cdef ModelEntry *entry
        while link[0] != NULL:
            entry = link[0]
            if entry.name.size == name.size and memcmp(entry.name.data, name.data, name.size) == 0:
                link[0] = entry.next
                return entry
            link = &entry.next
        return NULL

    def find(self, name: str, version: str = "") -> tuple:
        """How a request for this model would end: (status, text); the text is empty when a lane serves it."""
        cdef bytes encoded_name = name.encode()
        cdef bytes encoded_version = version.encode()
        cdef Str model, number
        cdef int status
        cdef char *details = NULL
        cdef Lane *lane
        cdef Correlation nobody
        nobody.given = False
        model.data = encoded_name
        model.size = <uint32_t>len(encoded_name)
        number.data = encoded_version
        number.size = <uint32_t>len(encoded_version)
        front_enter()
        lane = table_find(&self.table, model, number, &status, &details)
        if lane == NULL and status == STATUS_OK:
            lane = table_route(&self.table, model, number, &nobody, False, &status, &details)
        front_leave()
        if lane != NULL:
            fetch_add32(&lane.in_flight, -1)
            return (status, "")
        try:
            return (status, details.decode("utf-8", "replace") if details != NULL else "out of memory")
        finally:
            free(details)
