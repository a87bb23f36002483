/* Interrupts the handler of SIGBUS of mapping.pyx after each of its instructions in turn, and there gives the first place
   to another mapping. The handler looks for an address in the second place, and may put zeros only there: neither in the
   mapping that leaves, nor in the one that comes, nor in the page between the first mapping and the address. */

#include "mapping.h"

#include <stdio.h>

static uint8_t *first, *other;  /* four pages each */
static size_t page;
static int steps, at;

static void on_step(int number) {
    (void)number;
    if (++steps != at) return;
    inferd_withdraw(&inferd_mappings[0]);
    inferd_publish(&inferd_mappings[0], other, 4 * page);
}

static uint8_t *pages(uint8_t *where) {
    uint8_t *found = mmap(where, 4 * page, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | (where ? MAP_FIXED : 0), -1, 0);
    if (found != MAP_FAILED) memset(found, 0x55, 4 * page);
    return found == MAP_FAILED ? NULL : found;
}

static int is_untouched(const uint8_t *start, size_t count) {
    for (size_t i = 0; i < count * page; i++)
        if (start[i] != 0x55) return 0;
    return 1;
}

static int patched(uintptr_t address) {
    int done;
    __asm__ volatile("pushfq; orq $0x100, (%%rsp); popfq" ::: "memory", "cc");  /* a signal after each instruction */
    done = inferd_patch(address);
    __asm__ volatile("pushfq; andq $-257, (%%rsp); popfq" ::: "memory", "cc");
    return done;
}

int main(void) {
    page = inferd_page();
    signal(SIGTRAP, on_step);
    do {
        at++;
        steps = 0;
        first = pages(first);
        other = pages(other);
        if (!first || !other) return 2;
        inferd_mappings[0].broken = inferd_mappings[1].broken = 0;
        inferd_publish(&inferd_mappings[0], first, page);
        inferd_publish(&inferd_mappings[1], first + 2 * page, page);
        if (!patched((uintptr_t)(first + 2 * page)) || !inferd_mappings[1].broken || first[2 * page] != 0 ||
            inferd_mappings[0].broken || !is_untouched(first, 2) || !is_untouched(other, 4)) {
            printf("step %d: another mapping was replaced\n", at);
            return 1;
        }
    } while (steps >= at);
    printf("%d steps\n", steps);
    return 0;
}
