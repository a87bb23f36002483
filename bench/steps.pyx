"""Steps: the number of instructions that a call takes, which does not depend on the machine's load.

The processor traps after each instruction of this thread while its trap flag is set, and a signal handler counts. Each
instruction takes some microseconds; neither privileges nor hardware counters are needed. x86-64 only.
"""

from libc.stdint cimport uint64_t

cdef extern from *:
    """
    #include <signal.h>
    #include <stdint.h>
    #include <string.h>
    #if defined(__x86_64__) && defined(__linux__)
    #define INFERD_HAS_STEPS 1
    static volatile uint64_t inferd_steps;
    static struct sigaction inferd_before;
    static void inferd_count(int number) { (void)number; inferd_steps++; }
    /* the 128 bytes below the stack are the caller's */
    static inline void inferd_begin_steps(void) {
        struct sigaction action;
        memset(&action, 0, sizeof(action));
        action.sa_handler = inferd_count;
        sigaction(SIGTRAP, &action, &inferd_before);
        inferd_steps = 0;
        __asm__ volatile("lea -128(%%rsp), %%rsp; pushfq; orq $0x100, (%%rsp); popfq; lea 128(%%rsp), %%rsp"
                         ::: "memory", "cc");
    }
    static inline uint64_t inferd_end_steps(void) {
        __asm__ volatile("lea -128(%%rsp), %%rsp; pushfq; andq $~0x100, (%%rsp); popfq; lea 128(%%rsp), %%rsp"
                         ::: "memory", "cc");
        sigaction(SIGTRAP, &inferd_before, NULL);
        return inferd_steps;
    }
    #else
    #define INFERD_HAS_STEPS 0
    static inline void inferd_begin_steps(void) {}
    static inline uint64_t inferd_end_steps(void) { return 0; }
    #endif
    """
    const int HAS_STEPS "INFERD_HAS_STEPS"
    void begin_steps "inferd_begin_steps"()
    uint64_t end_steps "inferd_end_steps"()


def can_count() -> bool:
    """Whether instructions are counted on this machine."""
    return HAS_STEPS


def count(call) -> int:
    """Instructions that `call()` takes on this thread, with those of Python around it: some hundreds."""
    cdef uint64_t steps
    begin_steps()
    try:
        call()
    finally:
        steps = end_steps()
    return steps
