/* The world of a simulation: threads that run one at a time, as a seed says, in virtual time.

The extension modules are the ones that are shipped, and the driver without a GPU that tests have. What they ask of libc
to wait, to wake and to read the clock goes through their tables of imported functions, and `world_hook` puts the
functions below into these tables. So the same code runs in both worlds, without a branch for this one.

One thread is the main one: it plays the clients, the event loop and the operator. Others join when they first take a
mutex after having named themselves (`prepare_thread` in _native/threads.pxd), and wait there until the main thread lets
them run (`world_run`); then exactly one thread runs until it waits, sleeps, is preempted or leaves. Preemption happens
before a mutex is taken and when one is given back, and before what a thread asks of a descriptor, while the thread
holds no mutex and does not hold the GIL. The front's lock (_native/front.pyx) is held for long, so that who holds it can
be preempted, too; before it is taken, a thread with the GIL lets go of that, as it does where the lock is not free.

Sockets are the world's (`struct wire`): their buffers have bounds, what is read and written at a time is as the seed
says, and the other ends belong to the simulation. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <malloc.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <linux/sockios.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define NEVER INT64_MAX
#define THREADS 512
#define TIMERS 64
#define SPINS 50 /* waits in a row for a time that has passed, which none may make */
#define HELD 4096
#define LINE 64
#define SMALL 96  /* bytes of an object that is no message with a tensor */
#define OBJECTS 2 /* PYMEM_DOMAIN_OBJ */
#define PAGE 4096
#define MAPPINGS 0x100000000000 /* from here to there nothing else is mapped */
#define MAPPINGS_END 0x500000000000
#define READY 64              /* descriptors that one look finds, at most */
#define MICROSECOND 1000
#define KEPT (256 << 20)
#define TAKEN (1 << 18) /* twice as many blocks as extension modules have at a time */
#define TOLD 6          /* of these, in a text */
#define NONSENSE 0xdb   /* bytes of memory that was given back: addresses of these are nobody's */
#define FILLED (64 << 10) /* bytes that are filled, at most */
#define ASIDE 4096      /* blocks that were given back and that nobody takes yet */
#define ASIDE_BYTES (16 << 20) /* bytes of these */
#define BROADS (1 << 16)
#define BROAD 1024      /* bytes of an object of Python that may be a part of the server itself */
#define WIRES 512       /* sockets */
#define FDS 4096
#define WATCHES 256     /* descriptors that threads wait for by epoll */
#define LATE_NS 200000  /* that the I/O thread runs late */
#define SLOW_PERMILLE 100 /* reads and writes of sockets that take time, beside other threads */
#define SLOW_NS 100000    /* and how long, at most */
#define PARTS 16          /* of these reads and writes, which are looked at */
#define MARKED 32         /* and bytes of each */
#define IO "inferd-io"  /* how its name begins */

enum state { FREE, RUNNABLE, WAITING, GONE };

struct member {
    sem_t turn;
    enum state state;
    pthread_cond_t *on;  /* WAITING for it; NULL: for time or descriptors alone */
    int64_t wake_ns;
    int held;            /* mutexes */
    int fronts;          /* the front's mutexes */
    int poll_fd;         /* WAITING for this epoll; -1: for none */
    int looked;          /* at the clock, since it read a socket */
    void *last;          /* that it has read */
    int64_t busy_ns;     /* since when it has had something to do */
    int leaving;         /* has done everything; the interpreter still lets go of what was the thread's */
    int late;            /* waits in a row for a time that has passed */
    char name[16];
};

struct timer {
    int fd;
    int64_t due_ns;
};

static struct member members[THREADS];
static int newcomers[THREADS], joined, alive;
static int order[THREADS], order_count;      /* of those that have been let in */
static int polling;                          /* members that wait for descriptors */
static int polled = -1, watched = -1;        /* epoll: what these wait for, and what the main thread looks at */
static struct timer timers[TIMERS];
static int timer_count;
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t someone_joined = PTHREAD_COND_INITIALIZER;
static sem_t main_turn;
static int64_t now;
static uint64_t seed_state = 1, story = 14695981039346656037u;
static int preempt_permille, spurious_permille, fail_ppm, fail_at, fail_count;
static uint64_t switches, failed_takes;
static pthread_key_t leaver;
static int main_held, main_fronts, main_may_fail, problem_count;
static pthread_mutex_t *front[2];   /* its mutexes: those that are tried */
static int one_at_a_time;           /* an epoll reports one descriptor at a time */
static int has_news;                /* for peers */
static int copying;                 /* threads that are in a system call which takes time */
static int io_ran;                  /* since the main thread asked */
static int64_t late_ns = -1;        /* when the I/O thread ran late last */
static char problem[1024];
static pthread_t main_thread;
static int (*gpu_ready)(void);
static int ticks, worker_fd, loop_ready, tasks_ready; /* of world_step */

static uintptr_t next_mapping = MAPPINGS;
static pthread_mutex_t *held[HELD]; /* by threads of the world and by the main one */
static int held_count;

static __thread struct member *self;
static __thread int named;
static __thread int stays_out; /* for now it joins no world, whatever it does */
static __thread char own_name[16];

static int (*holds_gil)(void);
static void *(*save_thread)(void);
static void (*restore_thread)(void *);
static pthread_cond_t *main_on; /* that the main thread waits for */

static uint64_t draw(void) {
    seed_state ^= seed_state << 13;
    seed_state ^= seed_state >> 7;
    seed_state ^= seed_state << 17;
    return seed_state * 2685821657736338717u;
}

static int chance(int permille) { return permille && (int)((draw() >> 33) % 1000) < permille; }

static void note(uint64_t what) { story = (story ^ what) * 1099511628211u; }

static void complain(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    if (problem_count++ == 0) vsnprintf(problem, sizeof problem, format, arguments);
    va_end(arguments);
}

static int is_main(void) { return pthread_equal(pthread_self(), main_thread); }

/* ------------------------------------------------------------------------------------------------------------------ */
/* Turns */

static void await_turn(struct member *member) {
    while (sem_wait(&member->turn) != 0) {}
}

/* the main thread goes on; returns when it lets this one run again */
static void yield_turn(void) {
    sem_post(&main_turn);
    await_turn(self);
}

static void join_world(void) {
    int place;
    pthread_mutex_lock(&guard);
    for (place = 0; place < THREADS && members[place].state != FREE; place++) {}
    if (place == THREADS) abort();
    self = &members[place];
    memset(self, 0, sizeof *self);
    sem_init(&self->turn, 0, 0);
    self->state = RUNNABLE;
    self->wake_ns = NEVER;
    self->poll_fd = -1;
    self->busy_ns = now;
    memcpy(self->name, own_name, sizeof own_name);
    newcomers[joined++] = place;
    pthread_cond_signal(&someone_joined);
    pthread_mutex_unlock(&guard);
    await_turn(self);
}

/* whether this thread has to be of the world, for what it is about to do */
static int joins(void) { return self == NULL && named && !stays_out && !holds_gil(); }

static int is_io(const struct member *member) { return strncmp(member->name, IO, sizeof IO - 1) == 0; }

static void can_go_on(struct member *member) {
    if (member->state != WAITING) return;
    member->state = RUNNABLE;
    member->busy_ns = now;
}

static void run(struct member *member) {
    switches++;
    if (is_io(member)) {
        io_ran = 1;
        if (now - member->busy_ns > LATE_NS) late_ns = now;
    }
    note((uint64_t)(unsigned char)member->name[0] * 31 + (uint64_t)now);
    sem_post(&member->turn);
    while (sem_wait(&main_turn) != 0) {}
}

/* All that threads and the main one say to each other through descriptors they say within this process. */
static void look_at_descriptors(void) {
    struct epoll_event found[READY];
    int count = epoll_wait(polled, found, READY, 0), i;
    for (i = 0; i < count; i++)
        can_go_on(&members[found[i].data.u32]);
}

/* Have these descriptors of a member be looked at, or no more. */
static void set_polled(int place, const struct pollfd *fds, nfds_t count, int operation) {
    struct epoll_event event = {.data.u32 = (uint32_t)place};
    nfds_t i;
    for (i = 0; i < count; i++) {
        if (fds[i].fd < 0) continue;
        event.events = (uint32_t)fds[i].events;
        if (epoll_ctl(polled, operation, fds[i].fd, &event) != 0 && operation == EPOLL_CTL_ADD) abort();
    }
}

