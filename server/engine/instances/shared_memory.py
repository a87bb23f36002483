"""Shared memory of clients: the rights to register objects, and the trust in their clients.

Without `shared`, a client may use shared memory only if the kernel reports its user, as on unix sockets, and only
objects that this user owns; users do not see each other's regions. With `shared` every caller may register every object
that the server can open, and use every region, as in Triton.

Regions of trusted clients are used in place: models read inputs from them and write results to them. The server first
copies the contents of any other region, because its client could change a tensor after the check.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from typing import Literal

from inferd._native.cuda import closing
from inferd._native.cuda.driver import CudaError
from inferd._native.cuda.region import add_cuda
from inferd._native.memory.shm import CUDA, DISABLED, NONE, SHARED, SYSTEM, RegionError, Regions, RegionStatus
from inferd._native.service.infer import InferService
from inferd.server.engine.instances.gpu import Gpus
from inferd.server.errors import (
    AlreadyExists,
    Denied,
    Exhausted,
    Internal,
    InvalidArgument,
    NotFound,
    ServerError,
    Status,
    Unimplemented,
    system_says,
)
from inferd.server.settings import DEFAULTS

__all__ = ["CUDA", "SYSTEM", "SharedMemory", "SharedMemoryPolicy", "User"]

DIRECTORY = "/dev/shm"
MOST_COPIED = 2**31 - 1
"""Bytes of one input that are copied out of a region, by default: as many as a message of protobuf may have."""
RESERVED_PREFIX = "triton_python_backend_shm_region_"
LONGEST_NAME = 255
LONGEST_KEY = 1 + LONGEST_NAME
"""The server keeps the key of each region, so its leading slashes count."""

_FAMILIES: dict[int, type[ServerError]] = {
    family.status: family for family in (AlreadyExists, Exhausted, Internal, InvalidArgument)
}


@dataclass(frozen=True, slots=True)
class SharedMemoryPolicy:
    """The rights of clients.

    Attributes:
        shared: every caller may register objects, and use all regions.
        access: use every region in place ("map"), copy the content of every region first ("copy"), use regions of the
            server's own user in place and copy others ("auto"), or let no client register any ("none").
        prefixes: how keys must begin; empty: any way.
        max_regions: regions at a time.
        max_byte_size: bytes of all of them.
        user_regions, user_byte_size: the same for the regions of one user; None: half of that for all. Without effect
            with `shared`.
        max_copied: bytes of one input that are copied out of a region.
    """

    shared: bool = DEFAULTS.allow_client_shm
    access: Literal["auto", "copy", "map", "none"] = DEFAULTS.client_shm_access
    prefixes: tuple[str, ...] = ()
    max_regions: int = DEFAULTS.client_shm_max_regions
    max_byte_size: int = DEFAULTS.client_shm_max_byte_size
    user_regions: int | None = None
    user_byte_size: int | None = None
    max_copied: int = MOST_COPIED


@dataclass(frozen=True, slots=True)
class User:
    """The process at the other end of a unix socket, from the kernel."""

    uid: int
    pid: int  # 0: the server cannot see the process


class SharedMemory:
    """The regions of all clients, under one policy."""

    def __init__(self, policy: SharedMemoryPolicy | None = None, gpus: Gpus | None = None) -> None:
        self.policy = policy or SharedMemoryPolicy()
        self._gpus = gpus or Gpus()
        shared = self.policy.shared
        self.regions = Regions(
            max_count=self.policy.max_regions,
            max_byte_size=self.policy.max_byte_size,
            scope_count=None if shared else _of_user(self.policy.user_regions, self.policy.max_regions),
            scope_byte_size=None if shared else _of_user(self.policy.user_byte_size, self.policy.max_byte_size),
        )

    def serve(self, infer: InferService) -> None:
        """Let inference requests refer to the regions."""
        if self.policy.access != "none":
            infer.use_regions(self.regions, shared=self.policy.shared, max_copied=self.policy.max_copied)

    def scope(self, user: User | None) -> int:
        """The scope of a caller's names; NONE for a caller that may not use shared memory."""
        if self.policy.access == "none":
            return NONE
        if self.policy.shared:
            return SHARED
        return NONE if user is None else user.uid

    def register_system(
        self, user: User | None, name: str, key: str, offset: int, byte_size: int, owner: int = 0
    ) -> None:
        """Register a part of a shared memory object.

        Args:
            user: the caller; None when it is not known.
            name: of the region.
            key: of the object: its name in /dev/shm, usually behind a slash.
            offset, byte_size: of the part, unchecked.
            owner: a number of the caller, whose regions `withdraw` unregisters; 0 for a region that stays.

        Raises:
            ServerError: with Triton's texts.
        """
        scope = self._required_scope(user)
        check_name(name)
        fd, writable = _opened(key, self._object_name(name, key))
        try:
            found = os.fstat(fd)
            self._check_object(found, user, name, offset, byte_size)
            self.regions.add_system(
                scope,
                name,
                key,
                fd,
                offset,
                byte_size,
                trusted=writable and self._trusts(user, found.st_uid),
                writable=writable,
                reopened=self._is_own(user, found.st_uid),
                owner=owner,
            )
        except RegionError as error:
            raise _FAMILIES[error.status](str(error)) from error
        finally:
            os.close(fd)

    def register_cuda(
        self, user: User | None, name: str, handle: bytes, device: int, byte_size: int, owner: int = 0
    ) -> None:
        """Register memory of a GPU that a client has exported. Blocks: the driver opens it.

        Args:
            user: the caller; None when it is not known.
            name: of the region.
            handle: the 64 bytes of its cudaIpcMemHandle_t.
            device: the number of the GPU.
            byte_size: of the region, which begins where the handle points.
            owner: see `register_system`.

        Raises:
            ServerError: with Triton's texts.
        """
        scope = self._required_scope(user)
        check_name(name)
        failed = f"failed to register CUDA shared memory region '{name}'"
        if not self._gpus.count:
            raise InvalidArgument(f"{failed}: GPUs not supported: the server has no CUDA device")
        if not 0 <= device < self._gpus.count:
            raise InvalidArgument(
                f"{failed}: invalid args: expected device_id 0 to {self._gpus.count - 1}, got {device}"
            )
        try:
            trusted = self._trusts(user)
            add_cuda(self.regions, scope, name, handle, device, byte_size, trusted=trusted, owner=owner)
        except (ValueError, CudaError) as error:
            closing.wait_closed()  # the client may free the memory now
            raise InvalidArgument(f"{failed}: invalid args: {error}") from error
        except RegionError as error:
            closing.wait_closed()
            raise _FAMILIES[error.status](str(error)) from error

    def unregister(self, user: User | None, kind: int, name: str) -> None:
        """Unregister one region, or with an empty name all of a kind; a missing region is no error.

        Blocks until regions of a GPU that no request uses are closed: then their clients may free them.
        """
        scope = self._required_scope(user)
        if name:
            self.regions.remove(scope, kind, name)
        else:
            self.regions.remove_all(scope, kind)
        if kind == CUDA:
            closing.wait_closed()

    def withdraw(self, owner: int) -> None:
        """Unregister the regions of an owner."""
        self.regions.remove_owned(owner)

    def status(self, user: User | None, kind: int, name: str) -> list[RegionStatus]:
        """The status of one region, or with an empty name of all regions of a kind that the caller may use.

        Raises:
            NotFound: there is no such region of this kind.
        """
        scope = self.scope(user)
        if not name:
            return self.regions.entries(scope, kind)
        found = self.regions.find(scope, name)
        if found is None:
            raise NotFound(f"Unable to find {_word(kind)} shared memory region: '{name[:LONGEST_NAME]}'")
        if found.kind != kind:
            raise NotFound(
                f"The region named '{name}' is registered as {_title(found.kind)} shared memory, not {_title(kind)} "
                "shared memory"
            )
        return [found]

    def close(self) -> None:
        """Unregister everything. Blocks until all regions that no request uses are closed."""
        self.regions.close()
        closing.wait_closed()

    def _required_scope(self, user: User | None) -> int:
        scope = self.scope(user)
        if scope == NONE:
            raise Unimplemented(DISABLED)
        return scope

    def _object_name(self, name: str, key: str) -> str:
        """The name of the object in its directory."""
        found, begin = key.lstrip("/"), f"cannot register shared memory region '{name}'"
        shown = key[:LONGEST_NAME]
        if found.startswith(RESERVED_PREFIX):
            raise InvalidArgument(
                f"{begin} with key '{shown}' as the key contains the reserved prefix '{RESERVED_PREFIX}'"
            )
        if not is_object_name(found) or len(key.encode()) > LONGEST_KEY:
            raise InvalidArgument(
                f"{begin} - invalid shm key '{shown}': expected a slash and the name of an object in {DIRECTORY}, "
                f"which has at most {LONGEST_NAME} bytes and no slash"
            )
        if self.policy.prefixes and not found.startswith(self.policy.prefixes):
            raise Denied(
                Status.PERMISSION_DENIED,
                f"{begin} with key '{shown}': the server takes keys that begin with "
                f"{' or '.join(map(repr, self.policy.prefixes))} (--client-shm-prefix)",
            )
        return found

    def _check_object(self, found: os.stat_result, user: User | None, name: str, offset: int, byte_size: int) -> None:
        if not stat.S_ISREG(found.st_mode):
            raise InvalidArgument(f"failed to register shared memory region '{name}': invalid args: no regular object")
        if not self.policy.shared and (user is None or found.st_uid != user.uid):
            raise Denied(
                Status.PERMISSION_DENIED,
                f"failed to register shared memory region '{name}': its object belongs to user {found.st_uid}, "
                f"expected the caller's user {user.uid if user else 'unknown'}",
            )
        if byte_size <= 0 or offset + byte_size > found.st_size:
            raise InvalidArgument(
                f"failed to register shared memory region '{name}': invalid args: expected a part of the object's "
                f"{found.st_size} bytes, got {byte_size} bytes from offset {offset}"
            )

    def _trusts(self, user: User | None, owner: int | None = None) -> bool:
        """Whether a region is used in place; `owner` is the user that owns its object, if there is one.

        A visible process of the server's own user could kill the server anyway, and owns the files that the server
        reads: trusting it gives it no further power.
        """
        if self.policy.access != "auto":
            return self.policy.access == "map"
        return self._is_own(user, owner)

    def _is_own(self, user: User | None, owner: int | None) -> bool:
        own = os.geteuid()
        return user is not None and user.uid == own and owner in (own, None) and user.pid > 0


