# Assertions: what must hold where memory, charges, counts and ownership change hands. Where one does not hold, debug
# and sanitizer builds, and the `checked` one, end the process. A release build does not compute them.

cdef extern from *:
    """
    #include <stdio.h>
    #include <stdlib.h>
    #ifdef NDEBUG
    #define INFERD_CHECKED 0
    #define inferd_assert(holds) ((void)sizeof(holds))
    #else
    #define INFERD_CHECKED 1
    /* without the line: code that is compiled alike must have the same bytes, see tests/mutants */
    #define inferd_assert(holds) \\
        ((holds) ? (void)0 : (fprintf(stderr, "%s: this does not hold: %s\\n", __func__, #holds), abort()))
    #endif
    static inline void inferd_assert_move(const char *what, const unsigned char *next, int before, int after) {
        if (!INFERD_CHECKED || next[before] >> after & 1) return;
        fprintf(stderr, "%s goes from state %d to %d\\n", what, before, after);
        abort();
    }
    """
    const bint CHECKED "INFERD_CHECKED"  # for assertions that need a statement, or read something atomic
    void assert_that "inferd_assert"(bint holds) noexcept nogil
    # `next` has for each state the states that may follow, as bits.
    void assert_move "inferd_assert_move"(const char *what, const unsigned char *next, int before,
                                          int after) noexcept nogil