static int runnable(struct member **found) {
    int count = 0, i;
    if (polling) look_at_descriptors();
    for (i = 0; i < order_count; i++)
        if (members[order[i]].state == RUNNABLE) found[count++] = &members[order[i]];
    return count;
}

static void maybe_yield(void) {
    struct member *found[THREADS];
    int count;
    if (self != NULL) {
        if (self->held == 0 && !self->leaving && chance(preempt_permille) && !holds_gil()) yield_turn();
    } else if (is_main() && main_held == 0 && order_count && chance(preempt_permille) && !holds_gil()) {
        count = runnable(found);
        if (count) run(found[draw() % (uint64_t)count]);
    }
}

static void has_ended(void *member) {
    self = NULL;
    named = 0;
    ((struct member *)member)->state = GONE;
    sem_post(&main_turn);
}

/* ------------------------------------------------------------------------------------------------------------------ */
/* In place of libc's */

static int sim_clock_gettime(clockid_t clock, struct timespec *t) {
    int64_t told = clock == CLOCK_REALTIME ? now + 1700000000000000000 : now;
    if (clock != CLOCK_MONOTONIC && clock != CLOCK_REALTIME) return clock_gettime(clock, t);
    if (self != NULL) self->looked = 1;
    t->tv_sec = told / 1000000000;
    t->tv_nsec = told % 1000000000;
    return 0;
}

static int sim_prctl(int option, unsigned long a, unsigned long b, unsigned long c, unsigned long d) {
    if (option == PR_SET_NAME && !is_main()) {
        named = 1;
        snprintf(own_name, sizeof own_name, "%s", (const char *)a);
    }
    return prctl(option, a, b, c, d);
}

static int is_front(const pthread_mutex_t *mutex) { return mutex == front[0] || mutex == front[1]; }

static int *count_of(const pthread_mutex_t *mutex) {
    if (is_front(mutex)) return self != NULL ? &self->fronts : &main_fronts;
    return self != NULL ? &self->held : &main_held;
}

static void has_locked(pthread_mutex_t *mutex) {
    if (held_count == HELD) abort();
    held[held_count++] = mutex;
    ++*count_of(mutex);
}

static void has_unlocked(pthread_mutex_t *mutex) {
    int i;
    for (i = 0; i < held_count && held[i] != mutex; i++) {}
    if (i == held_count) abort();
    held[i] = held[--held_count];
    --*count_of(mutex);
}

static int is_held(const pthread_mutex_t *mutex) {
    int i;
    for (i = 0; i < held_count; i++)
        if (held[i] == mutex) return 1;
    return 0;
}

/* Take it on a thread of the world, or on the main one. If a thread of the world has it, that one must run first. If
   another thread has it, say one that has just left, it lets go of it by itself: when is a matter of real time, and
   nothing that the seed says may depend on it. */
static void take(pthread_mutex_t *mutex) {
    struct member *found[THREADS];
    int count;
    void *python;
    while (is_held(mutex)) {
        if (self != NULL && !self->leaving) {
            python = holds_gil() ? save_thread() : NULL;
            yield_turn();
            if (python != NULL) restore_thread(python);
        } else if (self == NULL && (count = runnable(found))) {
            python = holds_gil() ? save_thread() : NULL; /* the thread may need it before it comes to the mutex */
            run(found[draw() % (uint64_t)count]);
            if (python != NULL) restore_thread(python);
        } else if (is_front(mutex)) {
            complain("the front is never left");
            fprintf(stderr, "simulation: %s\n", problem);
            abort();
        } else {
            break;
        }
    }
    pthread_mutex_lock(mutex);
    has_locked(mutex);
}

/* On a thread that may hold the GIL, and lets go of it meanwhile. */
static void maybe_yield_anyway(void) {
    void *python;
    if (!preempt_permille || (self == NULL && !is_main())) return;
    python = holds_gil() ? save_thread() : NULL;
    maybe_yield();
    if (python != NULL) restore_thread(python);
}

static int sim_trylock(pthread_mutex_t *mutex) {
    int result;
    if (!is_front(mutex)) {
        if (front[0] == NULL) front[0] = mutex;
        else if (front[1] == NULL) front[1] = mutex;
        else abort();
    }
    if (joins()) join_world();
    if (self == NULL && !is_main()) return pthread_mutex_trylock(mutex);
    if ((self != NULL ? self->fronts : main_fronts) == 0) maybe_yield_anyway();
    if (is_held(mutex)) return EBUSY;
    result = pthread_mutex_trylock(mutex);
    if (result == 0) has_locked(mutex);
    return result;
}

static int sim_lock(pthread_mutex_t *mutex) {
    if (joins()) join_world();
    maybe_yield();
    if (self == NULL && !is_main()) return pthread_mutex_lock(mutex);
    take(mutex);
    return 0;
}

static int sim_unlock(pthread_mutex_t *mutex) {
    int result, is_ours = self != NULL || is_main();
    if (is_ours) has_unlocked(mutex);
    result = pthread_mutex_unlock(mutex);
    if (is_ours && !is_front(mutex) && chance(250)) maybe_yield();
    return result;
}

/* The loop's thread, and whoever has the front, waits for nothing but this: until the attendant of a worker has read
   what the worker has said of a request of which it says more (slot_at_rest), which no other thread can hold up. */
static int may_wait(void *caller) {
    Dl_info from;
    return dladdr(caller, &from) && strstr(from.dli_fname, "/backends/python/_done.") != NULL;
}

static int wait_until(pthread_cond_t *condition, pthread_mutex_t *mutex, int64_t due_ns, void *caller) {
    int timed_out;
    if (self->fronts && !may_wait(caller)) complain("thread %s waits on a condition while it has the front", self->name);
    if (holds_gil()) complain("thread %s waits on a condition while it holds the GIL", self->name);
    self->late = due_ns <= now ? self->late + 1 : 0;
    if (self->late == SPINS) complain("thread %s waits again and again for a time that has passed", self->name);
    self->state = WAITING;
    self->on = condition;
    self->wake_ns = due_ns;
    if (self->held != 1 && !may_wait(caller))
        complain("thread %s waits on a condition while it holds %d mutexes", self->name, self->held);
    has_unlocked(mutex);
    pthread_mutex_unlock(mutex);
    yield_turn();
    timed_out = self->on != NULL && now >= due_ns;
    self->on = NULL;
    self->wake_ns = NEVER;
    take(mutex);
    return timed_out ? ETIMEDOUT : 0;
}

static int wait_on_loop(pthread_cond_t *condition, pthread_mutex_t *mutex, void *caller) {
    struct member *found[THREADS];
    int count = 0;
    void *python;
    if (!may_wait(caller)) complain("the loop's thread waits on a condition");
    main_on = condition;
    has_unlocked(mutex);
    pthread_mutex_unlock(mutex);
    python = holds_gil() ? save_thread() : NULL;
    while (problem_count == 0 && main_on != NULL && (count = runnable(found))) run(found[draw() % (uint64_t)count]);
    if (main_on != NULL) {
        complain("the loop's thread waits for what nobody says");
        fprintf(stderr, "simulation: %s\n", problem);
        abort();
    }
    take(mutex);
    if (python != NULL) restore_thread(python);
    return 0;
}

static int sim_wait(pthread_cond_t *condition, pthread_mutex_t *mutex) {
    if (self != NULL) return wait_until(condition, mutex, NEVER, __builtin_return_address(0));
    if (is_main()) return wait_on_loop(condition, mutex, __builtin_return_address(0));
    return pthread_cond_wait(condition, mutex);
}

static int sim_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *t) {
    if (self == NULL) return pthread_cond_timedwait(condition, mutex, t);
    return wait_until(condition, mutex, (int64_t)t->tv_sec * 1000000000 + t->tv_nsec, __builtin_return_address(0));
}

static int notify(pthread_cond_t *condition, int all) {
    int first, i, at;
    if (main_on == condition) {
        main_on = NULL;
        if (!all) return 0;
    }
    if (order_count == 0) return 0;
    /* POSIX does not say whose turn it is; those who are not of the world come in an order that no seed says */
    first = self != NULL || is_main() ? (int)(draw() % (uint64_t)order_count) : 0;
    for (i = 0; i < order_count; i++) {
        at = order[(first + i) % order_count];
        if (members[at].state != WAITING || members[at].on != condition) continue;
        can_go_on(&members[at]);
        members[at].on = NULL;
        if (!all) return 0;
    }
    return 0;
}

