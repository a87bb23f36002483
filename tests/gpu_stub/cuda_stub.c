/* A CUDA driver without a GPU, for tests: the functions that `_native/cuda/driver.pxd` names, and nothing else.
 *
 * It keeps the driver's promises and none that the driver does not make:
 *   - each stream is a thread; a copy happens when it runs, after a delay that the test chooses, not when submitted;
 *   - the target of a copy to the host is scribbled over until the copy has run;
 *   - device addresses cannot be read by the CPU; fresh device memory holds rubbish; freed addresses never come back;
 *   - copies from and to pageable memory make the caller wait, as the driver may;
 *   - after a sticky error every call fails and nothing runs any more;
 *   - a process cannot open its own memory handles.
 *
 * And it looks for what goes wrong rarely on a GPU, and reports it (stub_report):
 *   - a source or target in host memory that changes between the submission of a copy and the copy;
 *   - accesses of two streams to the same bytes, one of them a write, that no event orders (vector clocks, so that the
 *     report depends on what was submitted and not on who was quicker);
 *   - memory freed while work on it is pending, work on freed memory, copies beyond an allocation;
 *   - the default stream; a stream used with another device's context current;
 *   - what is still alive at the end.
 *
 * Settings, from the environment variable CUDA_STUB ("devices=2,memory=1073741824,copy_us=50") or stub_set():
 *   devices, memory (bytes of each device), copy_us (delay of a copy), d2d_us (of copies on the device).
 * With CUDA_STUB_REPORT=<file> the report is written there when the process ends.
 *
 * One lock guards everything but the copying itself. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

typedef int CUresult;
typedef unsigned long long CUdeviceptr;
typedef struct { char reserved[64]; } CUipcMemHandle;

enum {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_READY = 600, ILLEGAL_ADDRESS = 700, ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901,
};
enum { MAX_DEVICES = 8, MAX_STREAMS = 64, MAX_FAULTS = 16, MAX_COUNTED = 64, REPORT_LINES = 64 };
enum { RUBBISH = 0xDB, SCRIBBLE = 0xEE };

typedef struct { uint32_t tick[MAX_STREAMS]; } Clock;

typedef struct Access {
    size_t offset, size;
    int write, slot;
    uint32_t tick;
    struct Access *next;
} Access;

typedef enum { DEVICE, PINNED, REGISTERED, IMPORTED } MemoryKind;

typedef struct Memory {
    MemoryKind kind;
    uint64_t address;       /* what the caller sees */
    size_t size;
    uint8_t *bytes;         /* where it really lies */
    int fd, device, alive, pending, opened;
    CUipcMemHandle handle;  /* of an imported one */
    Access *accesses;
    struct Memory *next;
} Memory;

typedef struct Graph Graph;

typedef struct Event {
    int alive, device, timing, references;
    uint64_t recorded, reached;
    int64_t reached_ns;
    Clock clock;
    Graph *captured_in;
} Event;

typedef enum { COPY_IN, COPY_OUT, COPY_DEVICE, FILL, HOST, RECORD, WAIT, GRAPH, KINDS } Kind;
static const char *const kind_names[KINDS] = {"h2d", "d2h", "d2d", "fill", "host", "record", "wait", "graph"};

typedef struct Operation {
    Kind kind;
    uint64_t to, source;
    size_t size;
    int value;
    Memory *to_memory, *source_memory;   /* NULL: pageable */
    uint64_t checksum;
    int checked;
    Event *event;
    uint64_t ticket;
    void (*function)(void *);
    void *argument;
    Graph *graph;
    Clock clock;                         /* of its stream when it was submitted */
    struct Operation *next;
} Operation;

struct Graph {
    int is_exec, alive, invalid, references;
    Operation *first, *last;
};

typedef struct Stream {
    int alive, device, slot, priority;
    uint64_t submitted, executed;
    Operation *first, *last;
    Clock clock;
    Graph *capture;
    int is_origin;
    pthread_t capturing_thread, thread;
} Stream;

static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int initialized, devices = 1, retained[MAX_DEVICES], sticky[MAX_DEVICES];
static long long memory_size = 1LL << 30, memory_used[MAX_DEVICES], copy_us, d2d_us;
static int held[KINDS];
static uint64_t executed[KINDS];
static Memory *memories;
static Stream *slots[MAX_STREAMS];
static uint32_t ticks[MAX_STREAMS];     /* never restart, also when a slot gets a new stream */
static Clock host_clock;
static int live_events, live_graphs;
static _Thread_local int current_device = -1;

