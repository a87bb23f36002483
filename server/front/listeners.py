"""The sockets on which a server listens: how they are opened, and the files of unix sockets.

The file of a unix socket survives a process that was killed. Such a stale file is replaced; a socket on which a process
answers is not. The file is removed when the server ends, unless it then belongs to another server.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import grp
import logging
import os
import pwd
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from inferd.server.addresses import Address, Bind, TcpAddress, UnixAddress
from inferd.server.front.tls import Credentials
from inferd.server.settings import DEFAULTS

log = logging.getLogger("inferd.front")

BACKLOG = 4096
ACCEPT_PAUSE = 0.1  # seconds
AT_ONCE = 64  # connections, then other callbacks have their turn
LOCK_TRIES, LOCK_PAUSE = 10, 0.02  # seconds

_UNUSABLE = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
"""Errors for one of a host's addresses that this machine does not have: the others are used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ListenPolicy:
    """How a door listens. TLS is for TCP; a unix socket is guarded by its mode and owner."""

    reuse_port: bool = False  # share TCP ports with other processes (SO_REUSEPORT)
    unix_mode: int = DEFAULTS.unix_mode
    unix_owner: str = DEFAULTS.grpc_unix_owner  # USER, USER:GROUP or :GROUP, names or numbers; "": the process's own
    credentials: Credentials | None = None
    encrypted: bool = True  # with credentials, TCP addresses have TLS unless their rules say otherwise

    def at(self, bind: Bind) -> ListenPolicy:
        """The policy with the address's own rules."""
        rules = bind.rules
        encrypted = not isinstance(bind.address, UnixAddress) and (self.encrypted if rules.tls is None else rules.tls)
        return replace(
            self,
            unix_mode=self.unix_mode if rules.mode is None else rules.mode,
            unix_owner=self.unix_owner if rules.owner is None else rules.owner,
            credentials=self.credentials if encrypted else None,
        )


class InUseError(OSError):
    """Another process listens there; the text begins like Triton's."""

    def __init__(self, address: Address) -> None:
        option = "--grpc-address" if isinstance(address, UnixAddress) else "--grpc-port or --grpc-address"
        super().__init__(errno.EADDRINUSE, f"Socket '{address}' already in use: choose another with {option}")

    def __str__(self) -> str:
        return str(self.strerror)


class ListenError(OSError):
    """The server cannot listen on the address; the text has the address and the reason."""


# ---------------------------------------------------------------------------------------------------------------------
# TCP


def open_tcp(address: TcpAddress, *, reuse_port: bool = False) -> list[socket.socket]:
    """Bound sockets that do not listen yet: one for each address of the host that this machine has, all on one port.

    Raises:
        InUseError, ListenError: no socket can be bound there.
    """
    sockets: list[socket.socket] = []
    port = address.port
    failure: OSError | None = None
    try:
        for family, where in _resolved(address):
            try:
                sockets.append(_bound(family, (where[0], port, *where[2:]), reuse_port))
            except OSError as error:
                if error.errno not in _UNUSABLE:
                    raise
                failure = error
            else:
                port = sockets[0].getsockname()[1]
        if not sockets and failure is not None:
            raise failure
    except OSError as error:
        for opened in sockets:
            opened.close()
        raise explained(address, error) from error
    return sockets


def _resolved(address: TcpAddress) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    """The family and the address of each socket, in the form of `bind`; that of IPv6 has a scope (`fe80::1%eth0`)."""
    found = socket.getaddrinfo(
        address.host or None, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
    )
    return list(dict.fromkeys((family, where) for family, _, _, _, where in found))


def _bound(family: socket.AddressFamily, where: tuple[Any, ...], reuse_port: bool) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            # the wildcard includes IPv4, as in gRPC's C core; no other address does
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(where[0] != "::"))
        made.bind(where)
        made.setblocking(False)
    except BaseException:
        made.close()
        raise
    return made


def explained(address: Address, error: OSError) -> OSError:
    """The error with the address, for the operator."""
    if error.errno == errno.EADDRINUSE:
        return InUseError(address)
    return ListenError(f"cannot listen on {address}: {error.strerror or error}")


def try_to_listen(address: Address, policy: ListenPolicy) -> None:
    """Open the sockets of an address and close them again, so that a wrong address is told before models are loaded.

    Raises:
        OSError: a socket cannot be opened; the text says why.
    """
    if isinstance(address, UnixAddress):
        _try_unix(address, policy)
        return
    for each in open_tcp(address, reuse_port=policy.reuse_port):
        each.close()


def why_not(address: TcpAddress, *, reuse_port: bool) -> OSError:
    """The error of binding `address`, for a library that does not report it."""
    try:
        for opened in open_tcp(address, reuse_port=reuse_port):
            opened.close()
    except OSError as error:
        return error
    return ListenError(f"cannot listen on {address}")


# ---------------------------------------------------------------------------------------------------------------------
# Unix sockets


class UnixFile:
    """The file of a unix socket that this process has bound."""

    def __init__(self, path: str) -> None:
        self.path = Path(path).absolute()
        self._identity = _identity(self.path)

    def remove(self) -> None:
        """Remove it, unless another process has replaced it. Repeated calls have no effect."""
        with suppress(OSError):
            if _identity(self.path) == self._identity:
                self.path.unlink()


def _identity(path: Path) -> tuple[int, int, int]:
    # with the time of change, because inode numbers are reused: nobody writes to the file of a socket
    status = path.lstat()
    return status.st_dev, status.st_ino, status.st_mtime_ns