static int sim_signal(pthread_cond_t *condition) {
    notify(condition, 0);
    return pthread_cond_signal(condition);
}

static int sim_broadcast(pthread_cond_t *condition) {
    notify(condition, 1);
    return pthread_cond_broadcast(condition);
}

void world_sleep(int64_t ns) {
    if (self == NULL) return;
    if (self->fronts) complain("thread %s sleeps while it has the front", self->name);
    self->state = WAITING;
    self->on = NULL;
    self->wake_ns = now + (ns > 0 ? ns : 0);
    yield_turn();
    self->wake_ns = NEVER;
}

/* On a thread of the world: until somebody notifies those who wait for `key`, or it is `until`; or without a reason. */
void world_wait(void *key, int64_t until) {
    if (self == NULL) abort();
    self->state = WAITING;
    self->on = key;
    self->wake_ns = until;
    yield_turn();
    self->on = NULL;
    self->wake_ns = NEVER;
}

void world_notify(void *key) { notify(key, 1); }

static int sim_clock_nanosleep(clockid_t clock, int flags, const struct timespec *t, struct timespec *left) {
    if (self == NULL) return clock_nanosleep(clock, flags, t, left);
    world_sleep((int64_t)t->tv_sec * 1000000000 + t->tv_nsec);
    return 0;
}

static int sim_ppoll(struct pollfd *fds, nfds_t count, const struct timespec *t, const sigset_t *mask) {
    int64_t due_ns = t == NULL ? NEVER : now + (int64_t)t->tv_sec * 1000000000 + t->tv_nsec;
    int ready;
    if (self == NULL || holds_gil()) return ppoll(fds, count, t, mask);
    while ((ready = poll(fds, count, 0)) == 0 && now < due_ns) {
        if (self->held || self->fronts) complain("thread %s waits for a descriptor while it holds a mutex", self->name);
        self->state = WAITING;
        self->on = NULL;
        self->wake_ns = due_ns;
        set_polled((int)(self - members), fds, count, EPOLL_CTL_ADD);
        polling++;
        yield_turn();
        polling--;
        set_polled((int)(self - members), fds, count, EPOLL_CTL_DEL);
        self->wake_ns = NEVER;
    }
    return ready;
}

static ssize_t sim_recv(int fd, void *data, size_t size, int flags) {
    struct pollfd one = {fd, POLLIN, 0};
    if (self != NULL && !(flags & MSG_DONTWAIT)) sim_ppoll(&one, 1, NULL, NULL);
    return recv(fd, data, size, flags);
}

/* a timer is an eventfd that the world writes to when it is due */
static int sim_timerfd_create(int clock, int flags) {
    (void)clock;
    (void)flags;
    int fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    int i;
    for (i = 0; i < timer_count && timers[i].fd >= 0; i++) {} /* or a closed one */
    if (i == TIMERS) abort();
    if (i == timer_count) timer_count++;
    timers[i].fd = fd;
    timers[i].due_ns = NEVER;
    return fd;
}

static int sim_timerfd_settime(int fd, int flags, const struct itimerspec *t, struct itimerspec *old) {
    int64_t ns = (int64_t)t->it_value.tv_sec * 1000000000 + t->it_value.tv_nsec;
    int i;
    (void)old;
    if (ns && !(flags & TFD_TIMER_ABSTIME)) ns += now;
    for (i = 0; i < timer_count; i++)
        if (timers[i].fd == fd) timers[i].due_ns = ns ? ns : NEVER;
    return 0;
}

/* its number may soon be that of something else, so that only this tells that a timer has gone */
static int sim_close(int fd) {
    int i;
    for (i = 0; i < timer_count; i++)
        if (timers[i].fd == fd) {
            timers[i].fd = -1;
            timers[i].due_ns = NEVER;
        }
    return close(fd);
}

/* ------------------------------------------------------------------------------------------------------------------ */
/* Sockets */

struct queue {
    char *data;
    size_t at, size, room; /* of the bytes, and of the memory */
    size_t limit;
};

enum end { OPEN, CLOSED, BROKEN }; /* BROKEN: the other end will not have what comes, and what it had is lost */

/* A socket of the server, and the peer's end of it. */
static struct wire {
    int used, fd;             /* -1: the server has not accepted it, or has closed it */
    enum end peer, server;    /* what they have done with their ends */
    int told_broken;          /* the server has had its error */
    int shut;                 /* for writing, by the server */
    int deaf;                 /* the same for reading */
    int spent;                /* it was reported, and is not again until it is watched anew */
    int starved;              /* the peer had more to send than there was room for */
    int news;                 /* for the peer */
    int peer_left;            /* it has closed its end, and will not have what comes */
    struct queue in, out;     /* to the server and from it */
    size_t grain;             /* bytes that are read at a time, at most; 0: any */
    int64_t full_ns;          /* when there was no room for what the server had to say, last */
    int64_t read_ns;          /* when the server has read what came, last */
    int64_t closed_ns;        /* when it has closed its end */
    int reads;
    uint64_t read, done;      /* bytes: all that the server has read; those that it has also acted upon */
    int saw_end, done_end;    /* the same of the end */
    int poll_fd;              /* that it is watched by; -1: by none */
    uint32_t events;
    struct member *reader;
} wires[WIRES];
static short wire_at[FDS]; /* by descriptor, its number + 1 */

/* what epolls watch, in the order in which they began to */
static struct watch {
    int poll_fd, fd, wire; /* of a socket of the world, its number; else -1 */
    epoll_data_t data;
} watches[WATCHES];
static int watch_count;

static void put(struct queue *queue, const void *data, size_t size) {
    if (queue->at + queue->size + size > queue->room) {
        memmove(queue->data, queue->data + queue->at, queue->size);
        queue->at = 0;
        if (queue->size + size > queue->room) {
            queue->room = 2 * (queue->size + size);
            queue->data = realloc(queue->data, queue->room);
            if (queue->data == NULL) abort();
        }
    }
    memcpy(queue->data + queue->at + queue->size, data, size);
    queue->size += size;
}

static size_t get(struct queue *queue, void *data, size_t size) {
    if (size > queue->size) size = queue->size;
    memcpy(data, queue->data + queue->at, size);
    queue->at += size;
    queue->size -= size;
    if (queue->size == 0) queue->at = 0;
    return size;
}

static struct wire *wire_of(int fd) {
    return fd >= 0 && fd < FDS && wire_at[fd] ? &wires[wire_at[fd] - 1] : NULL;
}

static size_t room_of(const struct queue *queue) { return queue->size < queue->limit ? queue->limit - queue->size : 0; }

/* As Linux says: there is room when a third is free. */
static uint32_t readiness(const struct wire *wire) {
    uint32_t ready = 0;
    if (wire->in.size || wire->peer != OPEN) ready |= EPOLLIN;
    if (3 * room_of(&wire->out) >= wire->out.limit || wire->peer == BROKEN) ready |= EPOLLOUT;
    if (wire->peer == BROKEN) ready |= EPOLLERR | EPOLLHUP;
    if ((wire->peer == CLOSED && wire->shut) || wire->deaf) ready |= EPOLLIN | EPOLLHUP;
    if (wire->spent) return 0;
    return ready & (wire->events | EPOLLERR | EPOLLHUP);
}

/* Something has changed: who waits for it goes on. */
static void touch(const struct wire *wire) {
    int i;
    if (wire->fd < 0 || wire->poll_fd < 0 || !readiness(wire)) return;
    for (i = 0; i < order_count; i++)
        if (members[order[i]].poll_fd == wire->poll_fd) can_go_on(&members[order[i]]);
}

static void break_wire(struct wire *wire) {
    wire->peer = BROKEN;
    wire->out.size = wire->out.at = 0;
    touch(wire);
}

static int sim_epoll_create1(int flags) {
    int fd = epoll_create1(flags), i, kept = 0;
    for (i = 0; i < watch_count; i++)
        if (watches[i].poll_fd != fd) watches[kept++] = watches[i];
    watch_count = kept;
    return fd;
}

static int find_watch(int poll_fd, int fd) {
    int i;
    for (i = 0; i < watch_count && (watches[i].poll_fd != poll_fd || watches[i].fd != fd); i++) {}
    return i;
}

static void forget_watch(int place) {
    memmove(&watches[place], &watches[place + 1], sizeof *watches * (size_t)(watch_count - place - 1));
    watch_count--;
}

