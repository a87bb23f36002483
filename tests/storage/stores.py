"""Object stores on this machine: moto for S3, azurite for Azure, and a stub that lists and gives as GCS does."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from xml.sax.saxutils import escape

from bench.processes import free_port
from inferd.server.engine.repository.remote.stores import open_store

AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The key of the account devstoreaccount1, which every emulator of Azure has."""

Answer = tuple[int, bytes]


@dataclass
class Cloud:
    """A store with a repository."""

    url: str  # of the repository
    environment: Mapping[str, str]

    def put(self, path: str, content: bytes) -> None:
        self._bucket().put(f"repository/{path}", content)

    def delete(self, path: str) -> None:
        self._bucket().delete(f"repository/{path}")

    def _bucket(self):
        return open_store(self.url, self.environment)


@contextlib.contextmanager
def s3() -> Iterator[Cloud]:
    from moto.server import ThreadedMotoServer

    bucket = f"bucket-{uuid.uuid4().hex}"

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        urllib.request.urlopen(
            urllib.request.Request(f"http://{host}:{port}/{bucket}", method="PUT"), timeout=60
        ).close()
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
        yield Cloud(f"s3://{host}:{port}/{bucket}/repository", keys)
    finally:
        server.stop()


def azurite() -> Path | None:
    """The emulator of Azure: from npm, in the PATH or where AZURITE says."""
    found = os.environ.get("AZURITE") or shutil.which("azurite-blob")
    return Path(found) if found else None


@contextlib.contextmanager
def azure() -> Iterator[Cloud]:
    port = free_port()
    command = [str(azurite()), "--blobHost", "127.0.0.1", "--blobPort", str(port), "--silent"]
    command += ["--skipApiVersionCheck", "--inMemoryPersistence", "--disableTelemetry"]
    emulator = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        environment = {
            "AZURE_STORAGE_KEY": AZURITE_KEY,
            "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/devstoreaccount1",
        }
        for _ in range(300):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        _make_container(port)
        yield Cloud("as://devstoreaccount1/container/repository", environment)
    finally:
        emulator.terminate()
        emulator.wait(30)


def _make_container(port: int) -> None:
    """Signed as Azure wants it, which no client of obstore does: containers are made by other tools."""
    import base64
    import hmac
    from email.utils import formatdate

    date, version = formatdate(usegmt=True), "2023-11-03"
    resource = "/devstoreaccount1/devstoreaccount1/container\nrestype:container"
    text = f"PUT\n\n\n\n\n\n\n\n\n\n\n\nx-ms-date:{date}\nx-ms-version:{version}\n{resource}"
    signed = base64.b64encode(hmac.digest(base64.b64decode(AZURITE_KEY), text.encode(), "sha256")).decode()
    headers = {
        "x-ms-date": date,
        "x-ms-version": version,
        "Authorization": f"SharedKey devstoreaccount1:{signed}",
        "Content-Length": "0",
    }
    url = f"http://127.0.0.1:{port}/devstoreaccount1/container?restype=container"
    urllib.request.urlopen(urllib.request.Request(url, headers=headers, method="PUT"), timeout=60).close()


class Stub:
    """Lists, gives, takes and deletes objects as the XML interface of GCS does, and S3's; it asks for no credentials.

    `intercept(method, key)` may answer in its place: None, or a status and a body.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.gets: list[str] = []
        self.intercept: Callable[[str, str], Answer | None] = lambda method, key: None
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                stub.get(self)

            def do_PUT(self) -> None:
                content = self.rfile.read(int(self.headers.get("content-length") or 0))
                if answer := stub.intercept("PUT", _key(self)):
                    reply(self, *answer)
                else:
                    stub.objects[_key(self)] = content
                    reply(self, 200, b"", {"etag": _tag(content)})

            def do_DELETE(self) -> None:
                stub.objects.pop(_key(self), None)
                reply(self, 204, b"")

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def get(self, handler: BaseHTTPRequestHandler) -> None:
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(handler.path).query)
        key = _key(handler)
        if answer := self.intercept("GET" if key else "LIST", key):
            reply(handler, *answer, cut=answer[0] == 200)
        elif not key:
            prefix = query.get("prefix", [""])[0]
            found = [
                f"<Contents><Key>{escape(name)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                f"<ETag>{escape(_tag(content))}</ETag><Size>{len(content)}</Size></Contents>"
                for name, content in sorted(self.objects.items())
                if name.startswith(prefix)
            ]
            text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(found)}</ListBucketResult>"
            reply(handler, 200, text.encode())
        elif key not in self.objects:
            reply(handler, 404, b"<Error><Code>NoSuchKey</Code></Error>")
        elif handler.headers.get("if-match", _tag(self.objects[key])) != _tag(self.objects[key]):
            reply(handler, 412, b"<Error><Code>PreconditionFailed</Code></Error>")
        else:
            self.gets.append(key)
            reply(handler, 200, self.objects[key], {"etag": _tag(self.objects[key])})

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def reply(
    handler: BaseHTTPRequestHandler,
    status: int,
    body: bytes,
    headers: Mapping[str, str] | None = None,
    cut: bool = False,
) -> None:
    """Answer; `cut` announces one byte more than there is and then ends the connection."""
    handler.send_response(status)
    for name, value in {"last-modified": "Thu, 01 Jan 2026 00:00:00 GMT", "etag": '"e"', **(headers or {})}.items():
        handler.send_header(name, value)
    handler.send_header("content-length", str(len(body) + cut))
    handler.end_headers()
    handler.wfile.write(body)
    handler.close_connection = handler.close_connection or cut


def _key(handler: BaseHTTPRequestHandler) -> str:
    path = urllib.parse.unquote(urllib.parse.urlsplit(handler.path).path)
    return path.lstrip("/").partition("/")[2]


def _tag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


@contextlib.contextmanager
def gcs() -> Iterator[Cloud]:
    stub = Stub()
    try:
        yield Cloud("gs://bucket/repository", {"STORAGE_EMULATOR_HOST": stub.address})
    finally:
        stub.close()
