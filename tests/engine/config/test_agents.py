"""Repository agents: checksum looks at the files before a model is loaded, and others are refused by name."""

import hashlib
from pathlib import Path

import pytest

from inferd.server.errors import ConfigError

CONTENT = b"weights"


@pytest.fixture
def agents(prepared, io: str, model_dir: Path):
    """Prepare a model with these repository agents; its version 1 holds `weights`."""

    (model_dir / "1" / "weights").write_bytes(CONTENT)
    (model_dir / "outside").symlink_to("/etc/passwd")
    return lambda text: prepared(f'backend: "fake"\n{io}\nmodel_repository_agents {{ {text} }}')


def checksum(key: str, value: str) -> str:
    return f'agents [ {{ name: "checksum" parameters {{ key: "{key}" value: "{value}" }} }} ]'


@pytest.mark.parametrize("algorithm", ["MD5", "SHA256", "SHA512"])
def test_files_that_are_as_said_pass(agents, algorithm: str) -> None:
    agents(checksum(f"{algorithm}:1/weights", hashlib.new(algorithm, CONTENT).hexdigest()))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            checksum("MD5:1/weights", "00"),
            r"config.pbtxt:\d+: .*mismatched MD5 hash for file '1/weights': expected 00",
        ),
        (checksum("MD5:1/other", "00"), "there is no file '1/other'"),
        (checksum("MD5:../other", "00"), "must stay within the model directory"),
        (checksum("MD5:outside", "00"), "must stay within the model directory"),
        (checksum("CRC:1/weights", "00"), "expected a parameter such as MD5:1/model.onnx"),
        (checksum("MD5", "00"), "expected a parameter such as MD5:1/model.onnx"),
        ('agents [ { name: "relocation" } ]', "there is no repository agent 'relocation'"),
    ],
)
def test_what_an_agent_cannot_vouch_for_is_not_loaded(agents, text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        agents(text)
