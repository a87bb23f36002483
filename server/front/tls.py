"""TLS of the front doors: certificates from files, read again when the files change."""

from __future__ import annotations

import logging
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path

from inferd.server.engine.housekeeping.regular_files import check_regular, read_regular
from inferd.server.front.connection_log import ConnectionLog
from inferd.server.front.sessions import keep_none

log = logging.getLogger("inferd.front")

ALPN = "h2"
Signature = tuple[tuple[int, int, int], ...]


_refused = ConnectionLog()  # of the native door, on its event loop


class _Handshake(ssl.SSLObject):
    """Logs failed handshakes, which no other code sees."""

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            why = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else error.reason
            _refused.add("a client", f"TLS: the handshake failed: {why}")
            raise


class CredentialsError(Exception):
    """The certificates cannot be used; the text has the option, the file and the reason."""


@dataclass(frozen=True, slots=True)
class Material:
    """The contents of the files, checked, and fitting each other."""

    certificate: bytes  # PEM, the chain
    key: bytes
    root: bytes | None
    context: ssl.SSLContext


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
        """Read the files again if they have changed; return whether there is new material. Any thread may call it.

        Unusable files, as during a replacement, leave the old material in force, and one line in the log.
        """
        with self._lock:
            signature: Signature = ()
            try:
                signature = self._sign()
                if signature in (self._signature, self._refused):
                    return False
                material = self._load()
                if self._sign() != signature:
                    return False  # written to meanwhile: read them again later
            except CredentialsError as error:
                self._complain(error, signature)
                return False
            self._material, self._signature, self._refused = material, signature, None
        log.info("the TLS certificate has been read again")
        return True

    def _complain(self, error: CredentialsError, signature: Signature) -> None:
        """`signature` is that of the read files: if they have been completed since, the next look reads them."""
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
        return Material(certificate, key, root, self._context())

    def _context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.sslobject_class = _Handshake
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols([ALPN])
        if not keep_none(context):
            log.info("OpenSSL cannot be told to keep no TLS sessions: connections that resume one are refused")
        try:
            context.load_cert_chain(self._certificate, self._key, password=self._refuse_passphrase)
        except ssl.SSLError as error:
            raise CredentialsError(self._reason(error)) from error
        except OSError as error:  # a file was removed since it was read
            either = f"{self._certificate} or {self._key}"
            raise CredentialsError(f"--grpc-server-cert: cannot read {either}: {error.strerror}") from error
        if self._root is not None:
            try:
                context.load_verify_locations(self._root)
            except ssl.SSLError as error:
                raise CredentialsError(f"--grpc-root-cert: {self._root} cannot be used: {error.reason}") from error
            except OSError as error:
                raise CredentialsError(f"--grpc-root-cert: cannot read {self._root}: {error.strerror}") from error
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _refuse_passphrase(self) -> str:
        raise CredentialsError(f"--grpc-server-key: the key in {self._key} has a passphrase; give it without one")

    def _reason(self, error: ssl.SSLError) -> str:
        if error.reason == "KEY_VALUES_MISMATCH":
            return f"the key in {self._key} does not belong to the certificate in {self._certificate}"
        why = error.reason or "OpenSSL cannot read it to its end"  # as where it was cut
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
