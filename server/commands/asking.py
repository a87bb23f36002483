"""The commands that ask a server: whether it serves, what it does, and a model for a response.

Each command imports what it needs when it runs.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from inferd.server.commands.connecting import HERE, Format, Server, Several, Switch, metadata
from inferd.server.errors import Misused

MOST_SECONDS = 86400
"""Seconds between two looks of `inferd top`."""


def health(
    *,
    url: Annotated[str | None, Parameter(name=("--url", "-u"))] = None,
    service: str = "",
    timeout: float = 2.0,
    root_cert: Path | None = None,
    tls: Switch = False,
    client_cert: Path | None = None,
    client_key: Path | None = None,
    header: Several = (),
) -> int:
    """Ask a server whether it serves: status 0 when it does, 1 and the reason otherwise.

    Args:
        url: HOST:PORT, or unix:PATH; by default where `inferd serve` would listen with the same environment
            (INFERD_GRPC_ADDRESS, INFERD_GRPC_PORT, those of TLS, INFERD_CONFIG).
        service: A model, or MODEL/VERSION; by default the server itself.
        timeout: The most seconds for the response.
        root_cert: PEM file to check the server's certificate against; without it, and --tls, the connection is plain.
        tls: Use TLS; without --root-cert with the system's trusted certificates.
        client_cert: PEM file of the client's certificate, if the server asks for one.
        client_key: PEM file of its key.
        header: KEY=VALUE, such as the header of a restricted protocol; may be given several times.
    """
    from inferd.server.commands.own import own_server
    from inferd.server.tools.health import ask

    pinned = None
    if url is None:
        url, pinned = own_server(os.environ)
    server = Server(url, root_cert, tls, client_cert, client_key, header, timeout)
    ask(replace(server.reach(), pinned=None if root_cert or tls else pinned), service)
    print(f"{url}: {service or 'the server'} is SERVING")
    return 0


def top(
    url: Annotated[
        str, Parameter(help="URL of metrics, or grpc://HOST:PORT of a v2 server.")
    ] = "http://localhost:8002/metrics",
    *,
    interval: float = 1.0,
    once: bool = False,
    format: Literal["table", "json"] = "table",  # noqa: A002 - the option's name
    sort: Literal["name", "requests", "failures", "p99", "queue", "compute", "batch", "pending", "busy"] = "name",
    filter: str = "",  # noqa: A002 - the option's name
    hide_idle: Switch = False,
    root_cert: Path | None = None,
    header: Several = (),
) -> int:
    """Show what a server does: requests, times, batches and instances of each model.

    It reads the metrics of inferd or of tritonserver, or asks any v2 server by gRPC for its statistics. Values that
    these do not have are shown as -.

    Args:
        interval: Seconds between two looks.
        once: Print the work of one interval, and end.
        format: Format of --once; json implies --once.
        sort: The column by which models are sorted, the highest first; key s takes the next one.
        filter: Names of models to show, with * and ?; key / changes it.
        hide_idle: Leave out models that did nothing; key i.
        root_cert: PEM file to check a v2 server's certificate against; without it the connection is plain text.
        header: KEY=VALUE for a v2 server, such as authorization; may be given several times.
    """
    from inferd.server.tools.looking import target_of
    from inferd.server.tools.rates import Choice
    from inferd.server.tools.top import once as print_once
    from inferd.server.tools.top import watch

    if not 0 < interval <= MOST_SECONDS:
        raise Misused(f"--interval: expected more than 0 seconds, and at most {MOST_SECONDS}")
    try:
        target = target_of(url, root_cert, metadata(header))
    except (OSError, ValueError) as error:
        raise Misused(f"top: {url}: {error}") from None
    choice = Choice(sort, filter, not hide_idle)
    if once or format == "json":
        return print_once(target, interval, format, choice)
    return watch(target, interval, choice)


def infer(
    model: str,
    *,
    data: Annotated[tuple[str, ...], Parameter(name=("--data", "-d"), negative=())] = (),
    random: Switch = False,
    shape: Several = (),
    batch_size: Annotated[int, Parameter(name=("--batch-size", "-b"))] = 1,
    version: str = "",
    output: Several = (),
    classes: int = 0,
    parameter: Several = (),
    stream: Switch = False,
    save: Path | None = None,
    format: Format = "table",  # noqa: A002 - the option's name
    server: Server = HERE,
) -> int:
    """Ask a model of a server and print its response.

    Args:
        model: Its name.
        data: INPUT=VALUE: a file (.npy, .json, a picture, text), numbers, or text; a .npz or .json with all inputs.
        random: Make up inputs that are not given.
        shape: INPUT:SIZE,SIZE of a made-up input, if the model leaves its shape open.
        batch_size: Rows of made-up inputs.
        version: Of the model; by default the server chooses.
        output: Wanted outputs; by default all.
        classes: How many of the likeliest classes to show in place of each output.
        parameter: KEY=VALUE for the model.
        stream: Send the request in a stream, as always for decoupled models.
        save: .npz, .json or .npy file for the response's tensors.
        format: Format of the output.
    """
    from inferd.server.tools.infer import InferArguments, ask

    arguments = InferArguments(
        model, version, data, random, shape, batch_size, output, classes, parameter, stream, save, format == "json"
    )
    ask(server.reach(), arguments)
    return 0
