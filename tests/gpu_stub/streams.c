/* Streams, each of which is a thread, and events, which order them by vector clocks. */

#include "cuda_stub.h"

Stream *slots[MAX_STREAMS];
Clock host_clock;
int live_events;
static uint32_t ticks[MAX_STREAMS];     /* never restart, also when a slot gets a new stream */

void join_clock(Clock *into, const Clock *from) {
    for (int i = 0; i < MAX_STREAMS; i++)
        if (from->tick[i] > into->tick[i]) into->tick[i] = from->tick[i];
}

void event_unreference(Event *event) {
    if (--event->references == 0) free(event);
}

static void run_first(Stream *s) {
    Operation *o = s->first;
    s->runs = 1;
    run_operation(o, s->device);
    s->runs = 0;
    s->first = o->next;
    if (!s->first) s->last = NULL;
    count_pending(o, -1);
    s->executed++;
    if (o->event) event_unreference(o->event);
    if (o->graph) graph_unreference(o->graph);
    free(o);
    pthread_cond_broadcast(&changed);
}

static void end_stream(Stream *s) {
    slots[s->slot] = NULL;
    free(s);
}

static void *stream_thread(void *argument) {
    Stream *s = argument;
    pthread_mutex_lock(&guard);
    for (;;) {
        while (!s->first && s->alive) pthread_cond_wait(&changed, &guard);
        if (!s->first) break;
        run_first(s);
    }
    end_stream(s);
    pthread_mutex_unlock(&guard);
    return NULL;
}

/* Whether the first operation of a stream without a thread could run now. */
static int can_run(const Stream *s) {
    const Operation *o = s->first;
    if (!o || s->runs || (held[o->kind] && !sticky[s->device])) return 0;
    return o->kind != WAIT || o->event->reached >= o->ticket || sticky[s->device];
}

/* Of streams without threads: those whose first operation could run now. */
static int runnable(Stream **found) {
    int count = 0;
    for (int i = 0; i < MAX_STREAMS; i++)
        if (slots[i] && can_run(slots[i])) found[count++] = slots[i];
    return count;
}

/* How many streams could go on. */
int stub_ready(void) {
    Stream *found[MAX_STREAMS];
    pthread_mutex_lock(&guard);
    int count = runnable(found);
    pthread_mutex_unlock(&guard);
    return count;
}

/* One of them, `which` of those that could, goes on by one operation; false: none could. */
static int step(int which) {
    Stream *found[MAX_STREAMS];
    int count = runnable(found);
    if (!count) return 0;
    Stream *s = found[which % count];
    run_first(s);
    if (!s->first && !s->alive) end_stream(s);
    return 1;
}
void stub_step(int which) {
    pthread_mutex_lock(&guard);
    step(which);
    pthread_mutex_unlock(&guard);
}
/* Until something has changed. */
static void await_change(void) {
    if (threads || !runs_all || !step(0)) pthread_cond_wait(&changed, &guard);
}

CUresult usable(const Stream *s) {
    if (!s) { violation("the default stream was used"); return INVALID_HANDLE; }
    for (int i = 0; i < MAX_STREAMS; i++)
        if (slots[i] == s && s->alive) {
            if (s->device == current_device) return OK;
            violation("stream %d of device %d was used while device %d is current", i, s->device, current_device);
            return INVALID_CONTEXT;
        }
    return INVALID_HANDLE;
}

void submit(Stream *s, Operation *o) {
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

void wait_for(Stream *s, uint64_t operations) {
    while (s->executed < operations && !sticky[s->device]) {
        if (!threads && can_run(s)) run_first(s);
        else await_change();
    }
}

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
            if (threads) {
                pthread_create(&s->thread, NULL, stream_thread, s);
                pthread_detach(s->thread);
            }
        }
    }
    LEAVE;
}
CUresult cuStreamDestroy_v2(Stream *s) {
    ENTER(1) {
        if ((result = usable(s)) == OK) {
            s->alive = 0;
            if (!threads && !s->first) end_stream(s);
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
    (void)flags;
    ENTER(out) {
        Event *event = calloc(1, sizeof *event);
        event->alive = 1, event->device = current_device, event->references = 1;
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
        while (event->reached < ticket && !sticky[event->device]) await_change();
        result = sticky[event->device];
        if (result == OK) join_clock(&host_clock, &clock);
        event_unreference(event);
    }
    LEAVE;
}
