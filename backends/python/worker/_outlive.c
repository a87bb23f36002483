/* Processes that a model forks outlive signals that are for the whole service, and obey those of the model.

   This library is separate, and does not use the interpreter, so that any interpreter of a model can load it. The
   handler decides by the sender, which the kernel names, and at once, whatever the interpreter is doing: a process that
   obeys ends like one without a handler. No handler survives exec.

   A sender that has ended counts as one from outside, unless it is the parent: the model can signal again, but it
   cannot bring back a process that has ended. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

enum { SIGNALS = 65, MOST_ANCESTORS = 64, STAT_TEXT = 512 };

static pid_t family;                            /* the ancestor of all processes of the model */
static pid_t parent;                            /* made this process: it is of the model, even if it has ended */
static struct sigaction without[SIGNALS];       /* the action for each signal before this library took it */

static char *put_text(char *at, const char *text) {
    while (*text) *at++ = *text++;
    *at = 0;
    return at;
}

static char *put_number(char *at, pid_t number) {
    char digits[12];
    int count = 0;
    do digits[count++] = (char)('0' + number % 10); while (number /= 10);
    while (count) *at++ = digits[--count];
    return at;
}

/* The parent of a process; 0: it is not visible from here; -1: the process has ended. Only system calls. */
static pid_t parent_of(pid_t pid) {
    char path[32], text[STAT_TEXT];
    put_text(put_number(put_text(path, "/proc/"), pid), "/stat");
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    ssize_t size = read(fd, text, sizeof text - 1);
    close(fd);
    if (size <= 0) return -1;
    text[size] = 0;
    const char *at = strrchr(text, ')');        /* "<pid> (<any name>) <state> <parent> ..." */
    if (!at || strlen(at) < 5) return -1;
    pid_t parent = 0;
    for (at += 4; *at >= '0' && *at <= '9'; at++) parent = parent * 10 + (*at - '0');
    return parent;
}

/* Whether a process outside of the model has sent it. */
static int is_from_outside(const siginfo_t *info) {
    if (info->si_code != SI_USER && info->si_code != SI_QUEUE && info->si_code != SI_TKILL) return 0;
    pid_t sender = info->si_pid;                /* 0: of another namespace */
    if (sender == parent) return 0;
    pid_t at = sender;
    for (int i = 0; i < MOST_ANCESTORS && at > 0; i++) {
        if (at == family) return 0;
        pid_t next = parent_of(at);
        at = next < 0 && at != sender ? sender : next;  /* one between has just ended: the sender has another parent */
    }
    return 1;
}

static void on_signal(int number, siginfo_t *info, void *context) {
    int kept = errno;
    const struct sigaction *before = &without[number];
    if (is_from_outside(info)) {
        ;
    } else if (before->sa_flags & SA_SIGINFO) {
        before->sa_sigaction(number, info, context);
    } else if (before->sa_handler == SIG_DFL) {
        signal(number, SIG_DFL);
        raise(number);                          /* delivered when this returns */
    } else if (before->sa_handler != SIG_IGN) {
        before->sa_handler(number);
    }
    errno = kept;
}

static void note_parent(void) { parent = getppid(); }

/* From now on a signal has its present action only if a descendant of `ancestor` sends it. 0: done; else errno. */
int inferd_outlive(int number, int ancestor) {
    static int noted;
    struct sigaction action;
    if (sigaction(number, NULL, &action)) return errno;
    if ((action.sa_flags & SA_SIGINFO) && action.sa_sigaction == on_signal) return 0;
    note_parent();
    if (!noted) noted = !pthread_atfork(NULL, NULL, note_parent);
    without[number] = action;
    family = ancestor;
    /* A system call that the signal would have interrupted is interrupted, so that the interpreter runs its handler. */
    int restarts = action.sa_handler == SIG_DFL || action.sa_handler == SIG_IGN ? SA_RESTART : action.sa_flags & SA_RESTART;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | restarts;
    sigemptyset(&action.sa_mask);
    return sigaction(number, &action, NULL) ? errno : 0;
}
