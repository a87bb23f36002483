/* A CUDA driver without a GPU, for tests: the functions that `_native/cuda/driver.pxd` and the Python
 * backend's `worker/device.py` name, what `inferd_client.utils.cuda_shared_memory` needs, and nothing else.
 *
 * It keeps the driver's promises and none that the driver does not make:
 *   - each stream is a thread; a copy happens when it runs, after a delay that the test chooses, not when submitted;
 *   - the target of a copy to the host is scribbled over until the copy has run;
 *   - device addresses cannot be read by the CPU; fresh device memory holds rubbish; freed addresses never come back;
 *   - copies from and to pageable memory make the caller wait, as the driver may;
 *   - after a sticky error every call fails and nothing runs any more;
 *   - a process cannot open its own memory handles.
 * What frameworks launch can be faked, too (stub_kernel): a function that computes on the CPU when the stream comes to it.
 *
 * And it looks for what goes wrong rarely on a GPU, and reports it (stub_report):
 *   - a source or target in host memory that changes between the submission of a copy and the copy;
 *   - accesses of two streams to the same bytes, one of them a write, that no event orders (vector clocks, so that the
 *     report depends on what was submitted and not on who was quicker);
 *   - memory freed while work on it is pending, work on freed memory, copies beyond an allocation;
 *   - memory freed while a graph that can be launched uses it;
 *   - bytes of the device that are copied or read by a kernel, and that nobody has written since they were allocated;
 *   - a call that may wait for the device on a thread that says it is an event loop (stub_loop), and another context
 *     current there at the end than at the beginning;
 *   - the default stream; a stream used with another device's context current;
 *   - what is still alive at the end.
 *
 * Settings, from the environment variable CUDA_STUB ("devices=2,memory=1073741824,copy_us=50") or stub_set():
 *   devices, nodes (of the host's memory that are near to devices, one after the other; 0: the driver does not say),
 *   memory (bytes of each device), full (no device has memory left), copy_us (delay of a copy), d2d_us (of copies on the device),
 *   threads (0: streams have none; what they are given runs when stub_step says so, one operation at a time, or when
 *   somebody waits for it), reopens (a process may open the handles that it made itself).
 * With CUDA_STUB_REPORT=<file> the report is written there when the process ends.
 *
 * One lock guards everything but the copying itself. */

#ifndef CUDA_STUB_H
#define CUDA_STUB_H

#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult;
typedef unsigned long long CUdeviceptr;
typedef struct { char reserved[64]; } CUipcMemHandle;

enum {
    IGNORED = -1,  /* a fault: the call does nothing and says OK, as if its caller had forgotten it */
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_READY = 600, ILLEGAL_ADDRESS = 700,
    CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901,
};
enum { MAX_DEVICES = 8, MAX_STREAMS = 128, MAX_FAULTS = 16, MAX_COUNTED = 64, REPORT_LINES = 64,
       MAX_ARGUMENTS = 16 };
enum { RUBBISH = 0xDB, SCRIBBLE = 0xEE };

typedef struct { uint32_t tick[MAX_STREAMS]; } Clock;

typedef struct Access {
    size_t offset, size;
    int write, slot;
    uint32_t tick;
    struct Access *next;
} Access;

typedef enum { DEVICE, PINNED, IMPORTED } MemoryKind;

typedef struct Memory {
    MemoryKind kind;
    uint64_t address;       /* what the caller sees */
    size_t size;
    uint8_t *bytes;         /* where it really lies */
    uint8_t *written;       /* of each byte: whether somebody has; NULL: not known, others may write it */
    int fd, device, alive, pending, opened;
    CUipcMemHandle handle;  /* of an imported one */
    Access *accesses;
    struct Memory *next;
} Memory;

typedef struct Graph Graph;

typedef struct Event {
    int alive, device, references;
    uint64_t recorded, reached;
    Clock clock;
    Graph *captured_in;
} Event;

