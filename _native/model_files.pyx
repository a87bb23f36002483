"""Looks at the files of models, to notice changes: all of them in one call without the GIL.

A server that polls looks at every file of thousands of models while it serves. In Python each system call would take
the GIL again, wait for it while the server is busy, and make objects.

The mark of a part of a model (see `look_at_parts`) has the sum of a hash of each file: of its path in the model's
folder, its time of modification and its size. So it does not depend on the order in which a file system lists the
files.
"""

from libc.errno cimport EINTR, ELOOP, EMFILE, ENFILE, ENOENT, ENOMEM, ENOTDIR, errno
from libc.stddef cimport size_t
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, qsort, realloc
from libc.string cimport memcpy, memset, strcmp, strlen
from posix.unistd cimport close

from inferd._native.atomic cimport load32, store32
from inferd._native.files cimport (
    AT_FDCWD,
    DT_DIR,
    DT_LNK,
    DT_UNKNOWN,
    Entry,
    Stat,
    Stream,
    closedir,
    encode,
    failure,
    fdopendir,
    fstat,
    fstatat,
    is_folder,
    is_link,
    modified_ns,
    next_entry,
    open_folder,
    strdup,
)

import os
from collections.abc import Collection
from typing import NamedTuple

cdef enum:
    FIRST_CAPACITY = 64

cdef enum:
    CONFIGURATION = 0        # the parts that every model has
    REST = 1

cdef enum Kind:
    HEAD                     # the folder of a model or of a version
    CONFIGS                  # a folder of further configurations
    INNER                    # any other folder

cdef struct Folder:
    char *path               # in the model's folder, which is ""
    uint32_t part            # the part of its files, except for configurations
    Kind kind

cdef struct Part:
    char *name               # of a version's folder; NULL for the others
    uint64_t sum
    uint64_t files
    uint64_t bytes

cdef struct Place:
    uint64_t device
    uint64_t inode
    uint64_t round           # Look.round when it was seen; another one: the entry is empty

cdef struct Names:
    char **texts
    size_t count
    size_t capacity

cdef struct Look:
    # looks at one model after the other, with the same memory
    const int32_t *ended     # not 0: end the look
    uint64_t most            # files to look at
    uint64_t files
    Part *parts
    uint32_t part_count
    size_t part_capacity
    Folder *left             # folders that are still to be looked at, the next one last
    size_t left_count
    size_t left_capacity
    Place *seen              # folders that were looked at, and folders to skip: a table with open addressing
    size_t seen_count
    size_t seen_capacity     # a power of two
    uint64_t round           # the number of the model
    uint64_t folders         # the sum of the hashes of the names of folders directly in the model's
    bint is_empty            # the model's folder has nothing but hidden files
    bint has_parents         # `seen` has the folders around the model's
    bint is_crowded          # there are more than `most` files
    int error                # for which the look fails; 0: none


# ---------------------------------------------------------------------------------------------------------------------
# Helpers

cdef inline uint64_t mix(uint64_t hash) noexcept nogil:
    # the finalizer of splitmix64
    hash = (hash ^ (hash >> 30)) * <uint64_t>0xbf58476d1ce4e5b9
    hash = (hash ^ (hash >> 27)) * <uint64_t>0x94d049bb133111eb
    return hash ^ (hash >> 31)


cdef inline uint64_t hash_on(uint64_t hash, const char *text) noexcept nogil:
    # FNV-1a; begin with 0
    cdef size_t i = 0
    hash ^= <uint64_t>0xcbf29ce484222325
    while text[i]:
        hash = (hash ^ <uint8_t>text[i]) * <uint64_t>0x100000001b3
        i += 1
    return hash


cdef inline bint is_lack(int error) noexcept nogil:
    # the process lacks a resource, so nothing is known of the file
    return error == EMFILE or error == ENFILE or error == ENOMEM


cdef inline bint is_number(const char *name) noexcept nogil:
    cdef size_t i = 0
    while c'0' <= name[i] <= c'9':
        i += 1
    return i > 0 and name[i] == 0


