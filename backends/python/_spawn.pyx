"""Starting a worker process: exec in a child of vfork, which runs nothing but system calls.

A process with threads cannot be forked safely, because a lock that another thread holds is never released in the child.
Here the child borrows the parent's memory, touches none of its locks, and is replaced by the new program at once.
"""

from libc.stdlib cimport free, malloc
from libc.string cimport strerror

import os

cdef extern from *:
    """
    #ifndef _GNU_SOURCE
    #define _GNU_SOURCE
    #endif
    #include <errno.h>
    #include <fcntl.h>
    #include <signal.h>
    #include <string.h>
    #include <sys/prctl.h>
    #include <sys/syscall.h>
    #include <sys/types.h>
    #include <unistd.h>
    extern pid_t vfork(void);
    #ifndef SYS_close_range
    #define SYS_close_range 436
    #endif

    /* in the child: the descriptors become 0, 1, 2, ..., and all others are closed */
    static int inferd_place(const int *fds, int count) {
        int high[16];
        for (int i = 0; i < count; i++) {
            high[i] = fcntl(fds[i], F_DUPFD, count); /* no higher: the limit may be low */
            if (high[i] < 0) return errno;
        }
        for (int i = 0; i < count; i++)
            if (dup2(high[i], i) < 0) return errno;
        /* where the kernel lacks close_range, all our descriptors are close-on-exec, except these */
        if (syscall(SYS_close_range, (unsigned)count, ~0U, 0))
            for (int i = 0; i < count; i++) close(high[i]);
        return 0;
    }

    /* The pid; 0 or the negative pid of a child to be waited for, with *error set, when the program does not start.
       The new process is the leader of a process group, ignores SIGTERM and SIGINT, and gets SIGKILL
       when the calling *thread* ends; SIGCONT if it outlives that. */
    static pid_t inferd_spawn(const char *program, char *const argv[], char *const envp[], const char *folder,
                              const int *fds, int count, int outlives, int *error) {
        volatile int failed = 0;
        sigset_t all, old;
        pid_t parent = getpid();
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &old);
        pid_t pid = vfork();
        if (pid == 0) {
            struct sigaction usual;
            memset(&usual, 0, sizeof usual);
            usual.sa_handler = SIG_DFL;
            for (int n = 1; n < NSIG; n++) sigaction(n, &usual, NULL);
            /* sent to every process of a service at once; the server decides when workers end */
            usual.sa_handler = SIG_IGN;
            sigaction(SIGTERM, &usual, NULL);
            sigaction(SIGINT, &usual, NULL);
            prctl(PR_SET_PDEATHSIG, outlives ? SIGCONT : SIGKILL, 0, 0, 0);
            if (!outlives && getppid() != parent) _exit(127);
            setpgid(0, 0);
            int problem = inferd_place(fds, count);
            if (!problem && folder && chdir(folder)) problem = errno;
            if (!problem) {
                sigset_t none;
                sigemptyset(&none);
                sigprocmask(SIG_SETMASK, &none, NULL);
                execve(program, argv, envp);
                problem = errno;
            }
            failed = problem;
            _exit(127);
        }
        int problem = errno;
        pthread_sigmask(SIG_SETMASK, &old, NULL);
        *error = pid < 0 ? problem : failed;
        return *error ? (pid > 0 ? -pid : 0) : pid;
    }
    static int inferd_adopt(void) { return prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) ? errno : 0; }
    """
    int spawn_process "inferd_spawn"(const char *program, char **argv, char **envp, const char *folder, const int *fds,
                                     int count, int outlives, int *error) nogil
    int adopt "inferd_adopt"() nogil

cdef enum:
    MOST_DESCRIPTORS = 16


cdef char **pointers(list texts) except NULL:
    cdef char **out = <char **>malloc((len(texts) + 1) * sizeof(char *))
    cdef Py_ssize_t i
    if out == NULL:
        raise MemoryError
    for i in range(len(texts)):
        out[i] = <bytes>texts[i]
    out[len(texts)] = NULL
    return out


def adopt_orphans() -> None:
    """Have this process become the parent of all its descendants whose parent ends.

    Raises:
        OSError: the system refuses.
    """
    cdef int error = adopt()
    if error:
        raise OSError(error, strerror(error).decode())


def spawn(program: str, arguments: list[str], environment: dict[str, str], folder: str, descriptors: list[int],
          outlives: bool = False) -> int:
    """Start a process.

    It becomes the leader of a process group of its own, ignores SIGTERM and SIGINT, and the kernel kills it (SIGKILL)
    when the calling thread ends.

    Args:
        program: path of the executable.
        arguments: with its name as the first.
        environment: all of its variables.
        folder: its working directory.
        descriptors: what its descriptors 0, 1, 2, ... are; it gets no others.
        outlives: the kernel does not kill it then, but sends it SIGCONT, so that it notices even if it was stopped.

    Returns:
        Its process id; the caller must wait for it (os.waitpid).

    Raises:
        OSError: it cannot be started.
    """
    cdef list argv = [os.fsencode(text) for text in arguments]
    cdef list envp = [os.fsencode(f"{name}={value}") for name, value in environment.items()]
    cdef bytes encoded_program = os.fsencode(program)
    cdef bytes encoded_folder = os.fsencode(folder)
    cdef const char *program_text = encoded_program
    cdef const char *folder_text = encoded_folder
    cdef int fds[MOST_DESCRIPTORS]
    cdef int count = <int>len(descriptors)
    cdef int error = 0
    cdef int pid
    cdef bint lives_on = outlives
    cdef char **arguments_out = pointers(argv)
    cdef char **environment_out = NULL
    if count > MOST_DESCRIPTORS:
        free(arguments_out)
        raise ValueError(f"at most {MOST_DESCRIPTORS} descriptors")
    try:
        environment_out = pointers(envp)
        for i in range(count):
            fds[i] = descriptors[i]
        with nogil:
            pid = spawn_process(program_text, arguments_out, environment_out, folder_text, fds, count, lives_on,
                                &error)
    finally:
        free(arguments_out)
        free(environment_out)
    if error:
        if pid < 0:
            os.waitpid(-pid, 0)  # the child that could not become the program
        raise OSError(error, strerror(error).decode(), program)
    return pid
