"""The command line: tritonserver's spelling, where values come from, what is refused, and the command `check`."""

import dataclasses
import importlib.abc
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
from google.protobuf import runtime_version

from inferd.server import build, cli
from inferd.server.addresses import SettingsError, TcpAddress, UnixAddress, parse_address
from inferd.server.foreign import FOREIGN, Ignored, Refused
from inferd.server.program import COMMANDS
from inferd.server.settings import Settings, sections
from inferd.server.settings.values import parse_backend_config
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[1]
BASE = ["serve", "--model-repository", "/models"]


@pytest.fixture
def serve(monkeypatch):
    """Run `inferd serve` with these arguments and return the settings that the server would get."""
    got: list[Settings] = []
    app = types.ModuleType("inferd.server.app")
    app.run = lambda settings: got.append(settings) or 0
    monkeypatch.setitem(sys.modules, "inferd.server.app", app)

    def run(*arguments: str) -> Settings:
        assert cli.main([*BASE, *arguments]) == 0
        return got.pop()

    return run


def test_the_status_is_the_servers(monkeypatch) -> None:
    app = types.ModuleType("inferd.server.app")
    app.run = lambda settings: 1
    monkeypatch.setitem(sys.modules, "inferd.server.app", app)
    assert cli.main(BASE) == 1


def refused(capsys, *arguments: str) -> str:
    assert cli.main([*BASE, *arguments]) == cli.USAGE_ERROR
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        ([], "grpc_port", 8001),
        ([], "grpc_address", ("127.0.0.1",)),
        (["--grpc-address=::1", "--grpc-address", "unix:/s"], "grpc_address", ("::1", "unix:/s")),
        (["--reuse-grpc-port", "true"], "reuse_grpc_port", True),
        (["--model-control-mode=EXPLICIT", "--repository-poll-secs=0"], "model_control_mode", "explicit"),
        (["--model-control-mode=explicit", "--load-model=a", "--load-model", "b"], "load_model", ("a", "b")),
        (["--model-control-mode", "Poll"], "model_control_mode", "poll"),
        (["--model-control-mode=explicit", "--load-model=*"], "load_model", ("*",)),
        (["--grpc-unix-mode=600"], "unix_mode", 0o600),
        (["--allow-client-shm"], "allow_client_shm", True),
        (["--client-shm-prefix=a", "--client-shm-prefix=b"], "client_shm_prefix", ("a", "b")),
        (["--grpc-port=9000"], "grpc_port", 9000),
        (["--grpc-port", "9000"], "grpc_port", 9000),
        (["--exit-on-error=false"], "exit_on_error", False),
        (["--exit-on-error", "false", "--id", "x"], "exit_on_error", False),
        (["--strict-readiness=0"], "strict_readiness", False),
        (["--disable-auto-complete-config"], "disable_auto_complete_config", True),
        (["--disable-auto-complete-config", "--id", "true"], "id", "true"),
        (["--disable-auto-complete-config", "TRUE"], "disable_auto_complete_config", True),
        (["--model-store=/more"], "model_repository", ("/models", "/more")),
        (["--model-store", "/more"], "model_repository", ("/models", "/more")),
        (["--transport", "grpcio"], "transport", "grpcio"),
        (["--max-inflight-requests=0"], "max_inflight_requests", 0),
        (
            ["--grpc-restricted-protocol=trace,logging:Key=a=b:c"],
            "restricted_protocols",
            ((("trace", "logging"), "triton-grpc-protocol-key", "a=b:c"),),
        ),
        (["--grpc-token-file", "/tokens"], "grpc_token_file", Path("/tokens")),
        (["--orca-load-metrics", "true"], "orca_load_metrics", True),
        (["--grpc-reflection=off"], "grpc_reflection", "off"),
        (["--model-load-gpu-limit=0:0.5", "--model-load-gpu-limit", "1:1"], "gpu_load_limits", {0: 0.5, 1: 1.0}),
        (["--config-variable=A", "--config-variable", "B_*"], "config_variable", ("A", "B_*")),
        (["--model-name=m"], "model_name", "m"),
        (["--log-format=ISO8601"], "log_format", "ISO8601"),
        (["--backend-config=onnxruntime,a=1", "--backend-config", "b=2"], "backend_config", ("onnxruntime,a=1", "b=2")),
    ],
)
def test_an_option_gives_its_setting_in_each_spelling(serve, arguments: list[str], name: str, value: object) -> None:
    assert getattr(serve(*arguments), name) == value