static int sim_epoll_ctl(int poll_fd, int operation, int fd, struct epoll_event *event) {
    struct wire *wire = wire_of(fd);
    int place = find_watch(poll_fd, fd), result;
    if (operation == EPOLL_CTL_ADD && place < watch_count) {
        if (watches[place].wire >= 0 && wire != NULL && wire->poll_fd >= 0) return errno = EEXIST, -1;
        forget_watch(place); /* of a descriptor that was closed */
        place = watch_count;
    }
    if (wire == NULL) {
        result = epoll_ctl(poll_fd, operation, fd, event);
        if (result != 0 && errno == EBADF && self != NULL && is_io(self))
            complain("thread %s watches a socket that is closed", self->name);
        if (result != 0) return result;
    } else if (operation != EPOLL_CTL_ADD && wire->poll_fd != poll_fd) {
        return errno = ENOENT, -1;
    } else {
        wire->poll_fd = operation == EPOLL_CTL_DEL ? -1 : poll_fd;
        if (operation != EPOLL_CTL_DEL) wire->events = event->events & ~(uint32_t)EPOLLET;
        wire->spent = 0;
    }
    if (operation == EPOLL_CTL_DEL) {
        if (place < watch_count) forget_watch(place);
        return 0;
    }
    if (place == watch_count) {
        if (watch_count == WATCHES) abort();
        watch_count++;
    }
    watches[place] = (struct watch){poll_fd, fd, wire != NULL ? (int)(wire - wires) : -1, event->data};
    if (wire != NULL) touch(wire);
    return 0;
}

/* What is ready now, in any order. */
static int collect(int poll_fd, struct epoll_event *events, int most) {
    struct epoll_event found[READY];
    int count = 0, i, k, real = epoll_wait(poll_fd, found, one_at_a_time ? 1 : READY / 2, 0);
    for (i = 0; i < watch_count && count < most; i++) { /* by age: the kernel's order may depend on the past */
        if (watches[i].poll_fd != poll_fd) continue;
        if (watches[i].wire >= 0) {
            uint32_t ready = readiness(&wires[watches[i].wire]);
            if (ready && !(one_at_a_time && real > 0)) events[count++] = (struct epoll_event){ready, watches[i].data};
            continue;
        }
        for (k = 0; k < real; k++)
            if (found[k].data.u64 == watches[i].data.u64) events[count++] = found[k];
    }
    for (i = count - 1; i > 0; i--) {
        struct epoll_event other = events[i];
        k = (int)(draw() % (uint64_t)(i + 1));
        events[i] = events[k];
        events[k] = other;
    }
    if (one_at_a_time && count > 1) count = 1;
    for (i = 0; i < count; i++)
        for (k = 0; k < watch_count; k++)
            if (watches[k].poll_fd == poll_fd && watches[k].wire >= 0 && watches[k].data.u64 == events[i].data.u64)
                wires[watches[k].wire].spent = (wires[watches[k].wire].events & EPOLLONESHOT) != 0;
    return count;
}

/* The thread waits again: it has acted upon what it has read. */
static void has_acted(void) {
    int i;
    for (i = 0; i < WIRES; i++) {
        struct wire *wire = &wires[i];
        if (!wire->used || wire->reader != self || (wire->done == wire->read && wire->done_end == wire->saw_end)) continue;
        wire->done = wire->read;
        wire->done_end = wire->saw_end;
        wire->news = has_news = 1;
    }
}

static int sim_epoll_wait(int poll_fd, struct epoll_event *events, int most, int timeout) {
    int count, place;
    struct epoll_event own = {.events = EPOLLIN};
    int64_t due_ns = timeout < 0 ? NEVER : now + (int64_t)timeout * 1000000;
    if (joins()) join_world();
    if (self == NULL || !is_io(self) || self->fronts || self->held) {
        if (timeout != 0 && self != NULL) complain("thread %s waits for descriptors with a lock", self->name);
        return epoll_wait(poll_fd, events, most, timeout);
    }
    has_acted();
    maybe_yield();
    while ((count = collect(poll_fd, events, most)) == 0 && now < due_ns) {
        place = (int)(self - members);
        own.data.u32 = (uint32_t)place;
        self->state = WAITING;
        self->on = NULL;
        self->wake_ns = due_ns;
        self->poll_fd = poll_fd;
        if (epoll_ctl(polled, EPOLL_CTL_ADD, poll_fd, &own) != 0) abort();
        polling++;
        yield_turn();
        polling--;
        epoll_ctl(polled, EPOLL_CTL_DEL, poll_fd, NULL);
        self->poll_fd = -1;
        self->wake_ns = NEVER;
        if (chance(spurious_permille / 10)) return errno = EINTR, -1;
    }
    return count;
}

/* Some of what could be read or written, now and then. */
static size_t part_of(size_t size) { return size > 1 && chance(100) ? 1 + draw() % (size - 1) : size; }

/* Others run meanwhile: the copies of a system call take time. */
static void copies(void) {
    if (self == NULL || !is_io(self) || self->fronts || self->held || !preempt_permille || !chance(SLOW_PERMILLE)) {
        maybe_yield();
        return;
    }
    copying++;
    world_sleep((int64_t)(draw() % SLOW_NS));
    copying--;
}

/* The same of a read. Nobody else uses the memory that is read to: what is written there before is still there. */
static void copies_to(const struct wire *wire, const struct iovec *parts, int count) {
    size_t sizes[PARTS], i;
    int mark = 1 + (int)(wire - wires) % 0x7f, part;
    for (part = 0; part < count && part < PARTS; part++) {
        sizes[part] = parts[part].iov_len < MARKED ? parts[part].iov_len : MARKED;
        memset(parts[part].iov_base, mark, sizes[part]);
    }
    copies();
    for (part = 0; part < count && part < PARTS; part++)
        for (i = 0; i < sizes[part]; i++)
            if (((const char *)parts[part].iov_base)[i] != mark)
                return complain("memory that a socket is read to is used for something else meanwhile");
}

static uint64_t sum_of(const struct iovec *parts, int count) {
    uint64_t sum = 0;
    size_t i;
    int part;
    for (part = 0; part < count && part < PARTS; part++)
        for (i = 0; i < parts[part].iov_len && i < MARKED; i++)
            sum = (sum ^ ((const unsigned char *)parts[part].iov_base)[i]) * 1099511628211u;
    return sum;
}

/* The same of a write. Nobody changes what is written, or gives it back. */
static void copies_from(const struct iovec *parts, int count) {
    uint64_t sum = sum_of(parts, count);
    copies();
    if (sum_of(parts, count) != sum) complain("what is written to a socket changes meanwhile");
}

static ssize_t sim_readv(int fd, const struct iovec *parts, int count) {
    struct wire *wire = wire_of(fd);
    size_t wanted = 0, left, total = 0;
    int i;
    if (wire == NULL) {
        ssize_t size = readv(fd, parts, count);
        if (size < 0 && errno == EBADF && self != NULL) complain("thread %s reads a socket that is closed", self->name);
        return size;
    }
    copies_to(wire, parts, count);
    wire->reader = self;
    if (wire->fd != fd) return complain("a socket that is closed is read"), errno = EBADF, -1;
    if (wire->deaf) return wire->saw_end = 1, 0;
    if (wire->in.size == 0) {
        if (wire->peer == OPEN) return errno = EAGAIN, -1;
        wire->saw_end = 1;
        if (wire->peer == BROKEN && !wire->told_broken) return wire->told_broken = 1, errno = ECONNRESET, -1;
        return 0;
    }
    if (chance(10)) return errno = EINTR, -1;
    if (self != NULL && is_io(self)) {
        if (self->last != NULL && self->last != wire && !self->looked)
            complain("thread %s reads a socket by the time at which it read another one", self->name);
        self->last = wire;
        self->looked = 0;
    }
    for (i = 0; i < count; i++) wanted += parts[i].iov_len;
    if (wire->grain && wire->grain < wanted) wanted = 1 + draw() % wire->grain;
    left = part_of(wanted < wire->in.size ? wanted : wire->in.size);
    for (i = 0; i < count && left; i++) {
        size_t got = get(&wire->in, parts[i].iov_base, parts[i].iov_len < left ? parts[i].iov_len : left);
        left -= got;
        total += got;
    }
    wire->read += total;
    wire->read_ns = now;
    wire->reads++;
    if (wire->starved) wire->starved = 0, wire->news = has_news = 1;
    return (ssize_t)total;
}