static struct { const char *name; uint64_t calls; } counted[MAX_COUNTED];
static struct { char name[64]; long long after; int code; } faults[MAX_FAULTS];
static char *violations[REPORT_LINES];
static int violation_count;

/* ---- reports, faults, settings -------------------------------------------------------------------------------- */

static void violation(const char *format, ...) {
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
    else if (!strcmp(name, "memory")) memory_size = value;
    else if (!strcmp(name, "copy_us")) copy_us = value;
    else if (!strcmp(name, "d2d_us")) d2d_us = value;
    else { fprintf(stderr, "cuda_stub: unknown setting '%s'\n", name); abort(); }
}

/* Counts the call; the error that it has to return, be it planted by the test or what the device died of. */
static CUresult enter(const char *name) {
    int i;
    for (i = 0; i < MAX_COUNTED && counted[i].name && counted[i].name != name; i++) {}
    if (i < MAX_COUNTED) counted[i].name = name, counted[i].calls++;
    for (i = 0; i < MAX_FAULTS; i++)
        if (faults[i].code && !strcmp(faults[i].name, name) && faults[i].after-- == 0) {
            CUresult code = faults[i].code;
            faults[i].code = 0;
            return code;
        }
    if (!initialized) return NOT_INITIALIZED;
    return current_device >= 0 ? sticky[current_device] : OK;
}

#define ENTER(check) \
    pthread_mutex_lock(&guard); \
    CUresult result = enter(__func__); \
    if (result == OK && !(check)) result = INVALID_VALUE; \
    if (result == OK && (current_device < 0 || !retained[current_device])) result = INVALID_CONTEXT; \
    if (result == OK)
#define LEAVE \
    pthread_mutex_unlock(&guard); \
    return result

/* ---- memory --------------------------------------------------------------------------------------------------- */

static Memory *find(uint64_t address, int device_side) {
    Memory *dead = NULL;
    for (Memory *m = memories; m; m = m->next)
        if (address >= m->address && address < m->address + m->size &&
            device_side == (m->kind == DEVICE || m->kind == IMPORTED)) {
            if (m->alive) return m;
            dead = m;
        }
    return device_side ? dead : NULL;  /* host addresses are used again, device addresses never */
}

static Memory *remember(MemoryKind kind, uint64_t address, size_t size, uint8_t *bytes, int fd) {
    Memory *m = calloc(1, sizeof *m);
    m->kind = kind, m->address = address, m->size = size, m->bytes = bytes, m->fd = fd;
    m->device = current_device, m->alive = 1, m->next = memories;
    return memories = m;
}

static void forget(Memory *m) {
    m->alive = 0;
    while (m->accesses) {
        Access *a = m->accesses;
        m->accesses = a->next;
        free(a);
    }
}

