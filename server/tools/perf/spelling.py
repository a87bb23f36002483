"""perf_analyzer's spelling of options that `inferd perf` has under other names, or has no need of."""

from __future__ import annotations

from collections.abc import Sequence

from server.errors import Misused

SAME = {
    "--ssl-grpc-use-ssl": "--tls",
    "--ssl-grpc-root-certifications-file": "--root-cert",
    "--ssl-grpc-private-key-file": "--client-key",
    "--ssl-grpc-certificate-chain-file": "--client-cert",
}
"""Other names of options of ours."""
FLAGS = {"-a", "--async", "--sync", "-v", "--verbose-csv", "--serial-sequences"}
"""Switches that change nothing here: requests do not wait for each other, those of a sequence always do, and the .csv
has everything."""
ONLY = {
    "-i": "grpc",
    "--service-kind": "triton",
    "--input-tensor-format": "binary",
    "--output-tensor-format": "binary",
}
"""Options with the one value that there is here."""
VALUED = {"--max-threads"}
"""Options whose value changes nothing here."""


def translated(tokens: Sequence[str]) -> list[str]:
    """The arguments of `inferd perf` in our own spelling.

    Raises:
        Misused: they ask for what is not there.
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
        raise Misused(f"{name}: expected {ONLY[name]}, got {value!r}: there is nothing else here")
    if name != "-H":
        return []
    key, colon, text = value.partition(":")
    if not colon:
        raise Misused(f"-H: expected 'KEY: VALUE', got {value!r}")
    return [f"--header={key.strip()}={text.strip()}"]