static ssize_t sim_read(int fd, void *data, size_t size) {
    struct iovec part = {data, size};
    if (wire_of(fd) != NULL) return sim_readv(fd, &part, 1);
    maybe_yield();
    return read(fd, data, size);
}

static ssize_t sim_write(int fd, const void *data, size_t size) {
    if (wire_of(fd) != NULL) complain("a socket is written as a descriptor");
    maybe_yield();
    return write(fd, data, size);
}

static ssize_t sim_writev(int fd, const struct iovec *parts, int count) {
    struct wire *wire = wire_of(fd);
    size_t wanted = 0, left, total;
    int i;
    if (wire == NULL) {
        ssize_t size = writev(fd, parts, count);
        if (size < 0 && errno == EBADF && self != NULL) complain("thread %s writes a socket that is closed", self->name);
        return size;
    }
    copies_from(parts, count);
    if (wire->shut) return complain("a socket that was shut is written"), errno = EPIPE, -1;
    if (wire->peer == BROKEN) {
        if (wire->told_broken) return errno = EPIPE, -1;
        return wire->told_broken = 1, errno = ECONNRESET, -1;
    }
    for (i = 0; i < count; i++) wanted += parts[i].iov_len;
    if (wire->peer_left) {
        break_wire(wire);
        return (ssize_t)wanted;
    }
    total = room_of(&wire->out);
    if (total < wanted) wire->full_ns = now;
    if (total == 0) return errno = EAGAIN, -1;
    left = total = part_of(wanted < total ? wanted : total);
    for (i = 0; i < count && left; i++) {
        size_t size = parts[i].iov_len < left ? parts[i].iov_len : left;
        put(&wire->out, parts[i].iov_base, size);
        left -= size;
    }
    if (total) wire->news = has_news = 1;
    return (ssize_t)total;
}

/* OpenSSL's ways to a socket, of which it has one during a handshake. */
static ssize_t tls_read(int fd, void *data, size_t size) {
    return wire_of(fd) != NULL ? sim_read(fd, data, size) : read(fd, data, size);
}

static ssize_t tls_write(int fd, const void *data, size_t size) {
    struct iovec part = {(void *)data, size};
    if (wire_of(fd) == NULL) return write(fd, data, size);
    if (wire_of(fd)->shut) return errno = EPIPE, -1;
    return sim_writev(fd, &part, 1);
}

static int sim_ioctl(int fd, unsigned long request, void *argument) {
    struct wire *wire = wire_of(fd);
    if (wire == NULL) return ioctl(fd, request, argument);
    if (request != SIOCOUTQ) return errno = EINVAL, -1;
    *(int *)argument = (int)wire->out.size;
    return 0;
}

static int sim_shutdown(int fd, int how) {
    struct wire *wire = wire_of(fd);
    if (wire == NULL) return shutdown(fd, how);
    maybe_yield();
    if (how == SHUT_RDWR) wire->deaf = 1;
    else if (how != SHUT_WR) abort();
    if (wire->peer == BROKEN) return errno = ENOTCONN, -1;
    wire->shut = 1;
    wire->news = has_news = 1;
    touch(wire);
    return 0;
}

/* -- for the main thread: the peers, and the server's listening socket */

/* A peer connects; so many bytes can be under way to the server and from it, and be read at a time. Its number. */
int world_connect(size_t in, size_t out, size_t grain) {
    int i;
    for (i = 0; i < WIRES && (wires[i].used || wires[i].fd > 0); i++) {} /* the server may close it later than its peer */
    if (i == WIRES) abort();
    free(wires[i].in.data);
    free(wires[i].out.data);
    wires[i] = (struct wire){.used = 1, .fd = -1, .poll_fd = -1, .in.limit = in, .out.limit = out, .grain = grain};
    return i;
}

/* The server has accepted it: its descriptor, which is closed by `world_close` alone. */
int world_accept(int number) {
    int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (fd < 0 || fd >= FDS || wire_at[fd]) abort();
    wires[number].fd = fd;
    wires[number].read_ns = now;
    wire_at[fd] = (short)(number + 1);
    return fd;
}

/* The server closes it. What it has not read, and what comes behind, breaks the connection. */
void world_close(int number) {
    struct wire *wire = &wires[number];
    int place;
    if (wire->fd < 0) return;
    place = wire->poll_fd >= 0 ? find_watch(wire->poll_fd, wire->fd) : watch_count;
    if (place < watch_count) forget_watch(place);
    wire_at[wire->fd] = 0;
    close(wire->fd);
    wire->fd = wire->poll_fd = -1;
    wire->closed_ns = now;
    wire->server = wire->in.size ? BROKEN : CLOSED;
    if (wire->server == BROKEN) wire->out.size = 0;
    wire->news = has_news = 1;
}

/* The peer sends; how many bytes it could, -1: the connection is broken. */
int64_t world_send(int number, const char *data, size_t size) {
    struct wire *wire = &wires[number];
    size_t room = room_of(&wire->in);
    if (wire->server == CLOSED && size) wire->server = BROKEN, wire->out.size = 0;
    if (wire->server == BROKEN || wire->peer != OPEN) return -1;
    if (room < size) wire->starved = 1;
    else room = size;
    put(&wire->in, data, room);
    touch(wire);
    return (int64_t)room;
}

/* The peer reads; how many bytes it has. */
int64_t world_take(int number, char *data, size_t size) {
    struct wire *wire = &wires[number];
    size_t got = get(&wire->out, data, size);
    touch(wire);
    return (int64_t)got;
}

/* What the peer sees of the server's end: 0, 1: nothing more will come, 2: the connection is broken. */
int world_seen(int number) {
    const struct wire *wire = &wires[number];
    if (wire->server == BROKEN || wire->peer == BROKEN) return 2;
    return wire->out.size == 0 && (wire->shut || wire->server == CLOSED);
}

int world_closed(int number) { return wires[number].fd < 0; } /* the server has closed its end */

/* The peer shuts its end, closes it, or resets the connection. */
void world_shut(int number) {
    if (wires[number].peer == OPEN) wires[number].peer = CLOSED;
    touch(&wires[number]);
}

void world_part(int number, int reset) {
    struct wire *wire = &wires[number];
    wire->peer_left = 1;
    if (reset || wire->out.size) break_wire(wire);
    else world_shut(number);
}

/* Neither end will ask for it any more. */
void world_forget(int number) { wires[number].used = 0; }

/* Bytes that the server has read and acted upon. */
uint64_t world_done(int number) { return wires[number].done; }
int world_done_end(int number) { return wires[number].done_end || wires[number].server != OPEN; }
int64_t world_full_ns(int number) { return wires[number].full_ns; }
/* For how long the server had read nothing, until now or until it closed its end. */
int64_t world_silence(int number) {
    return (wires[number].server == OPEN ? now : wires[number].closed_ns) - wires[number].read_ns;
}
int world_reads(int number) { return wires[number].reads; }
/* Bytes that the server has written and the peer has not taken. */
size_t world_untaken(int number) { return wires[number].out.size; }

/* The same, of a descriptor of the server; -1: it is closed. */
int64_t world_waiting(int fd) { return wire_of(fd) != NULL ? (int64_t)wire_of(fd)->out.size : -1; }

/* The sockets of which peers have something to hear, since they were asked last; how many. */
int world_news(int *found, int room) {
    int count = 0, i;
    if (!has_news) return 0;
    has_news = 0;
    for (i = 0; i < WIRES && count < room; i++)
        if (wires[i].used && wires[i].news) {
            wires[i].news = 0;
            found[count++] = i;
        }
    return count;
}

/* The I/O thread has run since the last call. */
int world_io_ran(void) {
    int ran = io_ran;
    io_ran = 0;
    return ran;
}

int world_copying(void) { return copying; }
int64_t world_late(void) { return late_ns; }
void world_one_at_a_time(int one) { one_at_a_time = one; }
/* somebody is within the front */
int world_front_is_held(void) { return front[1] != NULL && (is_held(front[0]) || is_held(front[1])); }

/* ------------------------------------------------------------------------------------------------------------------ */
/* Memory */

static int fails(void) {
    if ((fail_ppm == 0 && fail_at == 0) || (self == NULL && !is_main())) return 0;
    if (self != NULL ? self->leaving || holds_gil() : !main_may_fail) return 0;
    if (fail_at) {
        if (main_may_fail && self != NULL) return 0; /* the main thread tries something: others have no part in that */
        if (fail_at > 1) return fail_at--, 0;
        if (--fail_count == 0) fail_at = 0;
        failed_takes++;
        return 1;
    }
    if ((int)((draw() >> 33) % 1000000) >= fail_ppm) return 0;
    failed_takes++;
    return 1;
}