def _of_user(most: int | None, of_all: int) -> int:
    """The limit of one user; by default half of the limit of all, so that no user can take all."""
    return -(-of_all // 2) if most is None else min(most, of_all)


def check_name(name: str) -> None:
    """Raise InvalidArgument unless a region may have this name."""
    if not 0 < len(name.encode()) <= LONGEST_NAME:
        raise InvalidArgument(
            f"failed to register shared memory region: invalid args: expected a name of 1 to {LONGEST_NAME} bytes, got "
            f"{len(name.encode())}"
        )


def is_object_name(text: str) -> bool:
    """Whether this can be the name of a shared memory object in DIRECTORY, which also has semaphores."""
    return (
        0 < len(text.encode()) <= LONGEST_NAME
        and not set(text) & {"/", "\0"}
        and text not in (".", "..")
        and not text.startswith("sem.")
    )


def _opened(key: str, name: str) -> tuple[int, bool]:
    """A descriptor of the object, and whether it may be written to. Links are not followed."""
    path = f"{DIRECTORY}/{name}"
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        try:
            return os.open(path, os.O_RDWR | flags), True
        except PermissionError:
            return os.open(path, os.O_RDONLY | flags), False
    except OSError as error:
        text = f"Unable to open shared memory region: '{key}'"
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise Exhausted(f"{text}: {system_says(error)}") from error
        raise Internal(text) from error


def _word(kind: int) -> str:
    return "system" if kind == SYSTEM else "cuda"


def _title(kind: int) -> str:
    return "system" if kind == SYSTEM else "CUDA"
