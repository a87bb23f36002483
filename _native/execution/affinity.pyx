"""Where the memory of a thread comes from on machines with several NUMA nodes."""

from cpython.exc cimport PyErr_SetFromErrno

cdef extern from *:
    """
    #include <sys/syscall.h>
    #include <unistd.h>
    enum { INFERD_NODES = 1024, INFERD_BITS = 8 * sizeof(unsigned long) };
    /* MPOL_BIND of <numaif.h>, whose library is not needed for one system call */
    static inline long inferd_bind_memory(int node) {
        unsigned long mask[INFERD_NODES / INFERD_BITS] = {0};
        mask[node / INFERD_BITS] = 1UL << (node % INFERD_BITS);
        return syscall(SYS_set_mempolicy, 2, mask, (unsigned long)INFERD_NODES + 1);
    }
    """
    enum:
        MAX_NODES "INFERD_NODES"
    long set_memory_node "inferd_bind_memory"(int node) nogil


def bind_memory(node: int) -> None:
    """Have the calling thread, and threads that it starts, get new memory from this NUMA node only.

    Raises:
        ValueError: there can be no such node.
        OSError: the kernel does not do it.
    """
    if not 0 <= node < MAX_NODES:
        raise ValueError(f"expected a NUMA node from 0 to {MAX_NODES - 1}, got {node}")
    if set_memory_node(node) != 0:
        PyErr_SetFromErrno(OSError)
