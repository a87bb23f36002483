"""Certificates for tests, made with the openssl command."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.replacing import replace


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, in files."""

    certificate: Path
    key: Path

    def install(self, certificate: Path, key: Path) -> None:
        """Put it where a server reads it, as tools that rotate certificates do: by renaming over what is there."""
        replace(key, self.key.read_bytes())
        replace(certificate, self.certificate.read_bytes())


def openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


class Authority:
    """A root certificate that signs others."""

    def __init__(self, folder: Path, name: str = "test root") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.root = folder / "root.pem"
        self._key = folder / "root.key"
        openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", 30),
            *("-subj", f"/CN={name}", "-keyout", self._key, "-out", self.root),
        )

    def issue(self, name: str, *alternatives: str, organisation: str = "") -> Pair:
        """A certificate for `name`; alternatives as openssl writes them: "DNS:localhost"."""
        subject = f"/O={organisation}/CN={name}" if organisation else f"/CN={name}"
        made = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        request, extensions = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={','.join(alternatives)}\n" if alternatives else "")
        openssl(
            *("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-subj", subject, "-keyout", made.key, "-out", request),
        )
        openssl(
            *("x509", "-req", "-in", request, "-CA", self.root, "-CAkey", self._key, "-CAcreateserial"),
            *("-days", 30, "-extfile", extensions, "-out", made.certificate),
        )
        return made
