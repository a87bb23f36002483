# Folders and files by system calls, for code that runs without the GIL.

from libc.errno cimport errno
from libc.stdint cimport int64_t, uint8_t, uint64_t

import os

cdef extern from *:
    """
    #include <dirent.h>
    #include <fcntl.h>
    #include <stdint.h>
    #include <string.h>
    #include <sys/stat.h>
    typedef struct stat inferd_stat;
    static inline int inferd_open_folder(int at, const char *path) {
        return openat(at, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NONBLOCK);
    }
    static inline int inferd_open_file(int at, const char *path) {
        return openat(at, path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    }
    static inline int inferd_is_regular(const inferd_stat *about) { return S_ISREG(about->st_mode); }
    static inline int inferd_is_folder(const inferd_stat *about) { return S_ISDIR(about->st_mode); }
    static inline int inferd_is_link(int at, const char *name) {
        inferd_stat about;
        return fstatat(at, name, &about, AT_SYMLINK_NOFOLLOW) == 0 && S_ISLNK(about.st_mode);
    }
    static inline int64_t inferd_modified_ns(const inferd_stat *about) {
        return (int64_t)about->st_mtim.tv_sec * 1000000000 + about->st_mtim.tv_nsec;
    }
    """
    ctypedef struct Stat "inferd_stat":
        uint64_t st_dev
        uint64_t st_ino
        int64_t st_size
    ctypedef struct Stream "DIR":
        pass
    ctypedef struct Entry "struct dirent":
        uint8_t d_type
        char d_name[1]
    int DT_DIR, DT_LNK, DT_UNKNOWN
    int AT_FDCWD
    int open_folder "inferd_open_folder"(int at, const char *path) nogil
    int open_file "inferd_open_file"(int at, const char *path) nogil
    bint is_regular "inferd_is_regular"(const Stat *about) nogil
    bint is_folder "inferd_is_folder"(const Stat *about) nogil
    bint is_link "inferd_is_link"(int at, const char *name) nogil
    int64_t modified_ns "inferd_modified_ns"(const Stat *about) nogil
    int fstat(int fd, Stat *about) nogil
    int fstatat(int at, const char *name, Stat *about, int flags) nogil
    Stream *fdopendir(int fd) nogil
    Entry *readdir(Stream *stream) nogil
    int closedir(Stream *stream) nogil
    char *strdup(const char *text) nogil

cdef inline Entry *next_entry(Stream *stream, int *error) noexcept nogil:
    # NULL at the end, or with the error that ends the listing
    cdef Entry *entry
    (&errno)[0] = 0
    entry = readdir(stream)
    error[0] = errno if entry == NULL else 0
    return entry


cdef inline bytes encode(object path):
    cdef inline bytes encoded = os.fsencode(path)
    if b"\0" in encoded:
        raise ValueError(f"no path has a null byte: {path!r}")
    return encoded


cdef inline object failure(int error, object path):
    return OSError(error, os.strerror(error), path)
