"""perf_analyzer's options that `inferd perf` has under other names, or does not need."""

from __future__ import annotations

from collections.abc import Sequence

from inferd.server.errors import Misused

SAME = {
    "--ssl-grpc-use-ssl": "--tls",
    "--ssl-grpc-root-certifications-file": "--root-cert",
    "--ssl-grpc-private-key-file": "--client-key",
    "--ssl-grpc-certificate-chain-file": "--client-cert",
}
"""perf_analyzer's names of options of `inferd perf`."""
FLAGS = {"-a", "--async", "--sync", "-v", "--verbose-csv", "--serial-sequences"}
"""Switches without effect: requests of a sequence always wait for each other, other requests never do, and the .csv
always has everything."""
ONLY = {
    "-i": "grpc",
    "--service-kind": "triton",
    "--input-tensor-format": "binary",
    "--output-tensor-format": "binary",
}
"""Options with their only supported value."""
VALUED = {"--max-threads"}
"""Options without effect."""


def translated(tokens: Sequence[str]) -> list[str]:
    """The arguments of `inferd perf` in its own spelling.

    Raises:
        Misused: an argument asks for something that `inferd perf` does not have.
    """
    found: list[str] = []
    rest = iter(tokens)
    for token in rest:
        name, equals, value = token.partition("=")
        if name in ONLY or name in VALUED or name == "-H":
            if not equals:
                value = next(rest, "")
            found += _judged(name, value)
        elif token == "-z":
            found.append("--input-data=zero")
        elif name in SAME:
            found.append(SAME[name] + equals + value)
        elif token not in FLAGS:
            found.append(token)
    return found


def _judged(name: str, value: str) -> list[str]:
    if not value:
        raise Misused(f"{name}: it needs a value")
    if name in ONLY and value.lower() != ONLY[name]:
        raise Misused(f"{name}: expected {ONLY[name]}, the only supported value, got {value!r}")
    if name != "-H":
        return []
    key, colon, text = value.partition(":")
    if not colon:
        raise Misused(f"-H: expected 'KEY: VALUE', got {value!r}")
    return [f"--header={key.strip()}={text.strip()}"]
