/* Kernels: what a framework launches. A fake one computes on the CPU, when the stream comes to it. */

#include "cuda_stub.h"

/* `function` touches these bytes of the device and no others. It is captured into graphs, too. */
CUresult stub_kernel(Stream *s, void (*function)(void *), void *argument, const Argument *touched, int count) {
    ENTER(function && count <= MAX_ARGUMENTS) {
        if ((result = usable(s)) == OK) {
            Operation *o = operation(KERNEL);
            o->function = function, o->argument = argument;
            for (int i = 0; i < count; i++) {
                Memory *m = find(touched[i].address, 1);
                if (!touched[i].size) continue;
                if (!within(m, touched[i].address, touched[i].size)) {
                    violation("a kernel was submitted that %s %llu bytes %s", touched[i].writes ? "writes" : "reads",
                              (unsigned long long)touched[i].size,
                              m && !m->alive ? "of memory that was freed" : "beyond an allocation");
                    result = INVALID_VALUE;
                }
                o->touched[o->touched_count++] = (Touched){m, touched[i]};
            }
            if (result == OK) submit(s, o);
            else free(o);
        }
    }
    LEAVE;
}