typedef enum { COPY_IN, COPY_OUT, COPY_DEVICE, FILL, RECORD, WAIT, GRAPH, KERNEL, KINDS } Kind;

/* Bytes of the device that a kernel reads or writes. */
typedef struct { uint64_t address, size, writes; } Argument;
typedef struct { Memory *memory; Argument of; } Touched;

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
    Touched touched[MAX_ARGUMENTS];      /* by a kernel */
    int touched_count;
    Clock clock;                         /* of its stream when it was submitted */
    struct Operation *next;
} Operation;

struct Graph {
    int is_exec, alive, invalid, references;
    Operation *first, *last;
    Graph *next;                         /* of those alive */
};

typedef struct Stream {
    int alive, device, slot, priority;
    uint64_t submitted, executed;
    Operation *first, *last;
    Clock clock;
    Graph *capture;
    int is_origin, runs;                 /* its first operation runs */
    pthread_t capturing_thread, thread;
} Stream;

/* Of the stub itself: whoever loads it shall not see these, nor put its own in their place. */
#pragma GCC visibility push(hidden)

/* control.c: settings, faults, reports; all state is guarded by `guard`, and `changed` tells of every change */
extern pthread_mutex_t guard;
extern pthread_cond_t changed;
extern int initialized, devices, nodes, is_full, threads, reopens, retained[MAX_DEVICES], sticky[MAX_DEVICES];
extern long long memory_size, memory_used[MAX_DEVICES], copy_us, d2d_us;
extern int held[KINDS];
extern uint64_t executed[KINDS];
extern const char *const kind_names[KINDS];
extern _Thread_local int current_device, is_loop, runs_all;
void violation(const char *format, ...);
CUresult enter(const char *name);

/* memory.c */
extern Memory *memories;
Memory *find(uint64_t address, int device_side);
Memory *remember(MemoryKind kind, uint64_t address, size_t size, uint8_t *bytes, int fd);
void forget(Memory *m);
uint64_t reserve_addresses(size_t size);
void touch(Memory *m, uint64_t address, size_t size, int write, const Stream *stream, const Clock *clock);
int within(const Memory *m, uint64_t address, size_t size);
uint8_t *bytes_of(const Memory *m, uint64_t address);
uint64_t checksum(const uint8_t *bytes, size_t size);
void check_idle(const Memory *m);
void unmap(Memory *m);
void mark_written(Memory *m, uint64_t address, size_t size);
void check_written(const Memory *m, uint64_t address, size_t size, const char *reader);

/* streams.c */
extern Stream *slots[MAX_STREAMS];
extern Clock host_clock;
extern int live_events;
void join_clock(Clock *into, const Clock *from);
CUresult usable(const Stream *s);
void submit(Stream *s, Operation *o);
void wait_for(Stream *s, uint64_t operations);
void event_unreference(Event *event);

/* operations.c: what streams run */
Operation *operation(Kind kind);
void append(Operation **first, Operation **last, Operation *o);
void run_operation(Operation *o, int device);
void count_pending(Operation *o, int by);
void note_accesses(const Operation *o, const Stream *s);

/* graphs.c */
extern int live_graphs;
extern Graph *graphs;
void graph_unreference(Graph *graph);

#pragma GCC visibility pop

#define ENTER(check) \
    pthread_mutex_lock(&guard); \
    CUresult result = enter(__func__); \
    if (result == OK && !(check)) result = INVALID_VALUE; \
    if (result == OK && (current_device < 0 || !retained[current_device])) result = INVALID_CONTEXT; \
    if (result == OK)
#define LEAVE \
    pthread_mutex_unlock(&guard); \
    return result == IGNORED ? OK : result
#define SIMPLE(check, action) \
    pthread_mutex_lock(&guard); \
    CUresult result = enter(__func__); \
    if (result == OK && !(check)) result = INVALID_VALUE; \
    if (result == OK) { action; } \
    LEAVE

#endif
