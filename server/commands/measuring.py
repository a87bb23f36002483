"""The commands that measure a model: `perf`, `plot`, `tune`.

Each command imports what it needs when it runs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from inferd.server.commands.connecting import HERE, Server, Several, Switch
from inferd.server.errors import Misused


def perf(
    *model: str,
    model_name: Annotated[tuple[str, ...], Parameter(name=("--model-name", "-m"), negative=())] = (),
    model_version: Annotated[str, Parameter(name=("--model-version", "-x"))] = "",
    batch_size: Annotated[int, Parameter(name=("--batch-size", "-b"))] = 1,
    concurrency_range: Annotated[str, Parameter(name=("--concurrency-range", "--concurrency"))] = "1",
    request_rate_range: Annotated[str, Parameter(name=("--request-rate-range", "--rate"))] = "",
    request_intervals: Path | None = None,
    periodic_concurrency_range: str = "",
    request_period: int = 10,
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
    warmup: float | None = None,
    warmup_request_count: int = 0,
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
    goodput: Several = (),
    out: Annotated[tuple[Path, ...], Parameter(name=("--out", "--latency-report-file", "-f"), negative=())] = (),
    profile_export_file: Path | None = None,
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
        request_intervals: A file of the microseconds between requests, one a line, used in turn, in place of a rate.
        periodic_concurrency_range: START:END:STEP: begin START requests at once, STEP more after each period, until
            END have begun; of streams.
        request_period: See --periodic-concurrency-range: a period ends when each of its requests has had so many
            responses.
        request_distribution: Whether requests of a rate come at a fixed pace, or independently of each other.
        connections: How many connections carry the requests.
        max_in_flight: With a rate, the most requests in flight; further ones wait in the client, and their wait counts.
        measurement_interval: Milliseconds of a window.
        measurement_mode: With count_windows, a window has at least --measurement-request-count requests.
        measurement_request_count: See --measurement-mode.
        request_count: Make exactly this many requests at each level, instead of windows that agree; without --warmup
            and --warmup-request-count no others precede them.
        stability_percentage: Per cent by which the last three windows of a level may differ.
        max_trials: Windows of a level at most.
        percentile: 50, 90, 95 or 99, the percentile of latency that must be stable and within the threshold; by default
            the mean.
        latency_threshold: Milliseconds; after a level that takes longer, higher levels are not tried.
        binary_search: Find the highest level within the threshold, by halves.
        warmup: Seconds before each level; by default 0.5.
        warmup_request_count: Exactly this many requests before each level, in place of --warmup.
        max_duration: Seconds for all levels; by default as many as they need.
        shape: INPUT:SIZE,SIZE, if the model leaves the shape open.
        input_data: random, zero, or as perf_analyzer reads them a JSON file, or a folder with a file for each input.
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
        goodput: FIGURE:MILLISECONDS that a request must not exceed to count as a good one; several may be given.
            Figures are request_latency, and of streams time_to_first_token and inter_token_latency.
        out: .json or .csv file of the results, the latter with perf_analyzer's columns; may be given several times.
        profile_export_file: .json file of each request, in the format of perf_analyzer.
    """
    from inferd.server.tools.perf.plan import (
        Files,
        LoadPlan,
        Range,
        gaps_of,
        goodput_of,
        ids_of,
        parameters_of,
        range_of,
    )
    from inferd.server.tools.perf.running import run

    names = (*model, *model_name)
    if not names or len(set(names)) != len(names):
        raise Misused("perf: name a model, or several different ones: inferd perf MODEL")
    if sum(map(bool, (request_rate_range, request_intervals, periodic_concurrency_range))) > 1:
        raise Misused(
            "perf: expected one of --request-rate-range, --request-intervals and --periodic-concurrency-range"
        )
    gaps = gaps_of(request_intervals) if request_intervals is not None else ()
    rate = range_of("--request-rate-range", request_rate_range) if request_rate_range else None
    if gaps:
        rate = Range(len(gaps) / sum(gaps), len(gaps) / sum(gaps), 1)
    periods = None
    if periodic_concurrency_range:
        periods = range_of("--periodic-concurrency-range", periodic_concurrency_range)
    if warmup is None:
        warmup = 0.0 if request_count or periods or warmup_request_count else 0.5
    plan = LoadPlan(
        model=names[0],
        version=model_version,
        rows=batch_size,
        concurrency=None if rate or periods else range_of("--concurrency-range", concurrency_range),
        rate=rate,
        gaps=gaps,
        periods=periods,
        period=request_period,
        scattered=request_distribution == "poisson",
        connections=connections,
        most_in_flight=max_in_flight,
        window=measurement_interval / 1000,
        window_requests=measurement_request_count if measurement_mode == "count_windows" else 0,
        requests=request_count,
        stability=stability_percentage / 100,
        trials=max_trials,
        percentile=percentile,
        limit_ms=latency_threshold,
        search=binary_search,
        warm_up=warmup,
        warm_up_requests=warmup_request_count,
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
        goodput=goodput_of(goodput),
        listed=profile_export_file is not None,
    )
    return run(server.reach(), [replace(plan, model=name) for name in names], Files(out, profile_export_file))


def plot(*run: Path, out: Annotated[Path, Parameter(name=("--out", "-o"))] = Path("perf.html")) -> int:
    """Draw results that `inferd perf --out run.json` has written; several runs beside each other.

    Args:
        run: The files.
        out: A self-contained .html, or .png or .svg.
    """
    from inferd.server.tools.plot import plot as draw

    draw(run, out)
    print(f"written: {out}")
    return 0


def tune(
    *model: str,
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
    """Find the batch size, instances, queue delay and threads with which models give the most throughput.

    Two servers of its own serve copies of the models in turns, so nothing else should use the machine meanwhile.

    Args:
        model: Its name; several models are asked at the same time. Of an ensemble the models of its steps are tuned.
        model_repository: The folder of model folders.
        latency_budget: Limit of the latency's percentile in milliseconds; by default none.
        percentile: 50, 90, 95 or 99.
        memory_budget: Limit of the server's memory in MiB; by default none.
        concurrency: Numbers of requests in flight, for each model, to try with each configuration, with commas between.
        largest_batch: The largest max_batch_size to try.
        most_instances: The most instances to try.
        max_runs: How many configurations to measure at most.
        measurement_interval: Milliseconds of a window.
        shape: INPUT:SIZE,SIZE, if the model leaves the shape open.
        input_data: random, zero, or a JSON file as perf_analyzer reads it.
        serve_option: A further option of inferd serve, such as --backend-config=...; may be given several times.
        write: Put the best configuration into each tuned model's config.pbtxt; the former one is kept beside it.
        out: .json file of all trials.
    """
    from inferd.server.tools.tune.running import tune as look
    from inferd.server.tools.tune.search import Wanted

    if not model or len(set(model)) != len(model):
        raise Misused("tune: name a model, or several different ones")
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
