# What the fuzz targets have in common. Text that each includes, because tests are no packages.

import os
import sys
import traceback

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t
from libc.stdlib cimport malloc

ctypedef int (*target_fn)(const uint8_t *data, size_t size) noexcept

cdef extern from *:
    """
    int LLVMFuzzerRunDriver(int *argc, char ***argv, int (*target)(const uint8_t *data, size_t size));
    """
    int LLVMFuzzerRunDriver(int *argc, char ***argv, target_fn target) noexcept


cdef void fail() noexcept:
    # in an except block of a target
    traceback.print_exc()
    sys.stderr.flush()
    os.abort()      # libFuzzer writes the input to a file


cdef object drive(argv, target_fn target):
    # hands the process over to libFuzzer, with these arguments
    cdef list arguments = [os.fsencode(a) for a in argv]
    cdef char **c_argv = <char **>malloc((len(arguments) + 1) * sizeof(char *))
    cdef int argc = <int>len(arguments)
    cdef int i
    for i in range(argc):
        c_argv[i] = arguments[i]
    c_argv[argc] = NULL
    sys.exit(LLVMFuzzerRunDriver(&argc, &c_argv, target))
