"""Results as a readable page."""

from __future__ import annotations

from typing import Any

SERVER, FLOOR, ECHO, TRITON = "inferd", "nghttpd", "grpc.aio", "triton"


def markdown(results: dict[str, Any], titles: dict[str, str]) -> str:
    """One page: the goals and the figures reached, then every figure, then machine, versions and method."""
    parts = [f"# Results of {results['date'][:10]}", ""]
    parts += section("Goals", goals(results))
    for name, title in titles.items():
        rows = [row for row in results["rows"] if row["work"] == name]
        if rows:
            parts += section(title, figures(rows))
    for title, lines in other_facts(results["facts"]).items():
        parts += section(title, lines)
    parts += section("Machine and versions", machine(results))
    if results["absent"]:
        parts += section("Absent in this run", [f"- {line.splitlines()[0]}" for line in results["absent"]])
    return "\n".join(parts)


def section(title: str, lines: list[str]) -> list[str]:
    return [f"## {title}", "", *lines, ""] if lines else []


def rule(*heads: str) -> list[str]:
    return [f"| {' | '.join(heads)} |", "|" + "|".join(["---"] + ["---:"] * (len(heads) - 1)) + "|"]


def figures(rows: list[dict[str, Any]]) -> list[str]:
    lines = rule("server", "CPU per request, µs", "requests/s", "p50, µs", "p90, µs", "p99, µs")
    for row in rows:
        best = row["best"]
        cells = (row["server"], f"{best['cpu_us']:.1f}", f"{best['rate']:,.0f}")
        lines.append(f"| {' | '.join([*cells, *(f'{best[key]:,.0f}' for key in ('p50_us', 'p90_us', 'p99_us'))])} |")
    return lines


def goals(results: dict[str, Any]) -> list[str]:
    """The table of goals, as far as this run measured them."""
    best = {(row["work"], row["server"]): row["best"] for row in results["rows"]}
    idle = results["facts"].get("idle", {}).get(SERVER)
    lines: list[str] = []

    def add(what: str, goal: str, reached: str, holds: bool) -> None:
        lines.append(f"| {what} | {goal} | {reached} | {'yes' if holds else 'no'} |")

    def ratio(work: str, key: str, over: str) -> float | None:
        ours, theirs = best.get((work, SERVER)), best.get((work, over))
        return ours[key] / theirs[key] if ours and theirs and theirs[key] else None

    for what, goal, value, limit in (
        ("1 x 32, CPU per request", "≤ 3 x nghttpd", ratio("small", "cpu_us", FLOOR), 3.0),
        ("1 x 32, requests/s", "≥ 12 x grpc.aio", ratio("small", "rate", ECHO), -12.0),
        ("1 x 32, requests/s", "≥ 3 x Triton (Python backend)", ratio("small", "rate", TRITON), -3.0),
        ("1 in flight, round trip", "≤ 2 x nghttpd", ratio("single", "p50_us", FLOOR), 2.0),
    ):
        if value is not None:
            add(what, goal, f"{value:.2f} x", value <= limit if limit > 0 else value >= -limit)
    for work in ("large_in", "large_read"):
        if (work, SERVER) in best:
            cpu = best[work, SERVER]["cpu_us"]
            add(f"600 kB in ({work}), CPU per request", "≤ 110 µs", f"{cpu:.0f} µs", cpu <= 110)
    if idle:
        kib = idle["rss_per_connection"] / 1024
        add("1,000 idle connections", "≤ 64 KiB each", f"{kib:.1f} KiB", kib <= 64)
        add("1,000 idle connections, CPU", "none", f"{idle['cpu_seconds'] * 1e3:.0f} ms", idle["cpu_seconds"] <= 0.01)
    return [*rule("work", "goal", "reached", "holds"), *lines] if lines else []


def other_facts(facts: dict[str, Any]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    if "idle" in facts:
        lines = rule("server", "KiB a connection", "CPU, ms")
        for name, figure in facts["idle"].items():
            lines.append(f"| {name} | {figure['rss_per_connection'] / 1024:.1f} | {figure['cpu_seconds'] * 1e3:.0f} |")
        found["1,000 idle connections"] = lines
    if "window" in facts:
        lines = rule("max_queue_delay, µs", "waits at p50, µs", "at p99, µs")
        lines += [f"| {us} | {f['p50_us']:.0f} | {f['p99_us']:.0f} |" for us, f in facts["window"].items()]
        found["Batch window: what a single request waits"] = lines
    if "python_memory" in facts:
        lines = rule("process", "memory of its own, MiB")
        lines += [f"| {name} | {size / (1 << 20):.1f} |" for name, size in facts["python_memory"].items()]
        found["Workers of Python models before their first request"] = lines
    if "digits" in facts:
        lines = rule("model, batching", "requests/s", "CPU per request, µs", "p99, µs")
        for name, f in facts["digits"].items():
            lines.append(f"| {name} | {f['rate']:,.0f} | {f['cpu_us']:.0f} | {f['p99_us']:,.0f} |")
        found["Digits CNN, 64 requests in flight"] = lines
    if "second_drivers" in facts:
        lines = rule("server", "h2load, requests/s", "perf_analyzer, requests/s")
        for name, rates in facts["second_drivers"].items():
            cells = [f"{rates[driver]:,.0f}" if driver in rates else "" for driver in ("h2load", "perf_analyzer")]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        found["Other drivers, 64-byte tensor, 32 in flight"] = lines
    return found


def machine(results: dict[str, Any]) -> list[str]:
    load = ", ".join(f"{value:.2f}" for value in results["load_average_before"])
    effort = results["effort"]
    lines = [f"- {key}: {value}" for key, value in {**results["machine"], **results["versions"]}.items()]
    lines.append(f"- load average before: {load}")
    lines.append(
        f"- method: {effort['rounds']} rounds of {effort['seconds']} s after {effort['warm_up_seconds']} s of warm-up, "
        "servers in turn within each round; of each figure the best round; server CPU = user and system time of the "
        "server's processes; see bench/README.md"
    )
    return lines
