/* Operations: copies and calls of functions, from their submission until they have run. */

#include "cuda_stub.h"

#include <unistd.h>

Operation *operation(Kind kind) {
    Operation *o = calloc(1, sizeof *o);
    o->kind = kind;
    return o;
}

void note_accesses(const Operation *o, const Stream *s) {
    if (o->to_memory) touch(o->to_memory, o->to, o->size, 1, s, &s->clock);
    if (o->source_memory) touch(o->source_memory, o->source, o->size, 0, s, &s->clock);
    for (int i = 0; i < o->touched_count; i++) {
        const Argument *of = &o->touched[i].of;
        touch(o->touched[i].memory, of->address, of->size, of->writes != 0, s, &s->clock);
    }
    if (o->kind == GRAPH)
        for (Operation *inner = o->graph->first; inner; inner = inner->next) note_accesses(inner, s);
}

void append(Operation **first, Operation **last, Operation *o) {
    if (*first) (*last)->next = o;
    else *first = o;
    *last = o;
}

static int is_copy(Kind kind) { return kind == COPY_IN || kind == COPY_OUT || kind == COPY_DEVICE || kind == FILL; }

/* Runs a copy with the lock held on entry and exit; a stream with a thread lets go of it while bytes move. */
static void run_copy(Operation *o, int device) {
    if ((o->to_memory && !within(o->to_memory, o->to, o->size)) ||
        (o->source_memory && !within(o->source_memory, o->source, o->size))) {
        violation("a %s copy of %zu bytes ran on memory that was freed", kind_names[o->kind], o->size);
        sticky[device] = ILLEGAL_ADDRESS;
        return;
    }
    if (o->source_memory) check_written(o->source_memory, o->source, o->size, kind_names[o->kind]);
    if (o->to_memory) mark_written(o->to_memory, o->to, o->size);
    uint8_t *to = bytes_of(o->to_memory, o->to);
    uint8_t *source = o->kind == FILL ? NULL : bytes_of(o->source_memory, o->source);
    long long delay = o->kind == COPY_DEVICE ? d2d_us : copy_us;
    if (threads) pthread_mutex_unlock(&guard);
    if (delay) usleep((useconds_t)delay);
    int intact = !o->checked || o->checksum == checksum(o->kind == COPY_IN ? source : to, o->size);
    if (o->kind == FILL) memset(to, o->value, o->size);
    else memmove(to, source, o->size);
    if (threads) pthread_mutex_lock(&guard);
    if (!intact)
        violation("the host memory of a %s copy of %zu bytes was written before the copy ran", kind_names[o->kind],
                  o->size);
}

void run_operation(Operation *o, int device) {
    while (held[o->kind] && !sticky[device]) pthread_cond_wait(&changed, &guard);
    if (o->kind == WAIT)
        while (o->event->reached < o->ticket && !sticky[device]) pthread_cond_wait(&changed, &guard);
    if (sticky[device]) return;
    if (is_copy(o->kind)) {
        run_copy(o, device);
    } else if (o->kind == KERNEL) {
        for (int i = 0; i < o->touched_count; i++)
            if (!within(o->touched[i].memory, o->touched[i].of.address, o->touched[i].of.size)) {
                violation("a kernel ran on memory that was freed");
                sticky[device] = ILLEGAL_ADDRESS;
                return;
            } else if (!o->touched[i].of.writes) {
                check_written(o->touched[i].memory, o->touched[i].of.address, o->touched[i].of.size, "kernel");
            }
        pthread_mutex_unlock(&guard);
        o->function(o->argument);
        pthread_mutex_lock(&guard);
        for (int i = 0; i < o->touched_count; i++)
            if (o->touched[i].of.writes)
                mark_written(o->touched[i].memory, o->touched[i].of.address, o->touched[i].of.size);
    } else if (o->kind == RECORD) {
        if (o->ticket > o->event->reached) o->event->reached = o->ticket;
    } else if (o->kind == GRAPH) {
        for (Operation *inner = o->graph->first; inner; inner = inner->next) run_operation(inner, device);
    }
    executed[o->kind]++;
    pthread_cond_broadcast(&changed);
}

void count_pending(Operation *o, int by) {
    if (o->to_memory) o->to_memory->pending += by;
    if (o->source_memory) o->source_memory->pending += by;
    for (int i = 0; i < o->touched_count; i++) o->touched[i].memory->pending += by;
    if (o->kind == GRAPH)
        for (Operation *inner = o->graph->first; inner; inner = inner->next) count_pending(inner, by);
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
        if (is_loop) violation("the loop copies %zu bytes of pageable memory, which waits for the device", size);
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
/* On the default stream, which waits for none of the others: all of them were made that way. */
CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr source, size_t size) {
    ENTER(to) {
        Memory *m = find(source, 1);
        if (!within(m, source, size)) {
            result = INVALID_VALUE;
        } else {
            if (m->pending) violation("%zu bytes were copied to the host while operations on them were pending", size);
            memcpy(to, bytes_of(m, source), size);
            executed[COPY_OUT]++;
        }
    }
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