/* The memory that extension modules have, by its address: what is never given back is told at the end. */
static struct taken {
    void *at; /* NULL: free */
    void *by; /* an address in the function that has taken it */
    size_t size;
} taken[TAKEN];
static uint32_t taken_count;
static atomic_flag taken_busy = ATOMIC_FLAG_INIT;

static uint32_t taken_place(const void *at) { return (uint32_t)(((uintptr_t)at >> 6) * 2654435761u) % TAKEN; }

static void note_taken(void *at, size_t size, void *by) {
    uint32_t i = taken_place(at);
    if (at == NULL) return;
    while (atomic_flag_test_and_set(&taken_busy))
        ;
    if (++taken_count > TAKEN / 2) abort();
    while (taken[i].at != NULL) i = (i + 1) % TAKEN;
    taken[i] = (struct taken){at, by, size};
    atomic_flag_clear(&taken_busy);
}

static void note_given(const void *at) {
    uint32_t i = taken_place(at), next, home;
    while (atomic_flag_test_and_set(&taken_busy))
        ;
    while (taken[i].at != NULL && taken[i].at != at) i = (i + 1) % TAKEN;
    if (taken[i].at != NULL) {
        taken_count--;
        for (next = (i + 1) % TAKEN; taken[next].at != NULL; next = (next + 1) % TAKEN) {
            home = taken_place(taken[next].at); /* close the gap, where that does not lead past the place of another */
            if ((next - home + TAKEN) % TAKEN < (next - i + TAKEN) % TAKEN) continue;
            taken[i] = taken[next];
            i = next;
        }
        taken[i].at = NULL;
    }
    atomic_flag_clear(&taken_busy);
}

/* Where memory lies within a line of the cache is not left to what the process has done before: aligned tensors are not
   copied. */
static void *sim_malloc(size_t size) {
    void *made = fails() ? NULL : memalign(LINE, size);
    note_taken(made, size, __builtin_return_address(0));
    return made;
}

static void *sim_calloc(size_t count, size_t size) {
    size_t total;
    void *made;
    if (fails() || __builtin_mul_overflow(count, size, &total)) return NULL;
    made = memalign(LINE, total);
    note_taken(made, total, __builtin_return_address(0));
    return made == NULL ? NULL : memset(made, 0, total);
}

/* Memory that was given back, the oldest first: full of nonsense, and not given to others for a while, so that who still
   uses it does not get away with it. */
static struct {
    void *at;
    size_t size;
} aside[ASIDE];
static uint32_t aside_first, aside_count;
static size_t aside_bytes;
static atomic_flag aside_busy = ATOMIC_FLAG_INIT;

/* How many of the oldest have to go; they are in `old`. */
static int leave_aside(void *at, size_t size, void **old, int most) {
    int count = 0;
    while (atomic_flag_test_and_set(&aside_busy))
        ;
    while (aside_count && count < most && (aside_count == ASIDE || aside_bytes + size > ASIDE_BYTES)) {
        old[count++] = aside[aside_first].at;
        aside_bytes -= aside[aside_first].size;
        aside_first = (aside_first + 1) % ASIDE;
        aside_count--;
    }
    if (aside_count < ASIDE) {
        aside[(aside_first + aside_count++) % ASIDE].at = at;
        aside[(aside_first + aside_count - 1) % ASIDE].size = size;
        aside_bytes += size;
    } else {
        old[count++] = at;
    }
    atomic_flag_clear(&aside_busy);
    return count;
}

static void spoil(void *at) {
    size_t size = malloc_usable_size(at);
    memset(at, NONSENSE, size < FILLED ? size : FILLED);
}

static void sim_free(void *at) {
    void *old[READY];
    int count;
    if (at == NULL) return;
    note_given(at);
    spoil(at);
    count = leave_aside(at, malloc_usable_size(at), old, READY - 1);
    while (count) free(old[--count]);
}

static void *sim_realloc(void *old, size_t size) {
    size_t before = old == NULL ? 0 : malloc_usable_size(old);
    void *made = fails() ? NULL : memalign(LINE, size);
    if (made == NULL) return NULL;
    note_taken(made, size, __builtin_return_address(0));
    if (old != NULL) memcpy(made, old, before < size ? before : size);
    sim_free(old);
    return made;
}

/* Tensors whose memory happens to lie side by side are a batch as they are: the seed says where a mapping lies. */
static void *sim_mmap(void *at, size_t size, int protection, int flags, int fd, off_t offset) {
    /* what takes the place of pages that a client has taken away is not refused: it needs no more room */
    if (flags & MAP_ANONYMOUS && at == NULL && fails()) return errno = ENOMEM, MAP_FAILED;
    if (at != NULL) return mmap(at, size, protection, flags, fd, offset);
    if (self == NULL && !is_main()) {
        at = mmap(at, size, protection, flags, fd, offset);
        if (at != MAP_FAILED) note_taken(at, size, __builtin_return_address(0));
        return at;
    }
    do {
        /* after hundreds of arenas, those that have gone make room for others */
        if (next_mapping + size > MAPPINGS_END) next_mapping = MAPPINGS;
        at = (void *)next_mapping;
        next_mapping += ((size + PAGE - 1) & ~(uintptr_t)(PAGE - 1)) + (chance(500) ? PAGE : 0);
        at = mmap(at, size, protection, flags | MAP_FIXED_NOREPLACE, fd, offset);
    } while (at == MAP_FAILED && errno == EEXIST);
    if (at != MAP_FAILED) note_taken(at, size, __builtin_return_address(0));
    return at;
}

static void *sim_mremap(void *old, size_t before, size_t size, int flags) {
    void *at = mremap(old, before, size, flags);
    if (at == MAP_FAILED) return at;
    note_given(old);
    note_taken(at, size, __builtin_return_address(0));
    return at;
}

static int sim_munmap(void *at, size_t size) {
    note_given(at);
    return munmap(at, size);
}

/* The interpreter's own way to memory, for messages that handlers in Python take; it frees what malloc has given, too. */
static struct {
    void *context;
    void *(*malloc)(void *, size_t);
    void *(*calloc)(void *, size_t, size_t);
    void *(*realloc)(void *, void *, size_t);
    void (*free)(void *, void *);
} objects;

/* Those that may be parts of the server, as a connection is, are spoilt as well; whoever comes here has the GIL. */
static void *broad[BROADS];

static uint32_t broad_place(const void *at) { return (uint32_t)(((uintptr_t)at >> 6) * 2654435761u) % BROADS; }

static void *object_malloc(void *context, size_t size) {
    void *made;
    if (size < SMALL) return objects.malloc(context, size);
    made = memalign(LINE, size);
    if (size >= BROAD && made != NULL) broad[broad_place(made)] = made; /* in place of another one, which is not spoilt */
    return made;
}

static int forget_broad(const void *at) {
    uint32_t place = broad_place(at);
    if (at == NULL || broad[place] != at) return 0;
    broad[place] = NULL;
    return 1;
}

static void *object_realloc(void *context, void *old, size_t size) {
    forget_broad(old);
    return objects.realloc(context, old, size);
}

static void object_free(void *context, void *at) {
    if (forget_broad(at)) spoil(at);
    objects.free(context, at);
}

static void hook_objects(void) {
    void (*get)(int, void *) = (void (*)(int, void *))dlsym(RTLD_DEFAULT, "PyMem_GetAllocator");
    void (*set)(int, void *) = (void (*)(int, void *))dlsym(RTLD_DEFAULT, "PyMem_SetAllocator");
    typeof(objects) hooked;
    if (get == NULL || set == NULL) abort();
    get(OBJECTS, &objects);
    hooked = objects;
    hooked.malloc = object_malloc;
    hooked.realloc = object_realloc;
    hooked.free = object_free;
    set(OBJECTS, &hooked);
}

/* ------------------------------------------------------------------------------------------------------------------ */
/* Hooks */