cdef inline bint is_left_out(const char *name) noexcept nogil:
    return name[0] == c'.' or strcmp(name, b"__pycache__") == 0


cdef inline bint is_configuration(Kind kind, const char *name) noexcept nogil:
    # whether a file of this name, in a folder of this kind, belongs to the configuration
    cdef size_t size = strlen(name)
    if kind == HEAD:
        return strcmp(name, b"config.pbtxt") == 0
    return kind == CONFIGS and size > 6 and strcmp(name + size - 6, b".pbtxt") == 0


cdef bint has_room(void **items, size_t *capacity, size_t count, size_t size) noexcept nogil:
    # make room for one more item of this size after `count` items; may move the array. False: no memory
    cdef size_t most = max(<size_t>FIRST_CAPACITY, 2 * capacity[0])
    cdef void *moved
    if count < capacity[0]:
        return True
    moved = realloc(items[0], most * size)
    if moved == NULL:
        return False
    items[0] = moved
    capacity[0] = most
    return True


cdef bint names_add(Names *names, const char *name) noexcept nogil:
    # False: no memory
    if not has_room(<void **>&names.texts, &names.capacity, names.count, sizeof(char *)):
        return False
    names.texts[names.count] = strdup(name)
    if names.texts[names.count] == NULL:
        return False
    names.count += 1
    return True


cdef void names_free(Names *names) noexcept nogil:
    cdef size_t i
    for i in range(names.count):
        free(names.texts[i])
    free(names.texts)


# ---------------------------------------------------------------------------------------------------------------------
# One model

cdef bint add_part(Look *look, const char *name) noexcept nogil:
    # False: no memory
    if not has_room(<void **>&look.parts, &look.part_capacity, look.part_count, sizeof(Part)):
        return False
    look.parts[look.part_count] = Part(NULL, 0, 0, 0)
    if name != NULL:
        look.parts[look.part_count].name = strdup(name)
        if look.parts[look.part_count].name == NULL:
            return False
    look.part_count += 1
    return True


cdef bint add_folder(Look *look, const char *around, const char *name, uint32_t part, Kind kind) noexcept nogil:
    # False: no memory
    cdef size_t before = strlen(around)
    cdef size_t size = strlen(name)
    cdef char *path
    if not has_room(<void **>&look.left, &look.left_capacity, look.left_count, sizeof(Folder)):
        return False
    path = <char *>malloc(before + size + 2)
    if path == NULL:
        return False
    memcpy(path, around, before)
    if before:
        path[before] = c'/'
        before += 1
    memcpy(path + before, name, size + 1)
    look.left[look.left_count] = Folder(path, part, kind)
    look.left_count += 1
    return True


cdef Place *place_of(Place *seen, size_t capacity, uint64_t round, const Stat *about) noexcept nogil:
    # the entry of this folder, or the entry that it would get
    cdef size_t at = <size_t>mix(about.st_ino + mix(about.st_dev))
    cdef Place *place
    while True:
        place = &seen[at & (capacity - 1)]
        if place.round != round or (place.inode == about.st_ino and place.device == about.st_dev):
            return place
        at += 1


cdef bint grow_seen(Look *look) noexcept nogil:
    cdef size_t capacity = max(<size_t>FIRST_CAPACITY, 2 * look.seen_capacity)
    cdef Place *seen = <Place *>calloc(capacity, sizeof(Place))
    cdef Stat about
    cdef size_t i
    if seen == NULL:
        return False
    for i in range(look.seen_capacity):
        if look.seen[i].round == look.round:
            about.st_dev = look.seen[i].device
            about.st_ino = look.seen[i].inode
            place_of(seen, capacity, look.round, &about)[0] = look.seen[i]
    free(look.seen)
    look.seen = seen
    look.seen_capacity = capacity
    return True


