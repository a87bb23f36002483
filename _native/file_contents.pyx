"""Reads small files, each in one call without the GIL: Python would wait for the GIL of a busy server in each step."""

from libc.errno cimport EINTR, EINVAL, ENOENT, ENOMEM, errno
from libc.stddef cimport size_t
from libc.stdint cimport int64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcmp, strcmp
from posix.unistd cimport close, read

from inferd._native.files cimport (
    AT_FDCWD,
    DT_DIR,
    Entry,
    Stat,
    Stream,
    closedir,
    encode,
    failure,
    fdopendir,
    fstat,
    fstatat,
    is_regular,
    next_entry,
    open_file,
    open_folder,
    strdup,
)

import os

cdef enum:
    MOST_COMPARED = 256      # bytes of the longest beginning that `find_beginning` takes


cdef int read_upto(int fd, char *data, size_t most, size_t *size) noexcept nogil:
    # Read up to the end of the file, at most `most` bytes. Returns the error; 0: none.
    cdef ssize_t got
    size[0] = 0
    while size[0] < most:
        got = read(fd, data + size[0], most - size[0])
        if got < 0 and errno != EINTR:
            return errno
        if got == 0:
            break
        size[0] += max(got, 0)
    return 0


cdef int read_opened(int fd, size_t limit, char **data, size_t *size) noexcept nogil:
    # returns the error; `data` is from malloc
    cdef size_t capacity
    cdef size_t got
    cdef char *grown
    cdef int error = 0
    cdef Stat about
    if fstat(fd, &about) != 0:
        return errno
    if not is_regular(&about):
        return EINVAL
    capacity = min(limit, <size_t>about.st_size) + 1
    while True:  # once more if the file has grown
        grown = <char *>realloc(data[0], capacity)
        if grown == NULL:
            return ENOMEM
        data[0] = grown
        error = read_upto(fd, grown + size[0], capacity - size[0], &got)
        size[0] += got
        if error or size[0] < capacity or size[0] > limit:
            return error
        capacity = min(limit + 1, 2 * capacity)


cdef int begins_with(int folder, const char *name, const char *beginning, size_t size, bint *found) noexcept nogil:
    # `found` says whether the file begins with these bytes. Returns the error.
    cdef char[MOST_COMPARED] data
    cdef size_t got
    cdef int fd = open_file(folder, name)
    cdef int error
    if fd < 0:
        return errno
    error = read_upto(fd, data, size, &got)
    found[0] = got == size and memcmp(data, beginning, size) == 0
    close(fd)
    return error


cdef int look_for(int fd, Stream *stream, const char *beginning, size_t size, int64_t below,
                  char **name) noexcept nogil:
    # See `find_beginning`. Returns the error: of the file `name` if that is set, else of the folder.
    cdef Entry *entry
    cdef Stat about
    cdef bint found
    cdef int error
    while True:
        entry = next_entry(stream, &error)
        if entry == NULL:
            return error
        if entry.d_type == DT_DIR or fstatat(fd, entry.d_name, &about, 0) != 0:
            continue
        if not is_regular(&about) or about.st_size >= below:
            continue
        found = False
        error = begins_with(fd, entry.d_name, beginning, size, &found)
        if error == ENOENT:
            continue  # the file was removed meanwhile
        if error or (found and (name[0] == NULL or strcmp(entry.d_name, name[0]) < 0)):
            free(name[0])
            name[0] = strdup(entry.d_name)
        if error or (found and name[0] == NULL):
            return error or ENOMEM


def read_regular(path: str, limit: int) -> bytes:
    """The content of a regular file; `limit` + 1 bytes of it if it has more than `limit`.

    Raises:
        OSError: it cannot be read; EINVAL: it is not a regular file.
        MemoryError: there is no memory for the content.
    """
    cdef bytes encoded = encode(path)
    cdef const char *file = encoded
    cdef size_t most = limit
    cdef size_t size = 0
    cdef char *data = NULL
    cdef int error
    cdef int fd
    try:
        with nogil:
            fd = open_file(AT_FDCWD, file)
            error = errno if fd < 0 else read_opened(fd, most, &data, &size)
            if fd >= 0:
                close(fd)
        if error == ENOMEM:
            raise MemoryError
        if error:
            raise failure(error, path)
        return data[:size]
    finally:
        free(data)


def find_beginning(path: str, beginning: bytes, below: int) -> str | None:
    """The first file of a folder, by name, with less than `below` bytes that begins with `beginning`; None: none.

    Raises:
        OSError: the folder, or such a file, cannot be read.
        ValueError: `beginning` is too long.
    """
    cdef bytes encoded = encode(path)
    cdef const char *folder = encoded
    cdef const char *wanted = beginning
    cdef size_t size = len(beginning)
    cdef int64_t limit = below
    cdef Stream *stream = NULL
    cdef char *name = NULL
    cdef int error
    cdef int fd
    if size > MOST_COMPARED:
        raise ValueError(f"expected at most {MOST_COMPARED} bytes, got {size}")
    try:
        with nogil:
            fd = open_folder(AT_FDCWD, folder)
            stream = fdopendir(fd) if fd >= 0 else NULL
            error = errno if stream == NULL else look_for(fd, stream, wanted, size, limit, &name)
            if stream != NULL:
                closedir(stream)
            elif fd >= 0:
                close(fd)
        if error:
            raise failure(error, path if name == NULL else os.path.join(path, os.fsdecode(name)))
        return None if name == NULL else os.fsdecode(name)
    finally:
        free(name)
