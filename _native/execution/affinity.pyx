"""The memory of a thread on machines with several NUMA nodes."""

from cpython.exc cimport PyErr_SetFromErrno

from inferd._native.numa cimport MAX_NODES, bind_to_node


def bind_memory(node: int) -> None:
    """Have the calling thread, and threads that it starts, get new memory from this NUMA node only.

    Raises:
        ValueError: no node can have this number.
        OSError: the kernel refuses it.
    """
    if not 0 <= node < MAX_NODES:
        raise ValueError(f"expected a NUMA node from 0 to {MAX_NODES - 1}, got {node}")
    if bind_to_node(node) != 0:
        PyErr_SetFromErrno(OSError)