cdef bint is_new(Look *look, const Stat *about) noexcept nogil:
    # whether the folder was not seen before; from now on it is
    cdef Place *place
    if 2 * look.seen_count >= look.seen_capacity and not grow_seen(look):
        look.error = ENOMEM
        return False
    place = place_of(look.seen, look.seen_capacity, look.round, about)
    if place.round == look.round:
        return False
    place[0] = Place(about.st_dev, about.st_ino, look.round)
    look.seen_count += 1
    return True


cdef void see_parents(Look *look, int top) noexcept nogil:
    # Mark the folders around the model's as seen, so that links do not lead there: from / the look would go through the
    # whole system.
    cdef int at = top
    cdef int above
    cdef Stat about
    cdef bint new = not look.has_parents
    look.has_parents = True
    while new:
        above = open_folder(at, b"..")
        if above < 0 and is_lack(errno):
            look.error = errno
        if at != top:
            close(at)
        at = above
        if at < 0:
            return
        new = fstat(at, &about) == 0 and is_new(look, &about)
    if at != top:
        close(at)


cdef int compare(const void *a, const void *b) noexcept nogil:
    return strcmp((<const Folder *>a).path, (<const Folder *>b).path)


cdef void note_file(Look *look, const Folder *folder, uint64_t hash, const char *name,
                    const Stat *about) noexcept nogil:
    cdef Part *part = &look.parts[CONFIGURATION if is_configuration(folder.kind, name) else folder.part]
    look.files += 1
    if look.files > look.most:
        look.is_crowded = True
        return
    hash = mix(hash_on(hash, name) + mix(<uint64_t>modified_ns(about)))
    part.sum += mix(hash + mix(<uint64_t>about.st_size))
    part.files += 1
    part.bytes += <uint64_t>about.st_size


cdef void look_at_folder(Look *look, const Folder *folder, Stream *stream, int fd, int top) noexcept nogil:
    cdef uint64_t hash = hash_on(0, folder.path)
    cdef size_t begin = look.left_count
    cdef bint is_top = fd == top
    cdef uint32_t part
    cdef Kind kind
    cdef bint inner
    cdef Entry *entry
    cdef char *name
    cdef Stat about
    while not look.error and not look.is_crowded:
        entry = next_entry(stream, &look.error)
        if entry == NULL:
            break
        name = entry.d_name
        if is_top and name[0] != c'.':
            look.is_empty = False
        if is_left_out(name):
            continue
        inner = entry.d_type == DT_DIR
        if not inner:
            if fstatat(fd, name, &about, 0) != 0:
                if is_lack(errno):
                    look.error = errno
                continue
            inner = is_folder(&about)
            if inner and (entry.d_type == DT_LNK or (entry.d_type == DT_UNKNOWN and is_link(fd, name))):
                see_parents(look, top)
        if not inner:
            note_file(look, folder, hash, name, &about)
            continue
        kind = INNER
        part = folder.part
        if is_top:
            look.folders += mix(hash_on(1, name))
        if folder.kind == HEAD and strcmp(name, b"configs") == 0:
            kind = CONFIGS
        elif is_top and is_number(name):
            kind = HEAD
            part = look.part_count
            if not add_part(look, name):
                look.error = ENOMEM
        if not look.error and not add_folder(look, folder.path, name, part, kind):
            look.error = ENOMEM
    if not is_lack(look.error):
        look.error = 0  # for example, the folder has gone meanwhile
    # If several paths lead to a folder, their order decides by which it is looked at, not the order of the listing.
    qsort(look.left + begin, look.left_count - begin, sizeof(Folder), compare)


cdef void look_clear(Look *look) noexcept nogil:
    # for the next model; keeps the memory
    cdef size_t i
    for i in range(look.part_count):
        free(look.parts[i].name)
    for i in range(look.left_count):
        free(look.left[i].path)
    look.part_count = 0
    look.left_count = look.seen_count = 0
    look.round += 1
    look.files = look.folders = 0
    look.is_empty = True
    look.has_parents = look.is_crowded = False
    look.error = 0


cdef void look_free(Look *look) noexcept nogil:
    look_clear(look)
    free(look.parts)
    free(look.left)
    free(look.seen)


