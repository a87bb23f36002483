/* Devices, contexts and the names of errors. */

#include "cuda_stub.h"

#include <dlfcn.h>

/* How cuda-bindings finds all others: by their names without a version. */
CUresult cuGetProcAddress_v2(const char *symbol, void **found, int version, uint64_t flags, int *status) {
    Dl_info self;
    char name[128];
    const char *const versions[] = {"_v3", "_v2", ""};
    (void)version, (void)flags;
    *found = NULL;
    if (dladdr((void *)cuGetProcAddress_v2, &self)) {
        void *library = dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
        for (int i = 0; library && i < 3 && !*found; i++) {
            snprintf(name, sizeof name, "%s%s", symbol, versions[i]);
            *found = dlsym(library, name);
        }
        if (library) dlclose(library);
    }
    if (status) *status = *found ? 0 : 1;
    return *found ? OK : 500;
}

CUresult cuInit(unsigned flags) {
    pthread_mutex_lock(&guard);
    initialized = 1;
    CUresult result = enter(__func__);
    if (result == OK && flags) result = INVALID_VALUE;
    if (result == OK && devices == 0) result = NO_DEVICE;
    initialized = result == OK;
    LEAVE;
}

CUresult cuDriverGetVersion(int *version) { SIMPLE(version, *version = 13000); }
CUresult cuDeviceGetCount(int *count) { SIMPLE(count, *count = devices); }
CUresult cuDeviceGet(int *device, int ordinal) {
    SIMPLE(device, if (ordinal < 0 || ordinal >= devices) result = INVALID_DEVICE; else *device = ordinal);
}
CUresult cuDeviceGetName(char *name, int room, int device) {
    SIMPLE(name && device < devices, snprintf(name, (size_t)room, "stub device %d", device));
}
CUresult cuDeviceGetUuid_v2(char *uuid, int device) {
    SIMPLE(uuid && device < devices, for (int i = 0; i < 16; i++) uuid[i] = (char)(i == 15 ? device : i));
}
CUresult cuDeviceTotalMem_v2(size_t *size, int device) {
    SIMPLE(size && device < devices, *size = (size_t)memory_size);
}
CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
    SIMPLE(value && device < devices,
           *value = attribute == 75 ? 9 : attribute == 16 ? 132 : attribute == 40 ? 3 : attribute == 134 ? (nodes ? device % nodes : -1) : 0);
}
CUresult cuDeviceGetPCIBusId(char *text, int room, int device) {
    SIMPLE(text && device < devices, snprintf(text, (size_t)room, "0000:%02x:00.0", device + 1));
}
CUresult cuDevicePrimaryCtxRetain(void **context, int device) {
    SIMPLE(context && device >= 0 && device < devices, retained[device]++; *context = &retained[device]);
}
CUresult cuDevicePrimaryCtxRelease_v2(int device) {
    SIMPLE(device >= 0 && device < devices,
           if (retained[device] == 0) result = INVALID_CONTEXT; else retained[device]--);
}
/* These two say nothing of the device: a thread can leave one that is lost. */
static CUresult enter_anyway(const char *name) {
    CUresult result = enter(name);
    return current_device >= 0 && result == sticky[current_device] ? OK : result;
}
CUresult cuCtxSetCurrent(void *context) {
    pthread_mutex_lock(&guard);
    CUresult result = enter_anyway(__func__);
    if (result == OK) current_device = context ? (int)((int *)context - retained) : -1;
    LEAVE;
}
CUresult cuCtxGetCurrent(void **context) {
    pthread_mutex_lock(&guard);
    CUresult result = context ? enter_anyway(__func__) : INVALID_VALUE;
    if (result == OK) *context = current_device < 0 ? NULL : &retained[current_device];
    LEAVE;
}
static _Thread_local int below[8], depth;
CUresult cuCtxPushCurrent_v2(void *context) {
    SIMPLE(context && depth < 8, below[depth++] = current_device; current_device = (int)((int *)context - retained));
}
CUresult cuCtxPopCurrent_v2(void **context) {
    SIMPLE(context && depth > 0, *context = &retained[current_device]; current_device = below[--depth]);
}
CUresult cuCtxSynchronize(void) {
    ENTER(1) {
        for (int i = 0; i < MAX_STREAMS; i++)
            if (slots[i] && slots[i]->device == current_device) {
                wait_for(slots[i], slots[i]->submitted);
                if (slots[i]) join_clock(&host_clock, &slots[i]->clock);
            }
        result = sticky[current_device];
    }
    LEAVE;
}
CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    ENTER(least && greatest) *least = 0, *greatest = -5;
    LEAVE;
}
CUresult cuGetErrorName(CUresult error, const char **text) {
    static const struct { int code; const char *name; } names[] = {
        {OK, "CUDA_SUCCESS"}, {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
        {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"}, {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
        {NO_DEVICE, "CUDA_ERROR_NO_DEVICE"}, {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
        {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"}, {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},
        {NOT_READY, "CUDA_ERROR_NOT_READY"}, {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
        {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
        {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
        {719, "CUDA_ERROR_LAUNCH_FAILED"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].code == error) { *text = names[i].name; return OK; }
    *text = NULL;
    return INVALID_VALUE;
}
CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error == OUT_OF_MEMORY ? "out of memory" : error == NO_DEVICE ? "no CUDA-capable device is detected"
            : error == ILLEGAL_ADDRESS ? "an illegal memory access was encountered" : "said by the stub driver";
    return OK;
}