@pytest.mark.parametrize(
    ("arguments", "repositories"),
    [
        (["model.onnx"], ("/models", "model.onnx")),
        (["--grpc-port", "9000", "a", "--log-file", "l", "b"], ("/models", "a", "b")),
        (["--exit-on-error", "false", "a"], ("/models", "a")),
        (["--exit-on-error", "a"], None),
        (["--http-port", "8000", "a", "--allow-http", "b"], ("/models", "a", "b")),
    ],
)
def test_an_argument_without_option_is_a_repository(serve, capsys, arguments: list[str], repositories) -> None:
    """The value of an option must not be taken for one, nor a repository for a value."""
    if repositories is None:
        assert "--exit-on-error: expected true or false, got 'a'" in refused(capsys, *arguments)
    else:
        assert serve(*arguments).model_repository == repositories


def test_flag_before_environment_before_file_before_default(serve, monkeypatch, tmp_path: Path) -> None:
    file = tmp_path / "inferd.toml"
    file.write_text(
        'grpc-port = 3\nid = "file"\nlog-verbose = 3\nexit-on-error = false\nbackend-config = ["a,b=c", "d=e"]\n'
    )
    monkeypatch.setenv("INFERD_GRPC_PORT", "2")
    monkeypatch.setenv("INFERD_ID", "environment")
    found = serve("--config", str(file), "--grpc-port", "1")
    assert (found.grpc_port, found.id, found.log_verbose, found.exit_timeout_secs) == (1, "environment", 3, 30)
    assert found.exit_on_error is False
    assert found.backend_config == ("a,b=c", "d=e")


