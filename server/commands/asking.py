"""The commands that send requests to a server: inferd, or another that speaks the v2 protocol.

Each imports what it needs when it is run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from server.errors import Misused

if TYPE_CHECKING:
    from server.tools.reach import Reach

Several = Annotated[tuple[str, ...], Parameter(negative=())]
Switch = Annotated[bool, Parameter(negative=())]


@Parameter(name="*")
@dataclass(frozen=True)
class Server:
    """The address of a server, and how to connect to it.

    Attributes:
        url: HOST:PORT, or unix:PATH.
        root_cert: PEM file to check the server's certificate against; without it, and --tls, the connection is plain.
        tls: Use TLS; without --root-cert with the system's trusted certificates.
        client_cert: PEM file of the client's certificate, if the server asks for one.
        client_key: PEM file of its key.
        header: KEY=VALUE, such as authorization; may be given several times.
        timeout: Seconds that an answer may take.
    """

    url: Annotated[str, Parameter(name=("--url", "-u"))] = "127.0.0.1:8001"
    root_cert: Path | None = None
    tls: Switch = False
    client_cert: Path | None = None
    client_key: Path | None = None
    header: Several = ()
    timeout: float = 60.0

    def reach(self) -> Reach:
        """These values, checked."""
        from server.tools.reach import Reach

        headers = metadata(self.header)
        return Reach(self.url, self.root_cert, self.client_cert, self.client_key, headers, self.timeout, self.tls)


def metadata(headers: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """The pairs of texts "KEY=VALUE".

    Raises:
        Misused: a text has another form.
    """
    found = []
    for each in headers:
        key, equals, value = each.partition("=")
        if not key or not equals:
            raise Misused(f"--header: expected KEY=VALUE, got '{each}'")
        found.append((key.lower(), value))
    return tuple(found)


HERE = Server()
Format = Literal["table", "json"]


def health(
    *,
    url: Annotated[str, Parameter(name=("--url", "-u"))] = "127.0.0.1:8001",
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
        url: HOST:PORT, or unix:PATH.
        service: A model, or MODEL/VERSION; by default the server itself.
        timeout: Seconds to wait for the answer.
        root_cert: PEM file to check the server's certificate against; without it, and --tls, the connection is plain.
        tls: Use TLS; without --root-cert with the system's trusted certificates.
        client_cert: PEM file of the client's certificate, if the server asks for one.
        client_key: PEM file of its key.
        header: KEY=VALUE, such as the header of a restricted protocol; may be given several times.
    """
    from server.tools.health import ask

    ask(Server(url, root_cert, tls, client_cert, client_key, header, timeout).reach(), service)
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
        root_cert: PEM file to check a v2 server's certificate against; without it the connection is plain text.
        header: KEY=VALUE for a v2 server, such as authorization; may be given several times.
    """
    from server.tools.looking import target_of
    from server.tools.top import once as print_once
    from server.tools.top import watch

    if interval <= 0:
        raise Misused("--interval: expected more than 0 seconds")
    try:
        target = target_of(url, root_cert, metadata(header))
    except (OSError, ValueError) as error:
        raise Misused(f"top: {url}: {error}") from None
    return print_once(target, interval, format) if once or format == "json" else watch(target, interval)


# ---- models -------------------------------------------------------------------------------------------------------


def ls(*, server: Server = HERE, format: Format = "table") -> int:  # noqa: A002 - the option's name
    """List the repository's models and their states.

    Args:
        format: Format of the output.
    """
    from server.tools.models import show_index

    show_index(server.reach(), format == "json")
    return 0


def load(*model: str, server: Server = HERE, model_config: Path | None = None) -> int:
    """Load models, or load them anew, on a server with --model-control-mode=explicit.

    Args:
        model: Their names.
        model_config: A file in place of the model's config.pbtxt, in its format or in JSON.
    """
    from server.tools.models import load as load_models

    if not model:
        raise Misused("models load: name a model, or several")
    load_models(server.reach(), model, model_config)
    return 0


def unload(*model: str, server: Server = HERE, dependents: Switch = False) -> int:
    """Unload models, on a server with --model-control-mode=explicit.

    Args:
        model: Their names.
        dependents: Also unload the models of an ensemble's steps that were loaded with it.
    """
    from server.tools.models import unload as unload_models

    if not model:
        raise Misused("models unload: name a model, or several")
    unload_models(server.reach(), model, dependents)
    return 0


def describe(
    model: str,
    *,
    version: str = "",
    server: Server = HERE,
    pbtxt: Switch = False,
    format: Format = "table",  # noqa: A002
) -> int:
    """Show a model's inputs and outputs.

    Args:
        model: Its name.
        version: One of its versions; by default the server chooses.
        pbtxt: Print its whole configuration, as a config.pbtxt.
        format: Format of the output.
    """
    from server.tools.models import describe as describe_model

    describe_model(server.reach(), model, version, pbtxt, format == "json")
    return 0


def stats(model: str = "", *, server: Server = HERE, format: Format = "table") -> int:  # noqa: A002
    """Show the statistics of models since they were loaded.

    Args:
        model: One model; by default all.
        format: Format of the output.
    """
    from server.tools.models import show_statistics

    show_statistics(server.reach(), model, format == "json")
    return 0


def init(
    file: Path,
    *,
    repository: Path = Path("models"),
    name: str = "",
    max_batch_size: int | None = None,
    input: Several = (),  # noqa: A002 - the option's name
    backend_config: Several = (),
    force: Switch = False,
) -> int:
    """Make a model of a repository from a model file: its folder, and a config.pbtxt with remarks.

    Args:
        file: Of ONNX, TorchScript or another framework that is installed.
        repository: The folder of model folders.
        name: Of the model; by default the file's.
        max_batch_size: The largest batch; by default what the model file allows.
        input: NAME:DATATYPE:SIZE,SIZE of an input of a TorchScript file, with -1 for sizes that vary, and without the
            batch unless --max-batch-size is 0; by default they are guessed.
        backend_config: BACKEND,KEY=VALUE for one backend or KEY=VALUE for all; may be given several times.
        force: Overwrite an existing model.
    """
    from server.authoring import make_model

    return make_model(file, repository, name, max_batch_size, input, force=force, backend_config=backend_config)


# ---- requests -----------------------------------------------------------------------------------------------------


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
    """Ask a model of a server and print its answer.

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
        save: .npz, .json or .npy file for the answer's tensors.
        format: Format of the output.
    """
    from server.tools.infer import InferArguments, ask

    arguments = InferArguments(
        model, version, data, random, shape, batch_size, output, classes, parameter, stream, save, format == "json"
    )
    ask(server.reach(), arguments)
    return 0


def perf(
    *model: str,
    model_name: Annotated[tuple[str, ...], Parameter(name=("--model-name", "-m"), negative=())] = (),
    model_version: Annotated[str, Parameter(name=("--model-version", "-x"))] = "",
    batch_size: Annotated[int, Parameter(name=("--batch-size", "-b"))] = 1,
    concurrency_range: Annotated[str, Parameter(name=("--concurrency-range", "--concurrency"))] = "1",
    request_rate_range: Annotated[str, Parameter(name=("--request-rate-range", "--rate"))] = "",
    request_distribution: Literal["constant", "poisson"] = "poisson",
    connections: int = 1,
    max_in_flight: int = 1024,
    measurement_interval: Annotated[int, Parameter(name=("--measurement-interval", "-p"))] = 1000,
    measurement_mode: Literal["time_windows", "count_windows"] = "time_windows",
    measurement_request_count: int = 50,
    request_count: int = 0,
    stability_percentage: Annotated[float, Parameter(name=("--stability-percentage", "-s"))] = 10.0,
    max_trials: Annotated[int, Parameter(name=("--max-trials", "-r"))] = 10,
    percentile: int = 0,
    latency_threshold: Annotated[float, Parameter(name=("--latency-threshold", "-l"))] = 0.0,
    binary_search: Switch = False,
    warmup: float = 0.5,
    max_duration: float = 0.0,
    shape: Several = (),
    input_data: str = "random",
    string_length: int = 128,
    string_data: str = "",
    request_parameter: Several = (),
    shared_memory: Literal["none", "system", "cuda"] = "none",
    output_shared_memory_size: int = 102400,
    cuda_device: int = 0,
    streaming: Switch = False,
    grpc_compression_algorithm: Literal["none", "gzip", "deflate"] = "none",
    sequence_length: int = 20,
    sequence_length_variation: float = 20.0,
    sequence_id_range: str = "1",
    num_of_sequences: int = 4,
    out: Annotated[tuple[Path, ...], Parameter(name=("--out", "--profile-export-file", "-f"), negative=())] = (),
    server: Server = HERE,
) -> int:
    """Put a model under load: requests per second, latencies, and where the server spends the time.

    Options of perf_analyzer have its names. A closed loop keeps a number of requests in flight; an open loop sends a
    number per second, whether or not the server keeps up, and latency counts from when a request was due.

    Args:
        model: Its name; each of several models gets the whole load, all at the same time.
        model_name: Its name, as perf_analyzer has it.
        model_version: One of its versions; by default the server chooses.
        batch_size: Rows of each request.
        concurrency_range: FIRST:LAST:STEP requests in flight, a level each.
        request_rate_range: FIRST:LAST:STEP requests per second in place of --concurrency-range, a level each.
        request_distribution: Whether requests of a rate come at a fixed pace, or independently of each other.
        connections: How many connections carry the requests.
        max_in_flight: With a rate, further requests wait in the client; their wait counts.
        measurement_interval: Milliseconds of a window.
        measurement_mode: With count_windows, a window has at least --measurement-request-count requests.
        measurement_request_count: See --measurement-mode.
        request_count: Measure one window of so many requests or a few more, in place of windows that agree.
        stability_percentage: Per cent by which the last three windows of a level may differ.
        max_trials: Windows of a level at most.
        percentile: 50, 90, 95 or 99: the one that must be stable and within the threshold; by default the mean.
        latency_threshold: Milliseconds; after a level that takes longer, higher ones are not tried.
        binary_search: Find the highest level within the threshold, by halves.
        warmup: Seconds before each level.
        max_duration: Seconds for all levels; by default as many as they need.
        shape: INPUT:SIZE,SIZE, if the model leaves the shape open.
        input_data: random, zero, or a JSON file as perf_analyzer reads it.
        string_length: Letters of made-up strings.
        string_data: A text in place of made-up strings.
        request_parameter: NAME:VALUE:TYPE of each request: string, bool, int, uint or double; may be given several
            times.
        shared_memory: Put tensors into a region of shared memory: system, or cuda, which is memory of a GPU.
        output_shared_memory_size: Bytes in the region for an output whose size the model does not fix.
        cuda_device: The GPU of --shared-memory cuda.
        streaming: Send requests in streams, as always for decoupled models.
        grpc_compression_algorithm: Of requests, which are compressed once, before the measurement.
        sequence_length: Requests of a sequence, for models that have sequences.
        sequence_length_variation: Per cent by which the length of a sequence may differ from --sequence-length.
        sequence_id_range: FIRST or FIRST:LAST number of sequences.
        num_of_sequences: With a rate, how many sequences run at a time; else as many as requests in flight.
        out: .json or .csv file of the results; may be given several times.
    """
    from server.tools.perf.plan import Files, LoadPlan, ids_of, parameters_of, range_of
    from server.tools.perf.running import run

    names = (*model, *model_name)
    if not names or len(set(names)) != len(names):
        raise Misused("perf: name a model, or several different ones: inferd perf MODEL")
    plan = LoadPlan(
        model=names[0],
        version=model_version,
        rows=batch_size,
        concurrency=None if request_rate_range else range_of("--concurrency-range", concurrency_range),
        rate=range_of("--request-rate-range", request_rate_range) if request_rate_range else None,
        scattered=request_distribution == "poisson",
        connections=connections,
        most_in_flight=max_in_flight,
        window=measurement_interval / 1000,
        window_requests=request_count or (measurement_request_count if measurement_mode == "count_windows" else 0),
        stability=stability_percentage / 100,
        trials=1 if request_count else max_trials,
        percentile=percentile,
        limit_ms=latency_threshold,
        search=binary_search,
        warm_up=warmup,
        longest=max_duration,
        shapes=shape,
        data=input_data,
        letters=string_length,
        text=string_data,
        parameters=parameters_of(request_parameter),
        shared="" if shared_memory == "none" else shared_memory,
        device=cuda_device,
        output_bytes=output_shared_memory_size,
        streaming=streaming,
        compression="" if grpc_compression_algorithm == "none" else grpc_compression_algorithm,
        sequence_length=sequence_length,
        sequence_variation=sequence_length_variation / 100,
        sequence_ids=ids_of(sequence_id_range),
        sequences=num_of_sequences,
    )
    return run(server.reach(), [replace(plan, model=name) for name in names], Files(out))


def plot(*run: Path, out: Annotated[Path, Parameter(name=("--out", "-o"))] = Path("perf.html")) -> int:
    """Draw results that `inferd perf --out run.json` has written; several runs beside each other.

    Args:
        run: The files.
        out: A self-contained .html, or .png or .svg.
    """
    from server.tools.plot import plot as draw

    draw(run, out)
    print(f"written: {out}")
    return 0


def tune(
    model: str,
    *,
    model_repository: Path = Path("models"),
    latency_budget: float = 0.0,
    percentile: int = 99,
    memory_budget: int = 0,
    concurrency: str = "1,8,32,128",
    largest_batch: int = 128,
    most_instances: int = 4,
    max_runs: int = 30,
    measurement_interval: int = 300,
    shape: Several = (),
    input_data: str = "random",
    serve_option: Several = (),
    write: Switch = False,
    out: Path | None = None,
) -> int:
    """Find the batch size, instances, queue delay and threads with which a model gives the most throughput.

    It serves a copy of the model by a server of its own, so nothing else should use the machine meanwhile.

    Args:
        model: Its name.
        model_repository: The folder of model folders.
        latency_budget: Limit of the latency's percentile in milliseconds; by default none.
        percentile: 50, 90, 95 or 99.
        memory_budget: Limit of the server's memory in MiB; by default none.
        concurrency: Numbers of requests in flight to try with each configuration, separated by commas.
        largest_batch: The largest max_batch_size to try.
        most_instances: The most instances to try.
        max_runs: How many configurations to measure at most.
        measurement_interval: Milliseconds of a window.
        shape: INPUT:SIZE,SIZE, if the model leaves the shape open.
        input_data: random, zero, or a JSON file as perf_analyzer reads it.
        serve_option: A further option of inferd serve, such as --backend-config=...; may be given several times.
        write: Put the best configuration into the model's config.pbtxt; the former one is kept beside it.
        out: .json file of all trials.
    """
    from server.tools.tune.running import tune as look
    from server.tools.tune.search import Wanted

    try:
        levels = tuple(int(each) for each in concurrency.split(","))
    except ValueError:
        raise Misused(f"--concurrency: expected numbers with commas between, got {concurrency!r}") from None
    wanted = Wanted(
        model,
        model_repository,
        latency_budget,
        percentile,
        memory_budget,
        levels,
        largest_batch,
        most_instances,
        max_runs,
        measurement_interval / 1000,
        shape,
        input_data,
        serve_option,
    )
    return look(wanted, write=write, out=out)