static const struct {
    const char *name;
    void *function;
    int memory; /* that may be refused, but not to the driver, which does not run out of the host's */
} tls_hooks[] = {
    {"read", tls_read, 0},
    {"write", tls_write, 0},
}, hooks[] = {
    {"clock_gettime", sim_clock_gettime, 0},
    {"prctl", sim_prctl, 0},
    {"pthread_mutex_lock", sim_lock, 0},
    {"pthread_mutex_unlock", sim_unlock, 0},
    {"pthread_mutex_trylock", sim_trylock, 0},
    {"pthread_cond_wait", sim_wait, 0},
    {"pthread_cond_timedwait", sim_timedwait, 0},
    {"pthread_cond_signal", sim_signal, 0},
    {"pthread_cond_broadcast", sim_broadcast, 0},
    {"clock_nanosleep", sim_clock_nanosleep, 0},
    {"ppoll", sim_ppoll, 0},
    {"recv", sim_recv, 0},
    {"epoll_create1", sim_epoll_create1, 0},
    {"epoll_ctl", sim_epoll_ctl, 0},
    {"epoll_wait", sim_epoll_wait, 0},
    {"read", sim_read, 0},
    {"readv", sim_readv, 0},
    {"write", sim_write, 0},
    {"writev", sim_writev, 0},
    {"ioctl", sim_ioctl, 0},
    {"shutdown", sim_shutdown, 0},
    {"timerfd_create", sim_timerfd_create, 0},
    {"timerfd_settime", sim_timerfd_settime, 0},
    {"close", sim_close, 0},
    {"malloc", sim_malloc, 1},
    {"calloc", sim_calloc, 1},
    {"realloc", sim_realloc, 1},
    {"free", sim_free, 1},
    {"mmap64", sim_mmap, 1},
    {"mremap", sim_mremap, 1},
    {"munmap", sim_munmap, 1},
};

/* The random numbers of OpenSSL, of the server and of its peers, are the seed's. */
static uint64_t tls_state = 1;

static int tls_draw(unsigned char *out, int size) {
    int i;
    for (i = 0; i < size; i++) {
        tls_state = tls_state * 6364136223846793005u + 1442695040888963407u;
        out[i] = (unsigned char)(tls_state >> 56);
    }
    return 1;
}

static int tls_status(void) { return 1; }

/* RAND_METHOD of <openssl/rand.h> */
static struct {
    int (*seed)(const void *, int);
    int (*bytes)(unsigned char *, int);
    void (*cleanup)(void);
    int (*add)(const void *, int, double);
    int (*pseudo)(unsigned char *, int);
    int (*status)(void);
} tls_random = {NULL, tls_draw, NULL, NULL, tls_draw, tls_status};

static void hook_tls(void) {
    void *library = dlopen("libcrypto.so.3", RTLD_LAZY | RTLD_NOLOAD);
    int (*set)(const void *) = library != NULL ? (int (*)(const void *))dlsym(library, "RAND_set_rand_method") : NULL;
    if (set != NULL) set(&tls_random);
}

static void set_entry(void **entry, void *function) {
    uintptr_t page = (uintptr_t)entry & ~(uintptr_t)(PAGE - 1);
    if (*entry == function) return;
    if (mprotect((void *)page, PAGE, PROT_READ | PROT_WRITE) != 0) abort();
    *entry = function;
}

static int hook_table(ElfW(Addr) base, const ElfW(Rela) *table, size_t size, const ElfW(Sym) *symbols,
                      const char *names, int with_memory, int is_tls) {
    int count = 0;
    size_t i, k;
    typeof(&hooks[0]) all = is_tls ? tls_hooks : hooks;
    size_t most = is_tls ? sizeof tls_hooks / sizeof *tls_hooks : sizeof hooks / sizeof *hooks;
    for (i = 0; i < size / sizeof *table; i++) {
        const char *name = names + symbols[ELF64_R_SYM(table[i].r_info)].st_name;
        if (ELF64_R_TYPE(table[i].r_info) != R_X86_64_JUMP_SLOT && ELF64_R_TYPE(table[i].r_info) != R_X86_64_GLOB_DAT)
            continue;
        for (k = 0; k < most; k++)
            if (strcmp(name, all[k].name) == 0 && (with_memory || !all[k].memory)) {
                set_entry((void **)(base + table[i].r_offset), all[k].function);
                count++;
            }
    }
    return count;
}

static int hook_object(struct dl_phdr_info *info, size_t size, void *context) {
    int *count = context;
    const ElfW(Dyn) *dynamic = NULL;
    const ElfW(Rela) *lazy = NULL, *eager = NULL;
    const ElfW(Sym) *symbols = NULL;
    const char *names = NULL;
    size_t lazy_size = 0, eager_size = 0;
    int i;
    (void)size;
    int is_driver = strstr(info->dlpi_name, "/gpu_stub/") != NULL;
    int is_tls = strstr(info->dlpi_name, "/libcrypto") != NULL;
    if (strstr(info->dlpi_name, "/_native/") == NULL && strstr(info->dlpi_name, "/backends/") == NULL && !is_driver &&
        !is_tls)
        return 0;
    for (i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_DYNAMIC) dynamic = (void *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
    for (; dynamic != NULL && dynamic->d_tag != DT_NULL; dynamic++) {
        if (dynamic->d_tag == DT_JMPREL) lazy = (void *)dynamic->d_un.d_ptr;
        if (dynamic->d_tag == DT_PLTRELSZ) lazy_size = dynamic->d_un.d_val;
        if (dynamic->d_tag == DT_RELA) eager = (void *)dynamic->d_un.d_ptr;
        if (dynamic->d_tag == DT_RELASZ) eager_size = dynamic->d_un.d_val;
        if (dynamic->d_tag == DT_SYMTAB) symbols = (void *)dynamic->d_un.d_ptr;
        if (dynamic->d_tag == DT_STRTAB) names = (void *)dynamic->d_un.d_ptr;
    }
    if (lazy != NULL) *count += hook_table(info->dlpi_addr, lazy, lazy_size, symbols, names, !is_driver, is_tls);
    if (eager != NULL) *count += hook_table(info->dlpi_addr, eager, eager_size, symbols, names, !is_driver, is_tls);
    return 0;
}

/* Replace the functions in all extension modules that are loaded; how many entries. Call it on the main thread. */
int world_hook(void) {
    int count = 0;
    main_thread = pthread_self();
    sem_init(&main_turn, 0, 0);
    holds_gil = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Check");
    save_thread = (void *(*)(void))dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
    restore_thread = (void (*)(void *))dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
    if (holds_gil == NULL || save_thread == NULL || restore_thread == NULL) abort();
    if (pthread_key_create(&leaver, has_ended) != 0) abort();
    /* memory stays with the process: to get it anew for each large tensor takes longer than to fill it */
    mallopt(M_MMAP_THRESHOLD, KEPT);
    mallopt(M_TRIM_THRESHOLD, KEPT);
    mallopt(M_TOP_PAD, 1 << 20);
    hook_objects();
    hook_tls();
    dl_iterate_phdr(hook_object, &count);
    return count;
}

/* ------------------------------------------------------------------------------------------------------------------ */
/* For the main thread */

/* Blocks that extension modules have taken since the world began and not given back, and in `text` some of them. */
uint32_t world_taken(char *text, size_t size) {
    uint32_t i, told = 0;
    size_t at = 0;
    Dl_info info;
    text[0] = 0;
    for (i = 0; i < TAKEN && told < TOLD; i++) {
        if (taken[i].at == NULL) continue;
        if (!dladdr(taken[i].by, &info)) continue;
        at += (size_t)snprintf(text + at, size - at, "%s%zu bytes by %s+0x%zx", told ? ", " : "", taken[i].size,
                               strrchr(info.dli_fname, '/') + 1, (size_t)((char *)taken[i].by - (char *)info.dli_fbase));
        if (at >= size) break;
        told++;
    }
    return taken_count;
}

/* a world of its own; every thread of the last one has left */
int world_begin(uint64_t seed, int64_t start_ns, int preempt, int spurious, int faults) {
    if (alive) return alive;
    if (taken_count) memset(taken, 0, sizeof taken);
    taken_count = 0;
    if (polled >= 0) close(polled), close(watched);
    polled = epoll_create1(EPOLL_CLOEXEC);
    watched = epoll_create1(EPOLL_CLOEXEC);
    if (polled < 0 || watched < 0) abort();
    gpu_ready = NULL;
    ticks = tasks_ready = 0;
    joined = order_count = timer_count = polling = 0;
    seed_state = seed * 6364136223846793005u + 1442695040888963407u;
    if (seed_state == 0) seed_state = 1;
    tls_state = seed_state;
    story = 14695981039346656037u;
    now = start_ns;
    preempt_permille = preempt;
    spurious_permille = spurious;
    fail_ppm = faults;
    switches = failed_takes = 0;
    fail_at = 0;
    problem_count = main_held = main_fronts = held_count = main_may_fail = 0;
    for (int i = 0; i < WIRES; i++) {
        if (wires[i].used && wires[i].fd >= 0) world_close(i);
        wires[i].used = 0;
    }
    watch_count = io_ran = copying = one_at_a_time = 0;
    late_ns = -1;
    return 0;
}

void world_set_faults(int ppm) { fail_ppm = ppm; }
/* so many takes in a row, the first of them is this one from now; 0: none */
void world_fail_at(int take, int count) {
    fail_at = take;
    fail_count = count;
}
/* what the main thread does now can cope with it: no constructor of an object of Python */
int world_may_fail(int may) {
    int before = main_may_fail;
    main_may_fail = may;
    return before;
}

static int by_name(const void *a, const void *b) { return strcmp(members[*(int *)a].name, members[*(int *)b].name); }

/* Wait until so many further threads have joined, and let them in in the order of their names; 0 if they do not come. */
int world_admit(int count) {
    struct timespec limit;
    int first = order_count, i, come;
    clock_gettime(CLOCK_REALTIME, &limit);
    limit.tv_sec += 60;
    pthread_mutex_lock(&guard);
    while (joined < count)
        if (pthread_cond_timedwait(&someone_joined, &guard, &limit) == ETIMEDOUT) break;
    come = joined;
    for (i = 0; i < come; i++) order[order_count++] = newcomers[i];
    joined = 0;
    pthread_mutex_unlock(&guard);
    alive += come;
    qsort(order + first, (size_t)(order_count - first), sizeof *order, by_name);
    return come == count;
}

/* Forget the threads that have left; how many. */
static int forget_gone(void) {
    int i, at, gone;
    for (i = 0, at = 0; i < order_count; i++) {
        if (members[order[i]].state != GONE) {
            order[at++] = order[i];
        } else {
            sem_destroy(&members[order[i]].turn);
            members[order[i]].state = FREE;
        }
    }
    gone = order_count - at;
    alive -= gone;
    order_count = at;
    return gone;
}

/* Let one thread run that can; how many have left since the last call, or -1: there is none that can. */
int world_run(void) {
    struct member *found[THREADS];
    int count = runnable(found), gone;
    if (count) run(found[draw() % (uint64_t)count]);
    gone = forget_gone();
    return gone || count ? gone : -1;
}

int world_runnable(void) {
    struct member *found[THREADS];
    return runnable(found);
}

/* the earliest time at which a thread or a timer wants to go on */
int64_t world_next(void) {
    int64_t next = NEVER;
    int i;
    for (i = 0; i < order_count; i++)
        if (members[order[i]].state == WAITING && members[order[i]].wake_ns < next) next = members[order[i]].wake_ns;
    for (i = 0; i < timer_count; i++)
        if (timers[i].due_ns < next) next = timers[i].due_ns;
    return next;
}

/* Have it be `ns`: what is due then can go on. */
void world_advance(int64_t ns) {
    uint64_t one = 1;
    int i;
    if (ns > now) now = ns;
    for (i = 0; i < order_count; i++)
        if (members[order[i]].wake_ns <= now) can_go_on(&members[order[i]]);
    /* one at a time: else so many threads that each step wakes another one would never come to rest */
    if (order_count && chance(spurious_permille)) {
        struct member *member = &members[order[draw() % (uint64_t)order_count]];
        if (member->on != NULL) can_go_on(member);
    }
    for (i = 0; i < timer_count; i++)
        if (timers[i].due_ns <= now) {
            timers[i].due_ns = NEVER;
            if (write(timers[i].fd, &one, sizeof one) != sizeof one) abort();
        }
}

/* What the main thread is to do; see `Do` in world.py */
enum action { REST, SEE_OFF, EVENT, WORKER, GPU, LOOP, TASKS, STAND, STOP };

/* Have the main thread look at this descriptor: of a worker, or of the loop; or no more, if `what` is negative. */
void world_watch(int fd, int what) {
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = (uint64_t)fd << 8 | (uint64_t)(what & 0xff)};
    if (epoll_ctl(watched, what < 0 ? EPOLL_CTL_DEL : EPOLL_CTL_ADD, fd, &event) != 0) abort();
}