def test_the_file_may_be_named_by_the_environment(serve, monkeypatch, tmp_path: Path) -> None:
    file = tmp_path / "inferd.toml"
    file.write_text("grpc-port = 3\n")
    monkeypatch.setenv("INFERD_CONFIG", str(file))
    assert serve().grpc_port == 3


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("grp-port = 1", "grp-port"),
        ("grpc-port = 'x'", "grpc-port"),
        ("grpc-port = [", "inferd.toml: "),
        (None, "no file"),
    ],
)
def test_a_wrong_file_is_an_error(capsys, tmp_path: Path, text: str | None, fragment: str) -> None:
    file = tmp_path / "inferd.toml"
    if text is not None:
        file.write_text(text)
    assert fragment in refused(capsys, "--config", str(file)).lower()


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["--grp-port", "1"], "Did you mean --grpc-port?"),
        (["--grpc-port", "http"], "--grpc-port"),
        (["--grpc-port", "70000"], "grpc-port: expected 0 to 65535, got 70000"),
        (["--grpc-address", "a:b:"], "grpc-address: "),
        (["--grpc-address", "[::1"], "expected HOST, HOST:PORT, [IPV6]:PORT or unix:PATH, got '[::1'"),
        (["--grpc-address", "unix:"], "expected unix:PATH"),
        (["--grpc-address", "::1", "--grpc-address", "[::1]:8001"], "given twice"),
        (["--grpc-address", "h:70000"], "expected a port of 0 to 65535"),
        (["--grpc-use-ssl"], "grpc-server-cert: --grpc-use-ssl needs it"),
        (["--grpc-use-ssl", "--grpc-server-cert=c"], "grpc-server-key: --grpc-use-ssl needs it"),
        (
            ["--grpc-use-ssl-mutual", "--grpc-server-cert=c", "--grpc-server-key=k"],
            "grpc-root-cert: --grpc-use-ssl-mutual needs it",
        ),
        (["--grpc-server-cert=c"], "grpc-server-cert: it has no effect without --grpc-use-ssl"),
        (
            ["--grpc-use-ssl", "--grpc-server-cert=c", "--grpc-server-key=k", "--grpc-root-cert=r"],
            "grpc-root-cert: it has no effect without --grpc-use-ssl-mutual",
        ),
        (["--grpc-unix-mode", "999"], "expected an octal mode"),
        (["--client-shm-prefix", "a/b"], "client-shm-prefix: expected the beginning of a name, got 'a/b'"),
        (["--client-shm-max-regions", "4097"], "client-shm-max-regions: expected 0 to 4096, got 4097"),
        (["--client-shm-max-byte-size", "-1"], "client-shm-max-byte-size: expected 0 to 4611686018427387904, got -1"),
        (["--exit-timeout-secs", "-1"], "exit-timeout-secs: expected 0 to 2147483647, got -1"),
        (["--max-held-bytes", "1"], "max-held-bytes: expected 1048576 or more, or 0 for a share of the memory, got 1"),
        (["--model-load-thread-count", "0"], "expected 1 to 2147483647, got 0"),
        (["--model-config-name", "a/b"], "without folder"),
        (["--transport", "http"], '"native", "grpcio"'),
        (["--max-inflight-requests", "-1"], "max-inflight-requests: expected 0 to 2147483647"),
        (["--max-queued-requests-per-model", "-1"], "max-queued-requests-per-model: expected 0 to 2147483647"),
        (["--max-inflight-requests", "4294967296"], "max-inflight-requests: expected 0 to 2147483647"),
        (["--max-held-bytes", f"1{'0' * 20}"], "max-held-bytes: expected 0 to 4611686018427387904"),
        (["--slow-request-ms", f"1{'0' * 20}"], "slow-request-ms: expected 0 to 2147483647"),
        (["--access-log", f"1{'0' * 20}"], "access-log: expected 0 to 2147483647"),
        (["--drain-delay", "nan"], "drain-delay: expected 0 to 2147483647, got nan"),
        (["--drain-delay", "inf"], "drain-delay: expected 0 to 2147483647, got inf"),
        (["--transport=grpcio", "--grpc-max-message-size=3000000000"], "C core has limits up to 2147483647"),
        (["--cuda-memory-pool-byte-size", f"0:{'9' * 5000}"], "cuda-memory-pool-byte-size: expected GPU:BYTES"),
        (["--backend-config", f"default-max-batch-size={'9' * 10}"], "default-max-batch-size must be a number"),
        (
            ["--grpc-header-forward-pattern", f"a{{{'9' * 20}}}"],
            "not a regular expression",
        ),
        (["--grpc-port=0", "--grpc-address=h:9000", "--grpc-address=h:9000"], "grpc-address: given twice: h:9000"),
        (["--metrics-address=a:b:"], "metrics-address: expected HOST, HOST:PORT, [IPV6]:PORT or unix:PATH, got 'a:b:'"),
        (["--metrics-address=h:70000"], "metrics-address: expected a port of 0 to 65535, got 'h:70000'"),
        (["--metrics-address=unix:"], "metrics-address: expected unix:PATH of 1 to "),
        (["--metrics-port=0", "--metrics-address=127.0.0.1:8001"], "gRPC is served at 127.0.0.1:8001: choose another"),
        (["--grpc-restricted-protocol", "inference"], "expected GROUP,GROUP:KEY=VALUE"),
        (["--grpc-restricted-protocol", "inference:k"], "expected GROUP,GROUP:KEY=VALUE"),
        (["--grpc-restricted-protocol", "inference:k="], "expected GROUP,GROUP:KEY=VALUE"),
        (["--grpc-restricted-protocol", "infer:k=v"], "unknown group 'infer'"),
        (["--grpc-restricted-protocol", "trace,trace:k=v"], "'trace' can be restricted only once"),
        (["--grpc-restricted-protocol=trace:k=v", "--grpc-restricted-protocol=logging,trace:l=w"], "only once"),
        (["--grpc-restricted-protocol", "trace:k-bin=v"], "must not end with -bin"),
        (["--model-load-gpu-limit", "0:1.5"], "expected GPU:FRACTION with a fraction of 0 to 1, got '0:1.5'"),
        (["--model-load-gpu-limit", "half"], "expected GPU:FRACTION"),
        (["--grpc-reflection", "maybe"], '"auto", "on", "off"'),
        (["--backend-config", "onnxruntime"], "expected BACKEND,KEY=VALUE"),
        (["--exit-on-error=maybe"], "--exit-on-error"),
        (["--model-repository="], "model-repository: expected a path or a URL, got an empty text"),
        (["--load-model=a"], "load-model: it needs --model-control-mode explicit or lazy"),
        (["--model-memory-budget=1"], "model-memory-budget: it needs --model-control-mode lazy"),
        (["--model-control-mode=explicit", "--load-model=*", "--load-model=a"], "must be the ONLY startup model"),
        (["--model-control-mode=poll", "--repository-poll-secs=0"], "repository-poll-secs: expected 1 or more"),
        (["--model-control-mode=both"], "model-control-mode"),
    ],
)
def test_a_wrong_option_is_an_error(capsys, arguments: list[str], fragment: str) -> None:
    error = refused(capsys, *arguments)
    assert error.startswith("inferd: ")
    assert fragment in error