static uint64_t reserve_addresses(size_t size) {
    void *at = mmap(NULL, size + 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return at == MAP_FAILED ? 0 : (uint64_t)(uintptr_t)at;
}

static int covers(const Clock *clock, const Access *access) { return access->tick <= clock->tick[access->slot]; }

/* Note that an operation touches these bytes; report an earlier access that nothing orders before it. */
static void touch(Memory *m, uint64_t address, size_t size, int write, const Stream *stream, const Clock *clock) {
    Access **at = &m->accesses;
    size_t offset = (size_t)(address - m->address);
    while (*at) {
        Access *a = *at;
        int overlap = a->offset < offset + size && offset < a->offset + a->size;
        if (overlap && (write || a->write) && !covers(clock, a))
            violation("stream %d %s %zu bytes at %#llx, which stream %d %s, and no event orders them", stream->slot,
                      write ? "writes" : "reads", size, (unsigned long long)address, a->slot,
                      a->write ? "writes" : "reads");
        if (covers(&host_clock, a) || (write && covers(clock, a) && a->offset >= offset &&
                                       a->offset + a->size <= offset + size)) {
            *at = a->next;
            free(a);
        } else {
            at = &a->next;
        }
    }
    Access *a = malloc(sizeof *a);
    *a = (Access){offset, size, write, stream->slot, clock->tick[stream->slot], m->accesses};
    m->accesses = a;
}

static int within(const Memory *m, uint64_t address, size_t size) {
    return m && m->alive && address + size <= m->address + m->size;
}

static uint8_t *bytes_of(const Memory *m, uint64_t address) {
    return m ? m->bytes + (address - m->address) : (uint8_t *)(uintptr_t)address;
}

static uint64_t checksum(const uint8_t *bytes, size_t size) {
    uint64_t sum = 1469598103934665603ULL, word;
    size_t i = 0;
    for (; i + 8 <= size; i += 8) memcpy(&word, bytes + i, 8), sum = (sum ^ word) * 1099511628211ULL;
    for (; i < size; i++) sum = (sum ^ bytes[i]) * 1099511628211ULL;
    return sum;
}

/* ---- running -------------------------------------------------------------------------------------------------- */

static void join_clock(Clock *into, const Clock *from) {
    for (int i = 0; i < MAX_STREAMS; i++)
        if (from->tick[i] > into->tick[i]) into->tick[i] = from->tick[i];
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void event_unreference(Event *event) {
    if (--event->references == 0) free(event);
}

static void graph_unreference(Graph *graph) {
    if (--graph->references) return;
    while (graph->first) {
        Operation *o = graph->first;
        graph->first = o->next;
        free(o);
    }
    free(graph);
}

static int is_copy(Kind kind) { return kind == COPY_IN || kind == COPY_OUT || kind == COPY_DEVICE || kind == FILL; }

/* Runs a copy with the lock held on entry and exit, let go while bytes move. */
static void run_copy(Operation *o, int device) {
    if ((o->to_memory && !within(o->to_memory, o->to, o->size)) ||
        (o->source_memory && !within(o->source_memory, o->source, o->size))) {
        violation("a %s copy of %zu bytes ran on memory that was freed", kind_names[o->kind], o->size);
        sticky[device] = ILLEGAL_ADDRESS;
        return;
    }
    uint8_t *to = bytes_of(o->to_memory, o->to);
    uint8_t *source = o->kind == FILL ? NULL : bytes_of(o->source_memory, o->source);
    long long delay = o->kind == COPY_DEVICE ? d2d_us : copy_us;
    pthread_mutex_unlock(&guard);
    if (delay) usleep((useconds_t)delay);
    int intact = !o->checked || o->checksum == checksum(o->kind == COPY_IN ? source : to, o->size);
    if (o->kind == FILL) memset(to, o->value, o->size);
    else memmove(to, source, o->size);
    pthread_mutex_lock(&guard);
    if (!intact)
        violation("the host memory of a %s copy of %zu bytes was written before the copy ran", kind_names[o->kind],
                  o->size);
}

static void run_operation(Operation *o, int device) {
    while (held[o->kind] && !sticky[device]) pthread_cond_wait(&changed, &guard);
    if (o->kind == WAIT)
        while (o->event->reached < o->ticket && !sticky[device]) pthread_cond_wait(&changed, &guard);
    if (sticky[device]) return;
    if (is_copy(o->kind)) {
        run_copy(o, device);
    } else if (o->kind == HOST) {
        pthread_mutex_unlock(&guard);
        o->function(o->argument);
        pthread_mutex_lock(&guard);
    } else if (o->kind == RECORD) {
        if (o->ticket > o->event->reached) o->event->reached = o->ticket;
        o->event->reached_ns = now_ns();
    } else if (o->kind == GRAPH) {
        for (Operation *inner = o->graph->first; inner; inner = inner->next) run_operation(inner, device);
    }
    executed[o->kind]++;
    pthread_cond_broadcast(&changed);
}

static void count_pending(Operation *o, int by) {
    if (o->to_memory) o->to_memory->pending += by;
    if (o->source_memory) o->source_memory->pending += by;
    if (o->kind == GRAPH)
        for (Operation *inner = o->graph->first; inner; inner = inner->next) count_pending(inner, by);
}

static void *stream_thread(void *argument) {
    Stream *s = argument;
    pthread_mutex_lock(&guard);
    for (;;) {
        while (!s->first && s->alive) pthread_cond_wait(&changed, &guard);
        Operation *o = s->first;
        if (!o) break;
        run_operation(o, s->device);
        s->first = o->next;
        if (!s->first) s->last = NULL;
        count_pending(o, -1);
        s->executed++;
        if (o->event) event_unreference(o->event);
        if (o->graph) graph_unreference(o->graph);
        free(o);
        pthread_cond_broadcast(&changed);
    }
    slots[s->slot] = NULL;
    pthread_mutex_unlock(&guard);
    free(s);
    return NULL;
}

/* ---- submitting ----------------------------------------------------------------------------------------------- */

static CUresult usable(const Stream *s) {
    if (!s) { violation("the default stream was used"); return INVALID_HANDLE; }
    for (int i = 0; i < MAX_STREAMS; i++)
        if (slots[i] == s && s->alive) {
            if (s->device == current_device) return OK;
            violation("stream %d of device %d was used while device %d is current", i, s->device, current_device);
            return INVALID_CONTEXT;
        }
    return INVALID_HANDLE;
}

static Operation *operation(Kind kind) {
    Operation *o = calloc(1, sizeof *o);
    o->kind = kind;
    return o;
}

static void note_accesses(const Operation *o, const Stream *s) {
    if (o->to_memory) touch(o->to_memory, o->to, o->size, 1, s, &s->clock);
    if (o->source_memory) touch(o->source_memory, o->source, o->size, 0, s, &s->clock);
    if (o->kind == GRAPH)
        for (Operation *inner = o->graph->first; inner; inner = inner->next) note_accesses(inner, s);
}

static void append(Operation **first, Operation **last, Operation *o) {
    if (*first) (*last)->next = o;
    else *first = o;
    *last = o;
}

static void submit(Stream *s, Operation *o) {
    if (s->capture) {
        append(&s->capture->first, &s->capture->last, o);
        return;
    }
    join_clock(&s->clock, &host_clock);
    s->clock.tick[s->slot] = ++ticks[s->slot];
    o->clock = s->clock;
    note_accesses(o, s);
    count_pending(o, 1);
    append(&s->first, &s->last, o);
    s->submitted++;
    pthread_cond_broadcast(&changed);
}

static void wait_for(Stream *s, uint64_t operations) {
    while (s->executed < operations && !sticky[s->device]) pthread_cond_wait(&changed, &guard);
}

static CUresult submit_copy(Stream *s, Kind kind, uint64_t to, uint64_t source, size_t size, int value) {
    CUresult result = usable(s);
    if (result != OK) return result;
    if (size == 0) return OK;
    int host_to = kind == COPY_OUT, host_source = kind == COPY_IN;
    Memory *to_memory = find(to, !host_to);
    Memory *source_memory = kind == FILL ? NULL : find(source, !host_source);
    if ((!host_to && !within(to_memory, to, size)) ||
        (kind != FILL && !host_source && !within(source_memory, source, size)) ||
        (host_to && to_memory && !within(to_memory, to, size)) ||
        (host_source && source_memory && !within(source_memory, source, size))) {
        Memory *wrong = host_to || (to_memory && within(to_memory, to, size)) ? source_memory : to_memory;
        violation("a %s copy of %zu bytes was submitted %s", kind_names[kind], size,
                  wrong && !wrong->alive ? "on memory that was freed" : "beyond an allocation");
        return INVALID_VALUE;
    }
    Operation *o = operation(kind);
    o->to = to, o->source = source, o->size = size, o->value = value;
    o->to_memory = to_memory, o->source_memory = source_memory;
    int pageable = (host_to && !to_memory) || (host_source && !source_memory);
    if (!pageable && !s->capture && (host_to || host_source)) {
        if (host_to) memset(bytes_of(to_memory, to), SCRIBBLE, size);
        o->checked = 1;
        o->checksum = checksum(host_to ? bytes_of(to_memory, to) : bytes_of(source_memory, source), size);
    }
    submit(s, o);
    if (pageable && !s->capture) {
        uint64_t last = s->submitted;
        wait_for(s, last);
        join_clock(&host_clock, &s->clock);
    }
    return sticky[s->device];
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *source, size_t size, Stream *s) {
    ENTER(1) result = submit_copy(s, COPY_IN, to, (uint64_t)(uintptr_t)source, size, 0);
    LEAVE;
}
CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr source, size_t size, Stream *s) {
    ENTER(1) result = submit_copy(s, COPY_OUT, (uint64_t)(uintptr_t)to, source, size, 0);
    LEAVE;
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr source, size_t size, Stream *s) {
    ENTER(1) result = submit_copy(s, COPY_DEVICE, to, source, size, 0);
    LEAVE;
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t size, Stream *s) {
    ENTER(1) result = submit_copy(s, FILL, to, 0, size, value);
    LEAVE;
}
CUresult cuLaunchHostFunc(Stream *s, void (*function)(void *), void *argument) {
    ENTER(function) {
        if ((result = usable(s)) == OK) {
            Operation *o = operation(HOST);
            o->function = function, o->argument = argument;
            submit(s, o);
        }
    }
    LEAVE;
}

/* ---- streams and events --------------------------------------------------------------------------------------- */

CUresult cuStreamCreateWithPriority(Stream **out, unsigned flags, int priority) {
    ENTER(out) {
        int slot = 0;
        while (slot < MAX_STREAMS && slots[slot]) slot++;
        if (slot == MAX_STREAMS) {
            result = OUT_OF_MEMORY;
        } else {
            if (!(flags & 1)) violation("a stream was made that waits for the default stream");
            Stream *s = calloc(1, sizeof *s);
            s->alive = 1, s->device = current_device, s->slot = slot, s->priority = priority;
            slots[slot] = *out = s;
            pthread_create(&s->thread, NULL, stream_thread, s);
            pthread_detach(s->thread);
        }
    }
    LEAVE;
}
CUresult cuStreamDestroy_v2(Stream *s) {
    ENTER(1) {
        if ((result = usable(s)) == OK) {
            s->alive = 0;
            pthread_cond_broadcast(&changed);
        }
    }
    LEAVE;
}
static int breaks_capture(Stream *s) {
    if (!s->capture) return 0;
    s->capture->invalid = 1;
    return 1;
}
CUresult cuStreamSynchronize(Stream *s) {
    ENTER(1) {
        if ((result = usable(s)) != OK) {}
        else if (breaks_capture(s)) result = CAPTURE_UNSUPPORTED;
        else {
            wait_for(s, s->submitted);
            join_clock(&host_clock, &s->clock);
            result = sticky[s->device];
        }
    }
    LEAVE;
}
CUresult cuStreamQuery(Stream *s) {
    ENTER(1) {
        if ((result = usable(s)) != OK) {}
        else if (breaks_capture(s)) result = CAPTURE_UNSUPPORTED;
        else if (s->executed < s->submitted) result = NOT_READY;
        else join_clock(&host_clock, &s->clock);
    }
    LEAVE;
}
CUresult cuStreamWaitEvent(Stream *s, Event *event, unsigned flags) {
    (void)flags;
    ENTER(event && event->alive) {
        if ((result = usable(s)) == OK) {
            if (event->captured_in) {
                s->capture = event->captured_in;
            } else if (!s->capture && event->recorded) {
                Operation *o = operation(WAIT);
                o->event = event, o->ticket = event->recorded;
                event->references++;
                submit(s, o);
                join_clock(&s->clock, &event->clock);
            }
        }
    }
    LEAVE;
}
CUresult cuEventCreate(Event **out, unsigned flags) {
    ENTER(out) {
        Event *event = calloc(1, sizeof *event);
        event->alive = 1, event->device = current_device, event->timing = !(flags & 2), event->references = 1;
        *out = event;
        live_events++;
    }
    LEAVE;
}
CUresult cuEventDestroy_v2(Event *event) {
    ENTER(event && event->alive) {
        event->alive = 0;
        live_events--;
        event_unreference(event);
    }
    LEAVE;
}
CUresult cuEventRecord(Event *event, Stream *s) {
    ENTER(event && event->alive) {
        if ((result = usable(s)) != OK) {}
        else if (event->device != s->device) result = INVALID_HANDLE;
        else if (s->capture) event->captured_in = s->capture;
        else {
            Operation *o = operation(RECORD);
            event->captured_in = NULL;
            o->event = event, o->ticket = ++event->recorded;
            event->references++;
            submit(s, o);
            event->clock = s->clock;
        }
    }
    LEAVE;
}
CUresult cuEventQuery(Event *event) {
    ENTER(event && event->alive) {
        if (event->reached < event->recorded) result = NOT_READY;
        else join_clock(&host_clock, &event->clock);
    }
    LEAVE;
}
CUresult cuEventSynchronize(Event *event) {
    ENTER(event && event->alive) {
        uint64_t ticket = event->recorded;
        Clock clock = event->clock;
        event->references++;
        while (event->reached < ticket && !sticky[event->device]) pthread_cond_wait(&changed, &guard);
        result = sticky[event->device];
        if (result == OK) join_clock(&host_clock, &clock);
        event_unreference(event);
    }
    LEAVE;
}
CUresult cuEventElapsedTime(float *milliseconds, Event *start, Event *end) {
    ENTER(milliseconds && start && end && start->timing && end->timing) {
        if (start->reached < start->recorded || end->reached < end->recorded) result = NOT_READY;
        else *milliseconds = (float)(end->reached_ns - start->reached_ns) / 1e6f;
    }
    LEAVE;
}

/* ---- graphs --------------------------------------------------------------------------------------------------- */

CUresult cuStreamBeginCapture_v2(Stream *s, int mode) {
    ENTER(mode >= 0 && mode <= 2) {
        if ((result = usable(s)) != OK) {}
        else if (s->capture) result = CAPTURE_UNSUPPORTED;
        else {
            s->capture = calloc(1, sizeof *s->capture);
            s->capture->alive = s->capture->references = 1;
            s->is_origin = 1;
            s->capturing_thread = pthread_self();
            live_graphs++;
        }
    }
    LEAVE;
}
CUresult cuStreamEndCapture(Stream *s, Graph **out) {
    ENTER(out) {
        if ((result = usable(s)) == OK && (!s->capture || !s->is_origin)) result = CAPTURE_INVALIDATED;
        if (result == OK) {
            Graph *graph = s->capture;
            for (int i = 0; i < MAX_STREAMS; i++)
                if (slots[i] && slots[i]->capture == graph) slots[i]->capture = NULL;
            s->is_origin = 0;
            *out = graph;
            if (graph->invalid) {
                result = CAPTURE_INVALIDATED, *out = NULL;
                live_graphs--;
                graph_unreference(graph);
            }
        }
    }
    LEAVE;
}
CUresult cuGraphInstantiateWithFlags(Graph **out, Graph *source, unsigned long long flags) {
    (void)flags;
    ENTER(out && source && source->alive) {
        Graph *graph = calloc(1, sizeof *graph);
        graph->is_exec = graph->alive = graph->references = 1;
        for (Operation *o = source->first; o; o = o->next) {
            Operation *copy = malloc(sizeof *copy);
            *copy = *o;
            copy->next = NULL;
            append(&graph->first, &graph->last, copy);
        }
        live_graphs++;
        *out = graph;
    }
    LEAVE;
}
CUresult cuGraphLaunch(Graph *graph, Stream *s) {
    ENTER(graph && graph->alive && graph->is_exec) {
        if ((result = usable(s)) == OK) {
            Operation *o = operation(GRAPH);
            o->graph = graph;
            graph->references++;
            submit(s, o);
        }
    }
    LEAVE;
}
static CUresult destroy_graph(Graph *graph) {
    graph->alive = 0;
    live_graphs--;
    graph_unreference(graph);
    return OK;
}
CUresult cuGraphExecDestroy(Graph *graph) {
    ENTER(graph && graph->alive) result = destroy_graph(graph);
    LEAVE;
}
CUresult cuGraphDestroy(Graph *graph) {
    ENTER(graph && graph->alive) result = destroy_graph(graph);
    LEAVE;
}

/* ---- allocation ----------------------------------------------------------------------------------------------- */

static CUresult allocate(CUdeviceptr *out, size_t size) {
    if (memory_used[current_device] + (long long)size > memory_size) return OUT_OF_MEMORY;
    int fd = memfd_create("cuda_stub", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)size)) return OUT_OF_MEMORY;
    uint8_t *bytes = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (bytes == MAP_FAILED) return OUT_OF_MEMORY;
    memset(bytes, RUBBISH, size < 1 << 20 ? size : 1 << 20);
    Memory *m = remember(DEVICE, reserve_addresses(size), size, bytes, fd);
    memory_used[current_device] += (long long)size;
    *out = m->address;
    return OK;
}
CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t size) {
    ENTER(out && size) result = allocate(out, size);
    LEAVE;
}
static void check_idle(const Memory *m) {
    if (m->pending) violation("%zu bytes of %s memory were freed while %d operations on them were pending", m->size,
                              m->kind == DEVICE || m->kind == IMPORTED ? "device" : "host", m->pending);
}
/* What is still pending shall find the memory freed, and not crash the test. */
static void unmap(Memory *m) {
    if (!m->pending) munmap(m->bytes, m->size);
    if (m->fd >= 0) close(m->fd);
}
CUresult cuMemFree_v2(CUdeviceptr address) {
    ENTER(1) {
        Memory *m = find(address, 1);
        if (!m || m->kind != DEVICE || m->address != address || !m->alive) {
            violation("an address was freed that is not allocated");
            result = INVALID_VALUE;
        } else {
            check_idle(m);
            memory_used[m->device] -= (long long)m->size;
            unmap(m);
            forget(m);
        }
    }
    LEAVE;
}
CUresult cuMemHostAlloc(void **out, size_t size, unsigned flags) {
    (void)flags;
    ENTER(out && size) {
        void *bytes = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (bytes == MAP_FAILED) result = OUT_OF_MEMORY;
        else remember(PINNED, (uint64_t)(uintptr_t)bytes, size, bytes, -1), *out = bytes;
    }
    LEAVE;
}
static Memory *host_memory(void *address, MemoryKind kind) {
    Memory *m = find((uint64_t)(uintptr_t)address, 0);
    return m && m->kind == kind && m->bytes == address ? m : NULL;
}
CUresult cuMemFreeHost(void *address) {
    ENTER(address) {
        Memory *m = host_memory(address, PINNED);
        if (!m) {
            violation("host memory was freed that is not allocated");
            result = INVALID_VALUE;
        } else {
            check_idle(m);
            unmap(m);
            forget(m);
        }
    }
    LEAVE;
}
CUresult cuMemHostRegister_v2(void *address, size_t size, unsigned flags) {
    (void)flags;
    ENTER(address && size) {
        if (find((uint64_t)(uintptr_t)address, 0)) result = ALREADY_REGISTERED;
        else remember(REGISTERED, (uint64_t)(uintptr_t)address, size, address, -1);
    }
    LEAVE;
}
CUresult cuMemHostUnregister(void *address) {
    ENTER(address) {
        Memory *m = host_memory(address, REGISTERED);
        if (!m) result = NOT_REGISTERED;
        else check_idle(m), forget(m);
    }
    LEAVE;
}
CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    ENTER(base && size) {
        Memory *m = find(address, 1);
        if (!m || !m->alive) result = INVALID_VALUE;
        else *base = m->address, *size = m->size;
    }
    LEAVE;
}
CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    ENTER(free_bytes && total) {
        *total = (size_t)memory_size;
        *free_bytes = (size_t)(memory_size - memory_used[current_device]);
    }
    LEAVE;
}