@contextmanager
def claimed(address: UnixAddress) -> Iterator[None]:
    """Make room for a socket's file: remove a stale file, and keep other servers from making one within the block.

    Each server locks the folder while it makes its file. Any user who may read the folder can take the lock and keep
    it, and some file systems have no locks: then the server continues without it.

    Raises:
        InUseError: a process answers.
        ListenError: the folder is missing or may not be written, or the file is not a socket.
    """
    try:
        folder = os.open(Path(address.path).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise explained(address, error) from error
    try:
        if problem := _lock(folder):
            log.warning("%s: %s: going on without the lock", address, problem)
        _remove_stale(address)
        yield
    except (InUseError, ListenError):
        raise
    except OSError as error:
        raise explained(address, error) from error
    finally:
        os.close(folder)


def _lock(folder: int) -> str:
    """Try to take the lock for some moments. Returns the reason if that fails, else an empty text."""
    for attempt in range(LOCK_TRIES):
        if attempt:
            time.sleep(LOCK_PAUSE)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        except OSError as error:  # such as a file system without locks
            return f"the folder cannot be locked: {error.strerror}"
        return ""
    return "somebody keeps the folder locked"


def _remove_stale(address: UnixAddress) -> None:
    try:
        mode = Path(address.path).lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ListenError(f"cannot listen on {address}: the file exists and is not a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address.path)
        except FileNotFoundError:  # the server that made the file has removed it meanwhile
            return
        except ConnectionRefusedError:
            Path(address.path).unlink(missing_ok=True)
            return
        except BlockingIOError:
            pass  # its backlog is full: a process is there
    raise InUseError(address)


def open_unix(address: UnixAddress, policy: ListenPolicy) -> tuple[socket.socket, UnixFile]:
    """A bound and listening socket with the mode and the owner of the policy.

    Raises:
        InUseError, ListenError: no socket can be bound there, or its owner cannot be set.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with claimed(address):
            made.bind(address.path)
            file = UnixFile(address.path)
            try:
                set_access(address, policy)
            except BaseException:
                file.remove()
                raise
            made.listen(BACKLOG)  # only now can clients connect
        made.setblocking(False)
    except BaseException:
        made.close()
        raise
    return made, file


def _try_unix(address: UnixAddress, policy: ListenPolicy) -> None:
    with claimed(address), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        made.bind(address.path)  # it does not listen, so no client can connect
        file = UnixFile(address.path)
        try:
            set_access(address, policy)
        finally:
            file.remove()


def set_access(address: UnixAddress, policy: ListenPolicy) -> None:
    """Give the socket's file the owner and the mode of the policy.

    Raises:
        ListenError: there is no such user or group, or this process may not give files to them, or set their modes.
    """
    if policy.unix_owner:
        try:
            os.chown(address.path, *owner(policy.unix_owner))
        except (KeyError, OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else "no such user or group"
            raise ListenError(f"cannot give {address} to '{policy.unix_owner}': {reason}") from error
    try:
        Path(address.path).chmod(policy.unix_mode)
    except OSError as error:
        raise ListenError(f"cannot set the mode {policy.unix_mode:04o} of {address}: {error.strerror}") from error


def owner(text: str) -> tuple[int, int]:
    """The numbers of user and group of `USER`, `USER:GROUP` or `:GROUP`; -1 for a missing one.

    Raises:
        KeyError: there is no such user or group.
    """
    user, _, group = text.partition(":")
    uid = -1 if not user else int(user) if user.isdecimal() else pwd.getpwnam(user).pw_uid
    gid = -1 if not group else int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid
    return uid, gid


# ---------------------------------------------------------------------------------------------------------------------
# Serving a socket on the event loop


class Listener:
    """A bound socket whose connections the event loop accepts.

    Args:
        bound: the socket, which the listener then owns.
        admit: called with an accepted socket, which it then owns, and the client's address.
        file: of a unix socket.
        failed: called with the listener's address and the error when accepting fails.
    """

    def __init__(
        self,
        bound: socket.socket,
        admit: Callable[[socket.socket, Any], None],
        file: UnixFile | None = None,
        *,
        failed: Callable[[str, OSError], None],
    ) -> None:
        self._socket = bound
        self._admit = admit
        self._file = file
        self._failed = failed
        self._pause: asyncio.TimerHandle | None = None

    def serve(self) -> None:
        """Accept connections from now on."""
        self._socket.listen(BACKLOG)
        self._watch()

    def _watch(self) -> None:
        self._pause = None
        asyncio.get_running_loop().add_reader(self._socket, self._accept, AT_ONCE)

    def _accept(self, most: int) -> None:
        """Accept waiting connections, at most this many."""
        for _ in range(most):
            try:
                accepted, name = self._socket.accept()
            except BlockingIOError:
                return
            except ConnectionError:  # the client has disconnected
                continue
            except OSError as error:  # no descriptors or memory: the connections wait
                self._failed(str(self._socket.getsockname()), error)
                loop = asyncio.get_running_loop()
                if loop.remove_reader(self._socket):  # not after `close`
                    self._pause = loop.call_later(ACCEPT_PAUSE, self._watch)
                return
            accepted.setblocking(False)
            self._admit(accepted, name)

    def close(self) -> None:
        """Accept the connections that the kernel already has, then refuse further ones."""
        if self._pause is not None:
            self._pause.cancel()
        asyncio.get_running_loop().remove_reader(self._socket)
        self._accept(BACKLOG + 1)  # the kernel has no more of them; those that come meanwhile could be without end
        self._socket.close()
        self.remove_file()

    def remove_file(self) -> None:
        if self._file is not None:
            self._file.remove()
