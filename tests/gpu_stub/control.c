/* Settings, counts and faults, the report, and the calls by which a test steers the stub. */

#include "cuda_stub.h"

#include <stdarg.h>

pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
int initialized, devices = 1, nodes = 1, is_full, threads = 1, reopens, retained[MAX_DEVICES], sticky[MAX_DEVICES];
long long memory_size = 1LL << 30, memory_used[MAX_DEVICES], copy_us, d2d_us;
int held[KINDS];
uint64_t executed[KINDS];
const char *const kind_names[KINDS] = {"h2d", "d2h", "d2d", "fill", "record", "wait", "graph", "kernel"};
_Thread_local int current_device = -1, is_loop, runs_all;
static _Thread_local int device_before;

static struct { const char *name; uint64_t calls; } counted[MAX_COUNTED];
static struct { char name[64]; long long after; int code; pthread_t *of, here; } faults[MAX_FAULTS];
static char *violations[REPORT_LINES];
static int violation_count;

void violation(const char *format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (violation_count < REPORT_LINES) violations[violation_count] = strdup(text);
    violation_count++;
}

static void set_option(const char *name, long long value) {
    if (!strcmp(name, "devices")) devices = (int)value;
    else if (!strcmp(name, "nodes")) nodes = (int)value;
    else if (!strcmp(name, "full")) is_full = (int)value;
    else if (!strcmp(name, "memory")) memory_size = value;
    else if (!strcmp(name, "threads")) threads = (int)value;
    else if (!strcmp(name, "reopens")) reopens = (int)value;
    else if (!strcmp(name, "copy_us")) copy_us = value;
    else if (!strcmp(name, "d2d_us")) d2d_us = value;
    else { fprintf(stderr, "cuda_stub: unknown setting '%s'\n", name); abort(); }
}

__attribute__((constructor)) static void read_settings(void) {
    const char *text = getenv("CUDA_STUB");
    char *copy = strdup(text ? text : ""), *rest = copy, *item;
    while ((item = strsep(&rest, ",")))
        if (*item) {
            char *value = strchr(item, '=');
            if (!value) { fprintf(stderr, "cuda_stub: expected name=value, got '%s'\n", item); abort(); }
            *value++ = 0;
            set_option(item, atoll(value));
        }
    free(copy);
}

/* Calls that return only when the device has come to an end of something, or may. */
static int may_wait(const char *name) {
    static const char *const names[] = {
        "cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize", "cuMemAlloc_v2", "cuMemFree_v2",
        "cuMemHostAlloc", "cuMemFreeHost", "cuIpcOpenMemHandle_v2",
        "cuIpcCloseMemHandle", "cuMemcpyDtoH_v2"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!strcmp(names[i], name)) return 1;
    return 0;
}

/* Counts the call; the error that it has to return, be it planted by the test or what the device died of. */
CUresult enter(const char *name) {
    int i;
    for (i = 0; i < MAX_COUNTED && counted[i].name && counted[i].name != name; i++) {}
    if (i < MAX_COUNTED) counted[i].name = name, counted[i].calls++;
    if (is_loop && may_wait(name)) violation("the loop calls %s, which may wait for the device", name);
    for (i = 0; i < MAX_FAULTS; i++)
        if (faults[i].code && !strcmp(faults[i].name, name) &&
            (!faults[i].of || pthread_equal(*faults[i].of, pthread_self())) && faults[i].after-- == 0) {
            CUresult code = faults[i].code;
            faults[i].code = 0;
            return code;
        }
    if (!initialized) return NOT_INITIALIZED;
    return current_device >= 0 ? sticky[current_device] : OK;
}

/* ---- for tests ---------------------------------------------------------------------------------------------------- */