cdef int look_at(Look *look, int at, const char *path) noexcept nogil:
    # Look at one model. Returns the error of its folder, or one of `is_lack`; EINTR: the look was ended.
    cdef int top = open_folder(at, path)
    cdef int result = errno if top < 0 else 0
    cdef Stream *head
    look_clear(look)
    if top < 0:
        return result
    head = fdopendir(top)
    if head == NULL:
        close(top)
        return ENOMEM
    if add_part(look, NULL) and add_part(look, NULL) and add_folder(look, b"", b"", REST, HEAD):
        look_inside(look, head, top)
    else:
        look.error = ENOMEM
    closedir(head)
    return look.error


cdef void look_inside(Look *look, Stream *head, int top) noexcept nogil:
    # look at all folders, from the one in `left` on
    cdef Folder folder
    cdef Stream *stream
    cdef Stat about
    cdef int fd
    while look.left_count and not look.error and not look.is_crowded:
        if look.ended != NULL and load32(look.ended):
            look.error = EINTR
            return
        look.left_count -= 1
        folder = look.left[look.left_count]
        fd = open_folder(top, folder.path) if folder.path[0] else top
        stream = head if fd == top else NULL
        if fd < 0:
            if is_lack(errno):
                look.error = errno
        elif fstat(fd, &about) == 0 and is_new(look, &about):
            if stream == NULL:
                stream = fdopendir(fd)
            if stream == NULL:
                look.error = ENOMEM
            else:
                look_at_folder(look, &folder, stream, fd, top)
        if stream != NULL and stream != head:
            closedir(stream)
        elif fd >= 0 and fd != top:
            close(fd)
        free(folder.path)


# ---------------------------------------------------------------------------------------------------------------------
# Folders of folders

cdef int list_folders(const char *path, Names *names, bint *is_empty) noexcept nogil:
    # the folders directly in a folder, also hidden ones, and whether it has nothing but hidden files; returns the error
    cdef int fd = open_folder(AT_FDCWD, path)
    cdef Stream *stream = fdopendir(fd) if fd >= 0 else NULL
    cdef int error = errno if stream == NULL else 0
    cdef Entry *entry
    cdef Stat about
    is_empty[0] = True
    if stream == NULL:
        if fd >= 0:
            close(fd)
        return error
    while not error:
        entry = next_entry(stream, &error)
        if entry == NULL:
            break
        if strcmp(entry.d_name, b".") == 0 or strcmp(entry.d_name, b"..") == 0:
            continue
        is_empty[0] = is_empty[0] and entry.d_name[0] == c'.'
        if entry.d_type == DT_DIR or (fstatat(fd, entry.d_name, &about, 0) == 0 and is_folder(&about)):
            if not names_add(names, entry.d_name):
                error = ENOMEM
    closedir(stream)
    return error


cdef uint64_t digest_of(const Look *look) noexcept nogil:
    # the sum is enough: the hashes include the paths, which differ from part to part
    cdef uint64_t digest = look.folders
    cdef uint32_t i
    for i in range(look.part_count):
        digest += look.parts[i].sum
    return digest


cdef int look_at_all(Look *look, int root, const Names *names, uint64_t *found) noexcept nogil:
    # Writes the digest of each model, which is not 0, to `found`, and leaves 0 where the folder is not a model. Returns
    # the error with which the look fails.
    cdef int error
    cdef size_t i
    for i in range(names.count):
        if is_left_out(names.texts[i]):
            continue
        error = look_at(look, root, names.texts[i])
        if is_lack(error) or error == EINTR:
            return error
        if error == ENOENT or error == ENOTDIR or error == ELOOP or (error == 0 and look.is_empty):
            continue
        found[i] = max(<uint64_t>1, <uint64_t>error if error else digest_of(look))
    return 0


# ---------------------------------------------------------------------------------------------------------------------
# For Python

class Mark(NamedTuple):
    """The state of the files of a part of a model.

    Attributes:
        digest: changes when a path, a time of modification or a size changes.
        files: the number of files.
        size: of all files, in bytes.
    """

    digest: int
    files: int
    size: int