/* ---- sharing between processes: the memory is a file of its owner, opened through /proc ------------------------- */

typedef struct { uint32_t magic; int pid, fd, device; uint64_t size; } Exported;
enum { MAGIC = 0x43554442 };

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    ENTER(handle) {
        Memory *m = find(address, 1);
        if (!m || !m->alive || m->kind != DEVICE) {
            result = INVALID_VALUE;
        } else {
            Exported e = {MAGIC, getpid(), m->fd, m->device, m->size};
            memset(handle, 0, sizeof *handle);
            memcpy(handle, &e, sizeof e);
        }
    }
    LEAVE;
}
static CUresult import(CUdeviceptr *out, const CUipcMemHandle *handle) {
    Exported e;
    char path[64];
    memcpy(&e, handle, sizeof e);
    if (e.magic != MAGIC || e.device != current_device) return INVALID_VALUE;
    if (e.pid == getpid()) return INVALID_CONTEXT;
    for (Memory *m = memories; m; m = m->next)
        if (m->alive && m->kind == IMPORTED && !memcmp(&m->handle, handle, sizeof *handle)) {
            m->opened++;
            *out = m->address;
            return OK;
        }
    snprintf(path, sizeof path, "/proc/%d/fd/%d", e.pid, e.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return INVALID_VALUE;
    uint8_t *bytes = mmap(NULL, e.size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (bytes == MAP_FAILED) return INVALID_VALUE;
    Memory *m = remember(IMPORTED, reserve_addresses(e.size), e.size, bytes, fd);
    m->handle = *handle, m->opened = 1;
    *out = m->address;
    return OK;
}
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *out, CUipcMemHandle handle, unsigned flags) {
    ENTER(out && flags == 1) result = import(out, &handle);
    LEAVE;
}
CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    ENTER(1) {
        Memory *m = find(address, 1);
        if (!m || m->kind != IMPORTED || !m->alive || m->address != address) {
            violation("an imported address was closed that is not open");
            result = INVALID_VALUE;
        } else if (--m->opened == 0) {
            check_idle(m);
            unmap(m);
            forget(m);
        }
    }
    LEAVE;
}