void stub_set(const char *name, long long value) {
    pthread_mutex_lock(&guard);
    set_option(name, value);
    pthread_mutex_unlock(&guard);
}
/* The call number `after` (0: the next one) of a function returns `code`; with `here`, of those of this thread. */
void stub_fail(const char *function, long long after, int code, int here) {
    pthread_mutex_lock(&guard);
    for (int i = 0; i < MAX_FAULTS; i++)
        if (!faults[i].code) {
            snprintf(faults[i].name, sizeof faults[i].name, "%s", function);
            faults[i].after = after, faults[i].code = code, faults[i].here = pthread_self();
            faults[i].of = here ? &faults[i].here : NULL;
            break;
        }
    pthread_mutex_unlock(&guard);
}
/* Forget the errors that no call has returned. */
void stub_forgive(void) {
    pthread_mutex_lock(&guard);
    for (int i = 0; i < MAX_FAULTS; i++) faults[i].code = 0;
    pthread_mutex_unlock(&guard);
}
/* Forget the next one of a function; false: there is none. */
int stub_forgive_one(const char *function) {
    int i = 0;
    pthread_mutex_lock(&guard);
    while (i < MAX_FAULTS && !(faults[i].code && !strcmp(faults[i].name, function))) i++;
    if (i < MAX_FAULTS) faults[i].code = 0;
    pthread_mutex_unlock(&guard);
    return i < MAX_FAULTS;
}
/* From now on the device fails with a sticky error; 0 cures it, which no real one does. */
void stub_break(int device, int code) {
    pthread_mutex_lock(&guard);
    sticky[device] = code;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&guard);
}
/* From now on this thread is an event loop's, or no more. */
void stub_loop(int begins) {
    pthread_mutex_lock(&guard);
    if (begins) device_before = current_device;
    else if (current_device != device_before)
        violation("the context of device %d was left current on the loop's thread, which had that of %d (-1: none)",
                  current_device, device_before);
    is_loop = begins;
    pthread_mutex_unlock(&guard);
}
/* From now on, where streams have no threads, this one runs what it waits for: nobody else could meanwhile. */
void stub_run_all(int runs) { runs_all = runs; }
/* The bytes were written by the test itself. */
void stub_wrote(CUdeviceptr address, size_t size) {
    pthread_mutex_lock(&guard);
    Memory *m = find(address, 1);
    if (within(m, address, size)) mark_written(m, address, size);
    pthread_mutex_unlock(&guard);
}
static int kind_of(const char *name) {
    for (int i = 0; i < KINDS; i++)
        if (!strcmp(kind_names[i], name)) return i;
    abort();
}
/* Operations of a kind ("h2d", "d2h", "d2d", ...) do not run until they are let go. */
void stub_hold(const char *kind, int hold) {
    pthread_mutex_lock(&guard);
    held[kind_of(kind)] = hold;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&guard);
}
uint64_t stub_executed(const char *kind) {
    pthread_mutex_lock(&guard);
    uint64_t n = executed[kind_of(kind)];
    pthread_mutex_unlock(&guard);
    return n;
}
/* Wait until `n` operations of a kind have run; false after `seconds`. */
int stub_await(const char *kind, uint64_t n, double seconds) {
    struct timespec until;
    int waited = 0;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += (time_t)seconds + 1;
    pthread_mutex_lock(&guard);
    while (executed[kind_of(kind)] < n && !waited) waited = pthread_cond_timedwait(&changed, &guard, &until);
    int reached = executed[kind_of(kind)] >= n;
    pthread_mutex_unlock(&guard);
    return reached;
}
/* How many streams alive have this priority. */
int stub_streams(int priority) {
    int count = 0;
    pthread_mutex_lock(&guard);
    for (int i = 0; i < MAX_STREAMS; i++) count += slots[i] && slots[i]->alive && slots[i]->priority == priority;
    pthread_mutex_unlock(&guard);
    return count;
}
uint64_t stub_calls(const char *function) {
    uint64_t calls = 0;
    pthread_mutex_lock(&guard);
    for (int i = 0; i < MAX_COUNTED && counted[i].name; i++)
        if (!strcmp(counted[i].name, function)) calls = counted[i].calls;
    pthread_mutex_unlock(&guard);
    return calls;
}
/* Where device memory really lies, for fakes that compute on the CPU; NULL beyond an allocation. */
void *stub_bytes(CUdeviceptr address, size_t size) {
    pthread_mutex_lock(&guard);
    Memory *m = find(address, 1);
    void *bytes = within(m, address, size) ? bytes_of(m, address) : NULL;
    pthread_mutex_unlock(&guard);
    return bytes;
}
/* One line for each violation, then for what is alive; the length of the whole text. Violations are then forgotten. */
size_t stub_report(char *out, size_t room) {
    size_t at = 0;
#define LINE(...) at += (size_t)snprintf(out + (at < room ? at : room), at < room ? room - at : 0, __VA_ARGS__)
    if (room) *out = 0;
    pthread_mutex_lock(&guard);
    for (int i = 0; i < violation_count && i < REPORT_LINES; i++) {
        LINE("violation: %s\n", violations[i]);
        free(violations[i]);
    }
    if (violation_count > REPORT_LINES) LINE("violation: and %d more\n", violation_count - REPORT_LINES);
    violation_count = 0;
    for (Memory *m = memories; m; m = m->next)
        if (m->alive) LINE("alive: %zu bytes of %s memory\n", m->size,
                           m->kind == DEVICE ? "device" : m->kind == IMPORTED ? "imported" : "page-locked");
    for (int i = 0; i < MAX_STREAMS; i++)
        if (slots[i] && slots[i]->alive) LINE("alive: a stream\n");
    if (live_events) LINE("alive: %d events\n", live_events);
    if (live_graphs) LINE("alive: %d graphs\n", live_graphs);
    for (int i = 0; i < MAX_DEVICES; i++)
        if (retained[i]) LINE("alive: the context of device %d, %d times\n", i, retained[i]);
    pthread_mutex_unlock(&guard);
    return at;
}
__attribute__((destructor)) static void write_report(void) {
    const char *path = getenv("CUDA_STUB_REPORT");
    static char text[1 << 16];
    if (!path || !initialized) return;
    stub_report(text, sizeof text);
    FILE *file = fopen(path, "w");
    if (file) fputs(text, file), fclose(file);
}