# ---- options of tritonserver that are not served --------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, foreign in FOREIGN.items() if isinstance(foreign, Refused)])
def test_a_refused_option_says_why(capsys, name: str) -> None:
    foreign = FOREIGN[name]
    value = "false" if "true" in foreign.harmless else "true"
    for arguments in ([f"--{name}={value}"], [f"--{name}", value]):
        assert f"--{name}: {foreign.reason}" in refused(capsys, *arguments)


@pytest.mark.parametrize(
    "argument",
    [f"--{name}={value}" for name, foreign in FOREIGN.items() for value in getattr(foreign, "harmless", ())],
)
def test_a_harmless_value_is_accepted_silently(serve, capsys, argument: str) -> None:
    serve(argument)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", [name for name, foreign in FOREIGN.items() if isinstance(foreign, Ignored)])
def test_an_ignored_option_gives_one_line(serve, capsys, name: str) -> None:
    value = "true" if FOREIGN[name].is_flag else "8000"
    assert serve(f"--{name}", value, "--grpc-port", "9000").grpc_port == 9000
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"inferd: warning: --{name} is ignored: {FOREIGN[name].reason}"


@pytest.mark.parametrize(
    ("given", "name", "value", "instead"),
    [
        ("--strict-model-config=true", "disable_auto_complete_config", True, "--disable-auto-complete-config=true"),
        ("--response-cache-byte-size=1048576", "cache_config", ("local,size=1048576",), "--cache-config=local,size="),
    ],
)
def test_a_replaced_option_means_ours(serve, capsys, given: str, name: str, value: object, instead: str) -> None:
    assert getattr(serve(given), name) == value
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"inferd: warning: {given.partition('=')[0]} is deprecated: it is taken for {instead}")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model-namespacing"],
        ["--repoagent-directory=/agents"],
        ["--http-port", "8000", "--allow-http=true"],
    ],
)
def test_an_option_of_triton_without_a_counterpart_is_a_warning(serve, capsys, arguments: list[str]) -> None:
    serve(*arguments)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == sum(each.startswith("--") for each in arguments)
    assert all(line.startswith("inferd: warning: --") for line in lines)


def test_all_that_is_wrong_is_told_at_once(capsys) -> None:
    error = refused(capsys, "--allow-grpc=false", "--trace-rate=5", "--strict-readiness", "maybe", "--load-model")
    assert [line.split(": ")[1] for line in error.splitlines()] == [
        "--allow-grpc",
        "--trace-rate",
        "--strict-readiness",
        "--load-model",
    ]
    error = refused(capsys, "--grpc-port=70000", "--drain-delay=-1", "--load-model=a")
    assert [line.split(": ")[1] for line in error.splitlines()] == ["load-model", "drain-delay", "grpc-port"]