NO_FILES = Mark(0, 0, 0)


def look_at_parts(path: str, most: int) -> tuple[dict[str, Mark], bool]:
    """The marks of a model's files, by the part that they belong to; hidden files and `__pycache__` do not count.

    Links are followed once into each folder, but not to a folder around the model's. Files and folders that cannot be
    looked at count as missing.

    Args:
        path: of the model's folder.
        most: files to look at.

    Returns:
        The marks, by the names of the versions' folders, "configuration" (also of versions) and "rest"; and whether
        there are more than `most` files.

    Raises:
        OSError: the process has no descriptor or no memory for it.
    """
    cdef Look look
    cdef bytes encoded = encode(path)
    cdef const char *folder = encoded
    cdef dict found = {"configuration": NO_FILES, "rest": NO_FILES}
    cdef int error
    cdef uint32_t i
    memset(&look, 0, sizeof(look))
    look.most = most
    try:
        with nogil:
            error = look_at(&look, AT_FDCWD, folder)
        if is_lack(error):
            raise failure(error, path)
        for i in range(look.part_count):
            part = &look.parts[i]
            name = part.name.decode() if part.name != NULL else "rest" if i == REST else "configuration"
            found[name] = Mark(part.sum, part.files, part.bytes) if part.files else NO_FILES
        return found, look.is_crowded
    finally:
        look_free(&look)


def folders_in(path: str) -> tuple[list[str], bool]:
    """The names of the folders directly in a folder, and whether it has nothing but hidden files.

    Raises:
        OSError: it cannot be listed.
    """
    cdef bytes encoded = encode(path)
    cdef const char *folder = encoded
    cdef Names names = Names(NULL, 0, 0)
    cdef bint is_empty = True
    cdef int error
    cdef size_t i
    try:
        with nogil:
            error = list_folders(folder, &names, &is_empty)
        if error:
            raise failure(error, path)
        return [os.fsdecode(names.texts[i]) for i in range(names.count)], is_empty
    finally:
        names_free(&names)


cdef class Watch:
    """Looks at whole repositories, on any thread, until `end` is called."""

    cdef int32_t ended

    def end(self) -> None:
        """End the looks that are under way, and all later ones."""
        store32(&self.ended, 1)

    def look(self, path: str, but: Collection[str], most: int) -> dict[str, int]:
        """The models of a repository: the folders that have more than hidden files.

        Args:
            path: of the repository.
            but: names of folders to skip; hidden ones are skipped, too.
            most: files to look at in each model.

        Returns:
            A number of 64 bits for each name. It changes when the mark of a part changes, or the name of a folder
            directly in the model's.

        Raises:
            OSError: the repository cannot be listed, or the process has no descriptor or no memory for it.
            InterruptedError: `end` was called.
        """
        cdef bytes encoded = encode(path)
        cdef const char *folder = encoded
        cdef Names names = Names(NULL, 0, 0)
        cdef uint64_t *found = NULL
        cdef Look look
        cdef bint is_empty
        cdef int root = -1
        cdef int error
        cdef size_t i
        memset(&look, 0, sizeof(look))
        look.ended = &self.ended
        look.most = most
        try:
            with nogil:
                error = list_folders(folder, &names, &is_empty)
            texts = [os.fsdecode(names.texts[i]) for i in range(names.count)]
            for i in range(names.count):
                if texts[i] in but:
                    names.texts[i][0] = c'.'
            found = <uint64_t *>calloc(names.count + 1, sizeof(uint64_t))
            if found == NULL:
                raise MemoryError
            if not error:
                with nogil:
                    root = open_folder(AT_FDCWD, folder)
                    error = errno if root < 0 else look_at_all(&look, root, &names, found)
            if error:
                raise failure(error, path)
            return {texts[i]: found[i] for i in range(names.count) if found[i]}
        finally:
            if root >= 0:
                close(root)
            free(found)
            names_free(&names)
            look_free(&look)
