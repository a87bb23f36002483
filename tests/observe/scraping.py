"""A scraper: reads the page of a server's metrics, in the formats that it serves."""

from __future__ import annotations

import gzip
import re
import socket
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.conformance import doors

SAMPLE = re.compile(r'([a-zA-Z_:][\w:]*)(?:\{((?:\w+="(?:[^"\\]|\\.)*",?)*)\})? (\S+)(?: # .*)?')
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass
class Scraped:
    """The samples and types of a page of metrics."""

    types: dict[str, str] = field(default_factory=dict)
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = field(default_factory=dict)

    def value(self, name: str, **labels: str) -> float:
        """The value of the one sample of this name that has these labels, among others."""
        found = [
            value for (each, having), value in self.samples.items() if each == name and labels.items() <= set(having)
        ]
        assert len(found) == 1, (name, labels, found)
        return found[0]

    def labels(self, name: str) -> list[dict[str, str]]:
        return [dict(labels) for each, labels in self.samples if each == name]


def parse_page(text: str) -> Scraped:
    """Reads the text of either format; every line must be valid, and all samples of a family must stand together."""
    page, family, seen = Scraped(), "", set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, family, kind = line.split(" ")
            assert family not in seen, f"{family} comes twice"
            seen.add(family)
            page.types[family] = kind
        elif not line.startswith("#"):
            found = SAMPLE.fullmatch(line)
            assert found, line
            assert found[1].startswith(family), line
            labels = frozenset((name, value) for name, value in LABEL.findall(found[2] or ""))
            assert (found[1], labels) not in page.samples, line
            page.samples[found[1], labels] = float(found[3])
    return page


def ask(address: str, *headers: str, request: str = "GET /metrics HTTP/1.1") -> tuple[str, dict[str, str], bytes]:
    """The status line, the headers and the body that a request gets."""
    with connected(address) as connection:
        connection.sendall("\r\n".join([request, "Host: x", *headers, "", ""]).encode())
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    return status, {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}, body


@contextmanager
def connected(address: str):
    family = socket.AF_UNIX if address.startswith("/") else socket.AF_INET
    with socket.socket(family) as connection:
        connection.settimeout(30)
        connection.connect(address if family == socket.AF_UNIX else (address.split(":")[0], int(address.split(":")[1])))
        yield connection


def scrape(address: str, *headers: str) -> Scraped:
    """The page as it is now."""
    status, having, body = ask(address, *headers)
    assert status == "HTTP/1.1 200 OK", (status, body)
    assert int(having["content-length"]) == len(body)
    if having.get("content-encoding") == "gzip":
        body = gzip.decompress(body)
    return parse_page(body.decode())


def metrics_address(lines: Iterable[str]) -> str:
    """The address at which a server serves its metrics, by its log."""
    found = [re.search(r"Started Metrics Service at (?:http://(.*)/metrics|unix://(.*))\"", line) for line in lines]
    [match] = filter(None, found)
    return match[1] or match[2]


@contextmanager
def scraped_server(repository, *arguments: str, door: str = "native"):
    """A real server and the address of its metrics."""
    with doors.running_server(door, repository, *arguments) as process:
        yield process, metrics_address(process.lines)