def test_a_wrong_port_is_told_once(capsys) -> None:
    """Guards that rules about addresses say nothing of addresses that cannot be understood."""
    assert refused(capsys, "--grpc-port=99999") == "inferd: grpc-port: expected 0 to 65535, got 99999\n"


def test_a_truth_value_that_is_none_is_named(capsys) -> None:
    assert "--strict-readiness: expected true or false, got 'maybe'" in refused(capsys, "--strict-readiness", "maybe")


def test_a_repository_is_needed(capsys) -> None:
    assert cli.main(["serve"]) == cli.USAGE_ERROR
    assert "serve: --model-repository is needed, with a value: see inferd serve --help" in capsys.readouterr().err


def test_variables_that_are_no_options_are_told(serve, capsys, monkeypatch) -> None:
    monkeypatch.setenv("INFERD_GRPC_PROT", "1")
    monkeypatch.setenv("INFERD_SERVICE_HOST", "10.0.0.1")  # as Kubernetes makes them for a Service called inferd
    monkeypatch.setenv("INFERD_PORT_8001_TCP", "tcp://10.0.0.1:8001")
    serve()
    assert capsys.readouterr().err.splitlines() == [
        "inferd: warning: INFERD_GRPC_PROT is ignored: there is no such option, did you mean INFERD_GRPC_PORT?"
    ]


def test_the_arguments_of_kserve_start_the_server(serve) -> None:
    found = serve(
        "--model-store=/mnt/models", "--grpc-port=9000", "--http-port=8080", "--allow-grpc=true", "--allow-http=true"
    )
    assert found.grpc_port == 9000


def test_no_option_is_both_ours_and_foreign() -> None:
    ours = {field.name.replace("_", "-") for field in dataclasses.fields(Settings)}
    assert not ours & set(FOREIGN)


# ---- settings -------------------------------------------------------------------------------------------------------


def test_settings_are_frozen() -> None:
    settings = Settings(model_repository=("/m",))
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.grpc_port = 1


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("localhost", TcpAddress("localhost", 8001)),
        ("0.0.0.0:9", TcpAddress("0.0.0.0", 9)),
        ("::", TcpAddress("::", 8001)),
        ("[::1]", TcpAddress("::1", 8001)),
        ("[fe80::1%eth0]:9", TcpAddress("fe80::1%eth0", 9)),
        ("unix:///run/x.sock", UnixAddress("/run/x.sock")),
        ("unix:x.sock", UnixAddress("x.sock")),
    ],
)
def test_an_address_is_read_and_written_the_same(text: str, address: object) -> None:
    found = parse_address(text, 8001)
    assert found == address
    assert parse_address(str(found), 0) == address


def test_backend_settings_by_backend() -> None:
    settings = Settings(model_repository=("/m",), backend_config=("onnxruntime,a=1,2", "default-max-batch-size=16"))
    assert settings.backend_settings == {"onnxruntime": {"a": "1,2"}, "": {"default-max-batch-size": "16"}}
    assert settings.default_max_batch_size == 16


@pytest.mark.parametrize("entry", ["", "a", "a,b", ",b=1", "=1", "default-max-batch-size=x"])
def test_a_wrong_backend_config_is_refused(entry: str) -> None:
    with pytest.raises(SettingsError, match="backend-config"):
        parse_backend_config((entry,))


def test_every_setting_has_a_help_text() -> None:
    source = (ROOT / "server" / "settings" / "options.py").read_text()
    for field in dataclasses.fields(Settings):
        text_below = re.search(rf'^    {field.name}: [^\n]*\n    """\w', source, re.MULTILINE)
        assert field.metadata.get("help") or text_below, field.name


