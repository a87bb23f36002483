"""`inferd health` without an address, as images ask for it: the server is where the environment has put it."""

from __future__ import annotations

import sys

import pytest

from bench.processes import free_port
from inferd.server import cli
from tests.conformance import doors
from tests.front.certificates import Authority
from tests.observe.test_metrics import IDENTITY, write


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Certificates with names that are not this machine's."""
    authority = Authority(tmp_path_factory.mktemp("authority"))
    return [authority.issue(name, f"DNS:{name}.example") for name in ("server", "other")]


@pytest.fixture
def folder(tmp_path_factory):
    """With a short path."""
    return tmp_path_factory.mktemp("own")


@pytest.fixture
def started(folder, monkeypatch):
    """Start a server as these variables say, which stay set."""
    repository = write(folder / "models", digits=IDENTITY)

    def start(**environment):
        for name, value in {"MODEL_REPOSITORY": repository, "ALLOW_METRICS": "false", **environment}.items():
            monkeypatch.setenv(f"INFERD_{name}", str(value))
        return doors.running(sys.executable, "-m", "inferd", "serve")

    return start


def encrypted(pair):
    return {"GRPC_SERVER_CERT": pair.certificate, "GRPC_SERVER_KEY": pair.key}


@pytest.mark.parametrize(
    "kind", ["port", "file", "file with underscores", "TLS", "mutual TLS beside a plain address", "unix"]
)
def test_health_follows_the_servers_variables(kind, started, folder, pairs, capsys):
    port, other = free_port(), free_port()
    options = folder / "options.toml"
    options.write_text(f'grpc-port = {port}\ngrpc-address = ["127.0.0.1", "unix:{folder}/s"]\n')
    underscores = folder / "underscores.toml"
    underscores.write_text(f"grpc_port = {port}\n")
    environment = {
        "port": {"GRPC_PORT": port, "GRPC_ADDRESS": "0.0.0.0"},
        "file": {"CONFIG": options},
        "file with underscores": {"CONFIG": underscores},
        "TLS": {"GRPC_PORT": port, "GRPC_USE_SSL": "yes", **encrypted(pairs[0])},
        "mutual TLS beside a plain address": {
            "GRPC_ADDRESS": f"127.0.0.1:{port} 127.0.0.1:{other},tls=off,groups=health",
            "GRPC_USE_SSL_MUTUAL": "true",
            "GRPC_ROOT_CERT": pairs[0].certificate,
            **encrypted(pairs[0]),
        },
        "unix": {"GRPC_ADDRESS": f"127.0.0.1:0 unix:{folder}/s"},
    }[kind]
    with started(**environment):
        assert cli.main(["health", "--service", "digits"]) == 0
    where = {"unix": f"unix:{folder}/s", "mutual TLS beside a plain address": f"127.0.0.1:{other}"}
    assert capsys.readouterr().out == f"{where.get(kind, f'127.0.0.1:{port}')}: digits is SERVING\n"


def test_health_takes_no_other_certificate(started, pairs, monkeypatch, capsys):
    """Nor one that the same authority has issued."""
    with started(GRPC_PORT=free_port(), GRPC_USE_SSL="1", **encrypted(pairs[0])):
        monkeypatch.setenv("INFERD_GRPC_SERVER_CERT", str(pairs[1].certificate))
        assert cli.main(["health"]) == 1
    assert "certificate verify failed" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["127.0.0.1:0", "127.0.0.1:8001,groups=inference", "nowhere:x"])
def test_health_asks_for_an_address_where_it_cannot_know_one(address, monkeypatch, capsys):
    monkeypatch.setenv("INFERD_GRPC_ADDRESS", address)
    assert cli.main(["health"]) == 2
    assert "give --url" in capsys.readouterr().err