/* Ask it how many streams of devices could go on. */
void world_use_gpus(int (*ready)(void)) { gpu_ready = ready; }

static int by_number(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }

/* Let threads run, a time each, until it is the main thread's turn; what it is to do. REST: nothing before time passes.

   event_ns: when the main thread has something to do next.
   tasks: whether the event loop has tasks that can go on.
   stand_ppm: how often the machine stands still, of a million steps.

   Each step takes some time, the one of the main thread too, before the next call. */
int world_step(int64_t event_ns, int tasks, int stand_ppm) {
    static const int64_t step_ns[] = {0, 0, 0, MICROSECOND, 3 * MICROSECOND, 20 * MICROSECOND};
    struct member *found[THREADS];
    struct epoll_event ready[READY];
    int actions[9], workers[READY];
    for (;;) {
        int count, ready_count, i, action_count = 0, worker_count = 0;
        void *python;
        loop_ready = 0;
        if (problem_count) return STOP;
        if (ticks) {
            world_advance(now + step_ns[draw() % (sizeof step_ns / sizeof *step_ns)]);
            ticks = 0;
            if (stand_ppm && (int)((draw() >> 33) % 1000000) < stand_ppm) return STAND;
        }
        ready_count = epoll_wait(watched, ready, READY, 0);
        for (i = 0; i < ready_count; i++) {
            int what = (int)(ready[i].data.u64 & 0xff), fd = (int)(ready[i].data.u64 >> 8);
            if (what) loop_ready |= what;
            else workers[worker_count++] = fd;
        }
        count = runnable(found);
        if (count) actions[action_count++] = SEE_OFF, actions[action_count++] = SEE_OFF;
        if (event_ns <= now) actions[action_count++] = EVENT;
        if (worker_count) actions[action_count++] = WORKER;
        if (gpu_ready != NULL && gpu_ready()) actions[action_count++] = GPU;
        if (loop_ready) actions[action_count++] = LOOP;
        if (tasks || tasks_ready) actions[action_count++] = TASKS;
        if (!action_count) return REST;
        ticks = 1;
        i = actions[draw() % (uint64_t)action_count];
        if (i == TASKS) tasks_ready = 0;
        if (i == WORKER) {
            qsort(workers, (size_t)worker_count, sizeof *workers, by_number);
            worker_fd = workers[draw() % (uint64_t)worker_count];
        }
        if (i != SEE_OFF) return i;
        python = save_thread();
        run(found[draw() % (uint64_t)count]);
        restore_thread(python);
        if (forget_gone() || has_news || (io_ran && one_at_a_time)) return SEE_OFF;
    }
}

/* A thread has given the event loop a task. */
void world_has_tasks(void) { tasks_ready = 1; }

int world_worker(void) { return worker_fd; }    /* that has something to read, after WORKER */
int world_loop_ready(void) { return loop_ready; } /* what the loop has to look at, after LOOP */
/* A thread has seen that a rule is broken. */
void world_complain(const char *text) { complain("%s", text); }

int world_alive(void) { return alive; }
int64_t world_now(void) { return now; }
uint64_t world_story(void) { return story; }
uint64_t world_switches(void) { return switches; }
uint64_t world_failed_takes(void) { return failed_takes; }
const char *world_problem(void) { return problem_count ? problem : ""; }

/* threads with names that begin so and wait for a condition without a time */
int world_idle(const char *prefix) {
    int count = 0, i;
    for (i = 0; i < order_count; i++) {
        struct member *member = &members[order[i]];
        if (member->state == WAITING && member->on != NULL && strncmp(member->name, prefix, strlen(prefix)) == 0) count++;
    }
    return count;
}

/* On a thread that perhaps names itself nowhere in native code: it is of the world from now on. Without the GIL. */
void world_join(const char *name) {
    if (self != NULL) return;
    named = 1;
    snprintf(own_name, sizeof own_name, "%s", name);
    join_world();
}

/* On a thread that is to join: not yet, for another one waits for what it does now, and lets nobody run meanwhile. */
void world_stay_out(int stays) { stays_out = stays; }

/* On a thread that has joined: it has done everything. It is of the world until it has ended, since what it lets go of
   on its way is what others may take. */
void world_leave(void) {
    if (self == NULL) return;
    self->leaving = 1;
    pthread_setspecific(leaver, self);
}