def test_help_shows_every_option_whole(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["serve", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Usage: inferd serve [REPOSITORY...] [OPTIONS]"
    for heading, fields in sections():
        assert f"{heading}:" in lines
        for field in fields:
            option = f"--{field.name.replace('_', '-')}"
            assert [line for line in lines if line.split()[:1] == [option]], f"{option} is not at the start of a line"
    assert "  --transport native|grpcio [default: native]" in lines


@pytest.mark.parametrize("chain", COMMANDS, ids=" ".join)
def test_each_command_has_its_page(capsys, chain: tuple[str, ...]) -> None:
    """Guards that the list of commands says what their pages say, and that an option's name is at its line's start."""
    module, _, function = COMMANDS[chain].place.partition(":")
    assert cli.main([*chain, "--help"]) == 0
    page = capsys.readouterr().out
    assert page.startswith(f"Usage: inferd {' '.join(chain)} ")
    meaning = inspect.cleandoc(getattr(importlib.import_module(module), function).__doc__).split("\n\n")[0]
    assert COMMANDS[chain].summary == " ".join(meaning.split())
    assert " ".join(meaning.split()) in " ".join(page.split())
    if chain[:1] == ("models",) and chain != ("models", "init"):
        assert "  --url, -u STR [default: 127.0.0.1:8001]" in page.splitlines()


def test_groups_have_pages(capsys) -> None:
    """Guards `inferd`, `inferd models` and the same with --help."""
    for command, wanted in (([], ["serve", "models", "perf"]), (["models"], ["ls", "init"]), (["config"], ["show"])):
        assert cli.main(command) == 0
        page = capsys.readouterr().out
        assert {f"  {name}" for name in wanted} <= set(page.splitlines())
        assert cli.main([*command, "-h"]) == 0
        assert capsys.readouterr().out == page
    assert cli.main(["modelz", "--help"]) == cli.USAGE_ERROR
    assert "models" in capsys.readouterr().err


def test_help_imports_little() -> None:
    """Guards the time of `--help`, by what the list of commands, and a command's page, may not bring with them."""
    code = """
import sys
before = set(sys.modules)
from inferd.server.cli import main
heavy = {"rich", "markdown_it", "pygments", "numpy", "grpc", "google", "inferd_client", "inferd.server.settings", "ssl"}
main(["--help"])
first = ({"cyclopts", "attrs", "dataclasses", "inspect", "hashlib", "logging"} | heavy) & (set(sys.modules) - before)
main(["perf", "--help"])
print(sorted(first), sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] []"


def test_the_source_has_the_headings_of_the_list() -> None:
    source = (ROOT / "server" / "settings" / "options.py").read_text()
    for heading, fields in sections():
        assert f"\n    # -- {heading} --\n\n    {fields[0].name}: " in source


# ---- version --------------------------------------------------------------------------------------------------------


def test_version_names_build_libraries_and_python() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "inferd", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    first, native, python, found, *_ = done.stdout.splitlines()
    assert re.fullmatch(r"inferd \d+\.\d+\.\d+", first)
    libraries = r", OpenSSL \d+\.\d+\.\d+, nghttp2 \d+\.\d+\.\d+"
    assert re.fullmatch(
        rf"native: (release|debug|asan|tsan|unknown) build(, commit [0-9a-f]+(-dirty)?)?{libraries}", native
    )
    assert python.startswith("python: CPython 3.")
    assert "numpy 2." in found


@pytest.fixture
def broken_import(monkeypatch):
    """The server cannot be imported, by this error."""

    def arrange(error: Exception) -> None:
        class Broken(importlib.abc.MetaPathFinder, importlib.abc.Loader):
            def find_spec(self, name, path, target=None):
                return importlib.util.spec_from_loader(name, self) if name == "inferd.server.app" else None

            def exec_module(self, module):
                exec("raise error", {"error": error})  # as the module's own code

        monkeypatch.delitem(sys.modules, "inferd.server.app", raising=False)
        monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])

    return arrange


WRONG = TypeError("C function inferd._native.request.lane.f has wrong signature (expected int, got int64_t)")
LACKING = ImportError("No module named 'inferd._native.service.infer'", name="inferd._native.service.infer")


@pytest.mark.parametrize(
    ("noted", "error", "sentence"),
    [
        (
            {"sources": "others"},
            WRONG,
            "built from other sources than those that lie here: build them with 'make build'",
        ),
        ({"sources": "others"}, LACKING, "built from other sources than those that lie here"),
        ({"python": "cpython-39"}, LACKING, "the native extensions were built for cpython-39, and this is"),
        ({}, LACKING, "the native extension inferd._native.service.infer is not there.*: build them with 'make build'"),
    ],
)
def test_extensions_that_do_not_fit_are_one_sentence(
    capsys, monkeypatch, tmp_path, broken_import, noted, error, sentence
):
    """What Cython says of a stale extension tells nobody what to do."""
    monkeypatch.setattr(build, "RECORD", tmp_path / "built.json")
    build.RECORD.write_text(json.dumps(noted))
    broken_import(error)
    assert cli.main(BASE) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(sentence, line)


def test_stale_extensions_hide_no_error_of_the_server(monkeypatch, tmp_path) -> None:
    """An error of a server that has begun has many causes. It is shown, with a note."""

    def run(settings: Settings) -> int:
        raise ValueError("the first model has no name")

    app = types.ModuleType("inferd.server.app")
    app.run = run
    monkeypatch.setitem(sys.modules, "inferd.server.app", app)
    monkeypatch.setattr(build, "RECORD", tmp_path / "built.json")
    build.RECORD.write_text(json.dumps({"sources": "others"}))
    with pytest.raises(ValueError, match="the first model has no name") as raised:
        cli.main(BASE)
    [note] = raised.value.__notes__
    assert "built from other sources than those that lie here" in note


@pytest.mark.parametrize("error", [WRONG, ImportError("No module named 'numpy'", name="numpy")])
def test_an_error_that_is_not_of_the_build_is_not_hidden(monkeypatch, tmp_path, broken_import, error) -> None:
    monkeypatch.setattr(build, "RECORD", tmp_path / "built.json")
    build.RECORD.write_text(json.dumps({"sources": build.digest_of_sources()}))
    broken_import(error)
    with pytest.raises(type(error)):
        cli.main(BASE)


def test_a_protobuf_that_does_not_fit_is_one_sentence(capsys, broken_import) -> None:
    """Another package has installed an older protobuf."""
    broken_import(runtime_version.VersionError("Detected incompatible Protobuf Gencode/Runtime versions"))
    assert cli.main(BASE) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "protobuf does not fit the packages that need it" in line


def test_a_missing_module_is_named(monkeypatch, capsys, broken_import) -> None:
    """Not the state of the extensions, which may be stale, too: the module that is missing is to be installed first."""
    monkeypatch.setattr(build, "stale_sources", lambda: "stale")
    broken_import(ModuleNotFoundError("No module named 'uvloop'", name="uvloop"))
    assert cli.main(BASE) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "has no module 'uvloop', which inferd needs" in line


def test_the_server_process_does_not_load_rich() -> None:
    code = """
import sys, types
app = types.ModuleType("inferd.server.app")
app.run = lambda settings: print("rich" in sys.modules, "torch" in sys.modules)
sys.modules["inferd.server.app"] = app
from inferd.server.cli import main
main(["serve", "--model-repository", "/m", "--grpc-port=1"])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_memory_pools_of_gpus(serve, capsys) -> None:
    settings = serve("--cuda-memory-pool-byte-size", "0:1000", "--cuda-memory-pool-byte-size=3:0")
    assert settings.cuda_pools == {0: 1000, 3: 0}
    assert settings.pinned_memory_pool_byte_size == 256 << 20
    for wrong in ("1000", "gpu0:5", "0:-1", ":"):
        assert "cuda-memory-pool-byte-size: expected GPU:BYTES" in refused(
            capsys, "--cuda-memory-pool-byte-size", wrong
        )


def test_health_says_whether_a_server_serves(capsys) -> None:
    """`inferd health` of a port where nobody listens: one line, status 1."""
    assert cli.main(["health", "--url", "127.0.0.1:1", "--timeout", "1"]) == 1
    assert capsys.readouterr().err.startswith("inferd: 127.0.0.1:1: UNAVAILABLE")


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (["--nonsense"], "expected a command first, got --nonsense"),
        (["models", "load"], "models load: name a model"),
        (["models", "unload"], "models unload: name a model"),
        (["models", "describe"], "models describe: --model is needed, with a value: see inferd models describe --help"),
        (["health", "--url", "nonsense"], "expected HOST:PORT or unix:PATH"),
        (["health", "--url", "127.0.0.1:1", "--timeout", "nan"], "--timeout: expected more than 0 seconds"),
        (["health", "--url", "127.0.0.1:1", "--header", "a=1", "--header", "A=2"], "--header: 'a' is given twice"),
        (["top", "--interval", "inf"], "--interval: expected more than 0 seconds, and at most 86400"),
        (["plot", "nothing.json"], "nothing.json: no such file or directory"),
        (["build-engine", "nothing.onnx"], "there is no file nothing.onnx"),
        (["config", "show", "--grpc-port", "x"], "--grpc-port"),
        (["config", "show", "--nonsense"], "--nonsense"),
        (["config", "show", "--config", "pyproject.toml"], "--config: pyproject.toml: "),
        (["config", "show", "--config", "LICENSE"], "--config: LICENSE: "),
        (["models", "init", "LICENSE", "--max-batch-size", "9999999999"], "--max-batch-size: expected 0 to 2147483647"),
    ],
)
def test_mistakes_are_a_sentence_and_status_2(capsys, command: list[str], text: str) -> None:
    assert cli.main(command) == cli.USAGE_ERROR
    assert text in capsys.readouterr().err


