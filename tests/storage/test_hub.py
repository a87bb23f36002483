"""Models of the Hugging Face Hub. No hub is asked: its library is a stand-in that lays the files down, or fails."""

from __future__ import annotations

import fnmatch
import sys
import types
from pathlib import Path

import pytest

from inferd.server.engine.repository.remote.hub import download
from inferd.server.engine.repository.sources import open_sources
from inferd.server.errors import ConfigError
from tests.backends.models import identity_onnx
from tests.engine.test_single_model import answers

ONNX = identity_onnx(1, ["N", 4])
FILES = {
    "org/single": {"model.onnx": ONNX, "README.md": b"", "model.safetensors": b""},
    "org/several": {
        "a/1/model.onnx": ONNX,
        "a/labels.txt": b"",
        "b/config.pbtxt": b'backend: "identity"',
        "b/1/x": b"",
    },
    "org/deep": {"onnx/model.onnx": ONNX, "onnx/model.onnx_data": b"", "onnx/other.onnx": ONNX},
}


@pytest.fixture(autouse=True)
def hub(monkeypatch, tmp_path: Path):
    """The requests to the hub: repository and revision."""
    asked: list[tuple[str, str | None]] = []

    def snapshot_download(repo: str, *, revision: str | None, local_dir: Path, allow_patterns: list[str]) -> str:
        asked.append((repo, revision))
        if repo not in FILES:
            raise RuntimeError("401 Client Error: Repository Not Found\nfurther lines")
        for name, content in FILES[repo].items():
            if any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns):
                (local_dir / name).parent.mkdir(parents=True, exist_ok=True)
                (local_dir / name).write_bytes(content)
        return str(local_dir)

    library = types.ModuleType("huggingface_hub")
    library.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", library)
    monkeypatch.setenv("INFERD_CACHE", str(tmp_path))
    return asked


@pytest.mark.parametrize(
    ("url", "name", "asked"),
    [
        ("hf://org/single", "single", ("org/single", None)),
        ("hf://org/single@v1.0/", "single", ("org/single", "v1.0")),
        ("hf://org/deep/onnx/model.onnx", "model", ("org/deep", None)),
        ("hf://org/deep@abc/onnx/other.onnx", "other", ("org/deep", "abc")),
    ],
)
async def test_a_model_is_served_by_its_name(hub, url: str, name: str, asked: tuple[str, str | None]) -> None:
    assert await answers(url) == (name, 4)
    assert await answers(url, "named") == ("named", 4)
    assert hub == [asked, asked]


def test_only_what_is_served_is_downloaded(tmp_path: Path) -> None:
    assert {path.name for path in download("hf://org/single").iterdir()} == {"model.onnx"}
    download("hf://org/deep/onnx/model.onnx")
    assert {path.name for path in tmp_path.glob("hub/org--deep@main/onnx/*")} == {"model.onnx", "model.onnx_data"}


def test_a_repository_of_models_is_one() -> None:
    [source] = open_sources(["hf://org/several"])
    assert [folder.name for folder in source.scan()] == ["a", "b"]


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("hf://org", "expected hf://organisation/name"),
        ("hf://org/single/../../x", "expected hf://organisation/name"),
        ("hf://org/private", "hf://org/private: 401 Client Error: Repository Not Found$"),
        ("hf://org/deep/onnx/nothing.onnx", "there is no such file"),
    ],
)
def test_what_cannot_be_had_is_an_error(url: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        open_sources([url])


def test_without_the_library_it_is_said_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"pip install 'inferd\[hf\]'"):
        download("hf://org/single")
