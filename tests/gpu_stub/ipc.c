/* Sharing between processes: the memory is a file of its owner, opened through /proc. */

#include "cuda_stub.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct { uint32_t magic; int pid, fd, device; uint64_t size; } Exported;
enum { MAGIC = 0x43554442 };

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    ENTER(handle) {
        Memory *m = find(address, 1);
        if (!m || !m->alive || m->kind != DEVICE) {
            result = INVALID_VALUE;
        } else {
            Exported e = {MAGIC, getpid(), m->fd, m->device, m->size};
            mark_written(m, m->address, m->size);  /* others may write it */
            memset(handle, 0, sizeof *handle);
            memcpy(handle, &e, sizeof e);
        }
    }
    LEAVE;
}
static CUresult import(CUdeviceptr *out, const CUipcMemHandle *handle) {
    Exported e;
    char path[64];
    memcpy(&e, handle, sizeof e);
    if (e.magic != MAGIC || e.device != current_device) return INVALID_VALUE;
    if (e.pid == getpid() && !reopens) return INVALID_CONTEXT;
    for (Memory *m = memories; m; m = m->next)
        if (m->alive && m->kind == IMPORTED && !memcmp(&m->handle, handle, sizeof *handle)) {
            m->opened++;
            *out = m->address;
            return OK;
        }
    snprintf(path, sizeof path, "/proc/%d/fd/%d", e.pid, e.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return INVALID_VALUE;
    uint8_t *bytes = mmap(NULL, e.size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (bytes == MAP_FAILED) return INVALID_VALUE;
    Memory *m = remember(IMPORTED, reserve_addresses(e.size), e.size, bytes, fd);
    m->handle = *handle, m->opened = 1;
    *out = m->address;
    return OK;
}
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *out, CUipcMemHandle handle, unsigned flags) {
    ENTER(out && flags == 1) result = import(out, &handle);
    LEAVE;
}
CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    ENTER(1) {
        Memory *m = find(address, 1);
        if (!m || m->kind != IMPORTED || !m->alive || m->address != address) {
            violation("an imported address was closed that is not open");
            result = INVALID_VALUE;
        } else if (--m->opened == 0) {
            check_idle(m);
            unmap(m);
            forget(m);
        }
    }
    LEAVE;
}
