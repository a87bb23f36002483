/* Preloaded behind libasan and libubsan: both have the function that says where reports go, libubsan calls libasan's, and
   its own reports stay on standard error, which a server's parent may not show. This calls libubsan's, with $UBSAN_REPORTS. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>

__attribute__((constructor)) static void direct_reports(void) {
    void *library = dlopen("libubsan.so.1", RTLD_NOW | RTLD_NOLOAD);
    void (*set_path)(const char *) = library ? (void (*)(const char *))dlsym(library, "__sanitizer_set_report_path") : NULL;
    const char *path = getenv("UBSAN_REPORTS");
    if (set_path && path)
        set_path(path);
}
