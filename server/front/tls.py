"""TLS of the front doors: certificates from files, read again when the files change."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from inferd._native.transport.tls import TlsContext, TlsError
from inferd.server.engine.housekeeping.regular_files import check_regular, read_regular

log = logging.getLogger("inferd.front")

TICKETS = 3600.0  # seconds for which a context's keys of session tickets are used
Signature = tuple[tuple[int, int, int], ...]


class CredentialsError(Exception):
    """The certificates cannot be used; the text has the option, the file and the reason."""


@dataclass(frozen=True, slots=True)
class Material:
    """The contents of the files, checked, and fitting each other."""

    certificate: bytes  # PEM, the chain
    key: bytes
    root: bytes | None
    context: TlsContext
    made: float  # when, on the monotonic clock


class Credentials:
    """A server certificate and its key, and for mutual TLS the root of clients' certificates.

    Args:
        certificate: PEM file with the certificate chain.
        key: PEM file with the private key, without a passphrase.
        root: PEM file with the certificates that sign clients' certificates; None: clients need none.

    Raises:
        CredentialsError: a file cannot be read or used, or they do not belong together.
    """

    def __init__(self, certificate: Path, key: Path, root: Path | None = None) -> None:
        self._certificate = certificate
        self._key = key
        self._root = root
        self._lock = threading.Lock()
        self._refused: Signature | None = None  # each unusable change is logged once
        self._signature = self._sign()
        self._material = self._load()

    @property
    def mutual(self) -> bool:
        """Clients must show a certificate."""
        return self._root is not None

    @property
    def material(self) -> Material:
        """The last usable contents."""
        return self._material

    def refresh(self) -> bool:
        """Read the files again if they have changed; return whether they had. Any thread may call it.

        After `TICKETS` seconds the context is made anew even so: its keys of session tickets must not last.

        If the files cannot be used, as in the middle of a replacement, the old material stays in force, and the log
        gets one line.
        """
        with self._lock:
            signature: Signature = ()
            try:
                signature = self._sign()
                aged = time.monotonic() - self._material.made > TICKETS
                if signature == self._refused or (signature == self._signature and not aged):
                    return False
                material = self._load()
                if self._sign() != signature:
                    return False  # written to meanwhile: read them again later
            except CredentialsError as error:
                self._complain(error, signature)
                return False
            changed = signature != self._signature
            self._material, self._signature, self._refused = material, signature, None
        if not changed:
            return False
        log.info("the TLS certificate has been read again")
        return True

    def _complain(self, error: CredentialsError, signature: Signature) -> None:
        """Log why the files with this signature cannot be used, once. Files that change are read at the next look."""
        if signature != self._refused:
            self._refused = signature
            log.error("the TLS certificate stays as it was: %s", error)

    def _sign(self) -> Signature:
        """A value that changes whenever a file is replaced or written to, also behind a symbolic link."""
        found = []
        for option, path in self._files():
            try:
                status = path.stat()
                check_regular(status)  # OpenSSL opens the file, too, and would wait for a FIFO
            except OSError as error:
                raise CredentialsError(f"--{option}: cannot read {path}: {error.strerror}") from error
            found.append((status.st_ino, status.st_mtime_ns, status.st_size))
        return tuple(found)

    def _files(self) -> list[tuple[str, Path]]:
        files = [("grpc-server-cert", self._certificate), ("grpc-server-key", self._key)]
        return files if self._root is None else [*files, ("grpc-root-cert", self._root)]

    def _load(self) -> Material:
        certificate = _pem("grpc-server-cert", self._certificate, b" CERTIFICATE-----")
        key = _pem("grpc-server-key", self._key, b"PRIVATE KEY-----")
        root = None if self._root is None else _pem("grpc-root-cert", self._root, b" CERTIFICATE-----")
        try:
            context = TlsContext(certificate, key, root)
        except TlsError as error:
            raise CredentialsError(self._reason(error)) from error
        return Material(certificate, key, root, context, time.monotonic())

    def _reason(self, error: TlsError) -> str:
        if error.locked:
            return f"--grpc-server-key: the key in {self._key} has a passphrase; give it without one"
        why = error.reason or "OpenSSL cannot read it to its end"  # such as a file that was cut
        if error.part == "root":
            return f"--grpc-root-cert: {self._root} cannot be used: {why}"
        if why == "key values mismatch":
            return f"the key in {self._key} does not belong to the certificate in {self._certificate}"
        return f"the certificate in {self._certificate} or the key in {self._key} cannot be used: {why}"


def _pem(option: str, path: Path, mark: bytes) -> bytes:
    try:
        content = read_regular(path)
    except OSError as error:
        raise CredentialsError(f"--{option}: cannot read {path}: {error.strerror}") from error
    if mark not in content:
        kind = "private key" if b"KEY" in mark else "certificate"
        raise CredentialsError(f"--{option}: {path} holds no {kind} in PEM form")
    return content