def test_a_reader_that_has_left_is_no_fault() -> None:
    """Guards `inferd ... | head`: no traceback, neither of the command nor of the interpreter's end."""
    with subprocess.Popen(
        [sys.executable, "-m", "inferd", "completion", "bash"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b""


def test_closed_standard_files(tmp_path) -> None:
    """Guards `2>&-`, as some supervisors start programs: what is opened instead must not get what is printed."""
    (tmp_path / "models").mkdir()
    serve = f"serve --model-repository {tmp_path}/models --grpc-address unix:{tmp_path}/s --allow-metrics=false"
    command = f"exec {sys.executable} -m inferd {serve} <&- >&- 2>&-"
    with subprocess.Popen(["bash", "-c", command], cwd=ROOT) as process:
        try:
            wait_until(lambda: (tmp_path / "s").exists() or process.poll() is not None)
            assert process.poll() is None
            files = Path(f"/proc/{process.pid}/fd")
            assert {str((files / str(number)).readlink()) for number in range(3)} == {os.devnull}
        finally:
            process.terminate()
    assert process.returncode == 0


def test_config_show_needs_no_repository(capsys) -> None:
    assert cli.main(["config", "show", "--grpc-port", "5"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["grpc-port", "5", "the", "command", "line"] in lines
    assert lines[0][:3] == ["model-repository", "(none)", "nowhere:"]


def test_health_wants_headers_with_a_value(capsys) -> None:
    assert cli.main(["health", "--header", "key"]) == cli.USAGE_ERROR
    assert "expected KEY=VALUE, got 'key'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["/usr/bin/tritonserver", "--model-store=/m"], ["serve", "--model-store=/m"]),
        (["inferd", "serve", "tritonserver", "--model-store=/m"], ["serve", "--model-store=/m"]),
        (["inferd", "check", "tritonserver"], ["check", "tritonserver"]),
    ],
)
def test_it_answers_to_tritonservers_name(command, expected) -> None:
    """Containers get the name as a program or as the first argument behind their entry point."""
    assert cli.as_inferd(command) == expected


def test_an_argument_too_many_is_named(capsys) -> None:
    """The most common one is text without quotes."""
    assert cli.main(["infer", "m", "--data", "hello", "there", "a b"]) == cli.USAGE_ERROR
    assert capsys.readouterr().err.startswith("inferd: not expected: there 'a b'; a value with spaces needs quotes")