/* ---- devices and contexts --------------------------------------------------------------------------------------- */

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

CUresult cuInit(unsigned flags) {
    pthread_mutex_lock(&guard);
    initialized = 1;
    CUresult result = enter(__func__);
    if (result == OK && flags) result = INVALID_VALUE;
    if (result == OK && devices == 0) result = NO_DEVICE;
    initialized = result == OK;
    LEAVE;
}

#define SIMPLE(check, action) \
    pthread_mutex_lock(&guard); \
    CUresult result = enter(__func__); \
    if (result == OK && !(check)) result = INVALID_VALUE; \
    if (result == OK) { action; } \
    LEAVE

CUresult cuDriverGetVersion(int *version) { SIMPLE(version, *version = 13000); }
CUresult cuDeviceGetCount(int *count) { SIMPLE(count, *count = devices); }
CUresult cuDeviceGet(int *device, int ordinal) {
    SIMPLE(device, if (ordinal < 0 || ordinal >= devices) result = INVALID_DEVICE; else *device = ordinal);
}
CUresult cuDeviceGetName(char *name, int room, int device) {
    SIMPLE(name && device < devices, snprintf(name, (size_t)room, "stub device %d", device));
}
CUresult cuDeviceGetUuid_v2(char *uuid, int device) {
    SIMPLE(uuid && device < devices, for (int i = 0; i < 16; i++) uuid[i] = (char)(i == 15 ? device : i));
}
CUresult cuDeviceTotalMem_v2(size_t *size, int device) {
    SIMPLE(size && device < devices, *size = (size_t)memory_size);
}
CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
    SIMPLE(value && device < devices,
           *value = attribute == 75 ? 9 : attribute == 16 ? 132 : attribute == 40 ? 3 : attribute == 134 ? 0 : 0);
}
CUresult cuDeviceGetPCIBusId(char *text, int room, int device) {
    SIMPLE(text && device < devices, snprintf(text, (size_t)room, "0000:%02x:00.0", device + 1));
}
CUresult cuDevicePrimaryCtxRetain(void **context, int device) {
    SIMPLE(context && device >= 0 && device < devices, retained[device]++; *context = &retained[device]);
}
CUresult cuDevicePrimaryCtxRelease_v2(int device) {
    SIMPLE(device >= 0 && device < devices,
           if (retained[device] == 0) result = INVALID_CONTEXT; else retained[device]--);
}
CUresult cuCtxSetCurrent(void *context) {
    SIMPLE(1, current_device = context ? (int)((int *)context - retained) : -1);
}
CUresult cuCtxGetCurrent(void **context) {
    SIMPLE(context, *context = current_device < 0 ? NULL : &retained[current_device]);
}
CUresult cuCtxSynchronize(void) {
    ENTER(1) {
        for (int i = 0; i < MAX_STREAMS; i++)
            if (slots[i] && slots[i]->device == current_device) {
                wait_for(slots[i], slots[i]->submitted);
                if (slots[i]) join_clock(&host_clock, &slots[i]->clock);
            }
        result = sticky[current_device];
    }
    LEAVE;
}
CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    ENTER(least && greatest) *least = 0, *greatest = -5;
    LEAVE;
}
CUresult cuGetErrorName(CUresult error, const char **text) {
    static const struct { int code; const char *name; } names[] = {
        {OK, "CUDA_SUCCESS"}, {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
        {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"}, {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
        {NO_DEVICE, "CUDA_ERROR_NO_DEVICE"}, {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
        {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"}, {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},
        {NOT_READY, "CUDA_ERROR_NOT_READY"}, {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
        {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
        {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
        {719, "CUDA_ERROR_LAUNCH_FAILED"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].code == error) { *text = names[i].name; return OK; }
    *text = NULL;
    return INVALID_VALUE;
}
CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error == OUT_OF_MEMORY ? "out of memory" : error == NO_DEVICE ? "no CUDA-capable device is detected"
            : error == ILLEGAL_ADDRESS ? "an illegal memory access was encountered" : "said by the stub driver";
    return OK;
}

/* ---- for tests ---------------------------------------------------------------------------------------------------- */

void stub_set(const char *name, long long value) {
    pthread_mutex_lock(&guard);
    set_option(name, value);
    pthread_mutex_unlock(&guard);
}
/* The call number `after` (0: the next one) of a function returns `code`. */
void stub_fail(const char *function, long long after, int code) {
    pthread_mutex_lock(&guard);
    for (int i = 0; i < MAX_FAULTS; i++)
        if (!faults[i].code) {
            snprintf(faults[i].name, sizeof faults[i].name, "%s", function);
            faults[i].after = after, faults[i].code = code;
            break;
        }
    pthread_mutex_unlock(&guard);
}
/* From now on the device fails with a sticky error; 0 cures it, which no real one does. */
void stub_break(int device, int code) {
    pthread_mutex_lock(&guard);
    sticky[device] = code;
    pthread_cond_broadcast(&changed);
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
                           m->kind == DEVICE ? "device" : m->kind == IMPORTED ? "imported" :
                           m->kind == PINNED ? "page-locked" : "registered");
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
