"""One model as a repository: its file, a folder with its file, or its folder; what it is called, and its changes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from inferd.backends.loader import BackendLoader
from inferd.server.engine.config import Options
from inferd.server.engine.engine import Engine
from inferd.server.engine.loading.control import ControlMode, ModelControl
from inferd.server.engine.repository.sources import Repositories, open_sources
from inferd.server.errors import ConfigError, InvalidArgument
from tests.backends.models import identity_onnx
from tests.engine.serving import infer, request

FLOAT = 1  # of ONNX
ONNX = identity_onnx(FLOAT, ["N", 4])
CONFIG = 'name: "configured"\nbackend: "onnxruntime"\nmax_batch_size: 3\n'


def write(root: Path, files: dict[str, bytes | str]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


async def answers(path: Path | str, name: str = "") -> tuple[str, int]:
    """The model that a server of this path has, which answers, and its max_batch_size."""
    engine = Engine(open_sources([path], name), BackendLoader(), Options())
    try:
        assert await engine.start() == []
        [entry] = engine.index()
        x = np.arange(4, dtype=np.float32).reshape(1, 4)
        answer = await infer(engine, request(entry.name, x=x))
        assert answer.status == 0, answer.text
        np.testing.assert_array_equal(np.frombuffer(answer.response.raw_output_contents[0], np.float32), x[0])
        return entry.name, engine.model(entry.name).config.max_batch_size
    finally:
        await engine.close()


@pytest.mark.parametrize(
    ("files", "given", "expected"),
    [
        ({"resnet.onnx": ONNX}, "resnet.onnx", ("resnet", 4)),
        ({"a/model.onnx": ONNX}, "a/model.onnx", ("model", 4)),
        ({"a/model.onnx": ONNX}, "a", ("a", 4)),
        ({"a/resnet.onnx": ONNX, "a/notes.txt": "x"}, "a", ("a", 4)),
        ({"a/model.onnx": ONNX, "a/config.pbtxt": CONFIG}, "a", ("configured", 3)),
        ({"a/model.onnx": ONNX, "a/config.pbtxt": "nonsense"}, "a/model.onnx", ("model", 4)),
        ({"a/1/model.onnx": ONNX}, "a", ("a", 4)),
        ({"a/1/model.onnx": ONNX, "a/1/config.pbtxt": "max_batch_size: 3"}, "a", ("a", 3)),
        ({"a/1/model.onnx": ONNX, "a/config.pbtxt": CONFIG}, "a", ("configured", 3)),
        ({"a/1/model.onnx": ONNX}, "a/1/model.onnx", ("a", 4)),
        ({"a/1/model.onnx": ONNX}, "a/1", ("a", 4)),
        ({"a/2026/resnet.onnx": ONNX}, "a/2026/resnet.onnx", ("resnet", 4)),
        ({'a "q" \\x.onnx': ONNX}, 'a "q" \\x.onnx', None),
    ],
)
@pytest.mark.parametrize("name", ["", "named"])
async def test_it_serves_with_no_more_than_it_is(tmp_path: Path, files, given: str, expected, name: str) -> None:
    """Without a name it has its own, with one it has that, whatever its configuration says."""
    write(tmp_path, files)
    if expected is None:  # no name of a model
        if name:
            assert await answers(tmp_path / given, name) == (name, 4)
        else:
            with pytest.raises(InvalidArgument, match="path traversal characters"):
                open_sources([tmp_path / given])
        return
    found = await answers(tmp_path / given, name)
    assert found == ((name or expected[0]), expected[1])


async def test_a_link_to_a_file_is_followed(tmp_path: Path) -> None:
    """Caches of downloads are made so: the name is that of a link, the content lies elsewhere under another name."""
    write(tmp_path, {"blobs/0123": ONNX})
    (tmp_path / "resnet.onnx").symlink_to(tmp_path / "blobs" / "0123")
    assert await answers(tmp_path / "resnet.onnx") == ("resnet", 4)


@pytest.mark.parametrize(
    "files",
    [
        {"a/1/model.onnx": ONNX},
        {"a/1/model.onnx": ONNX, "stray.onnx": ONNX},
        {"a/config.pbtxt": CONFIG, "model.onnx": ONNX},
        {"x.onnx": ONNX, "y.onnx": ONNX},
        {"tool.py": "", "other.py": ""},
    ],
)
def test_a_folder_of_models_is_no_model(tmp_path: Path, files) -> None:
    """A file that lies beside models, or one of several, does not make a model of the repository."""
    write(tmp_path, files)
    names = [folder.name for folder in Repositories(open_sources([tmp_path])).scan()]
    assert names == (["a"] if any(name.startswith("a/") for name in files) else [])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("a/1/model.onnx", "is of version 1 of a model that has a configuration: give the model's folder, {}/a"),
        ("a/1", "is of version 1 of a model that has a configuration: give the model's folder, {}/a"),
        ("notes.txt", "is no model: expected a folder, or a file that ends in .graphdef, "),
        ("s3:/bucket/models", "model-repository: s3:/bucket/models: write s3://bucket/models"),
        ("hf:/owner/model", "model-repository: hf:/owner/model: write hf://owner/model"),
    ],
)
def test_what_is_nearly_a_repository_is_told_from_one(tmp_path: Path, given: str, text: str) -> None:
    """Guards the sentences for a part of a model, a file that is none, and a URL without its second slash."""
    write(tmp_path, {"a/1/model.onnx": ONNX, "a/config.pbtxt": CONFIG, "notes.txt": "x"})
    path = given if ":" in given else tmp_path / given
    with pytest.raises(ConfigError) as raised:
        open_sources([path])
    assert text.format(tmp_path) in str(raised.value)


async def test_a_folder_around_the_repository_is_told_from_a_model(tmp_path: Path) -> None:
    """Guards the sentence for who gives the folder in which the repository lies."""
    write(tmp_path, {"models/a/1/model.onnx": ONNX})
    engine = Engine(open_sources([tmp_path]), BackendLoader(), Options())
    try:
        [problem] = await engine.start()
        assert f"it holds models itself: give it as --model-repository {tmp_path}/models" in problem
    finally:
        await engine.close()


def test_one_name_is_not_for_several_models(tmp_path: Path, caplog) -> None:
    write(tmp_path, {"x.onnx": ONNX, "y.onnx": ONNX, "r/m/1/model.onnx": ONNX})
    with pytest.raises(ConfigError, match="model-name: it names one model"):
        open_sources([tmp_path / "x.onnx", tmp_path / "y.onnx"], "m")
    open_sources([tmp_path / "r"], "m")
    assert "--model-name=m is ignored: the repositories are folders of model folders" in caplog.text


async def test_a_changed_file_is_loaded_anew(tmp_path: Path) -> None:
    """A file beside it, with another name, is not looked at."""
    file = tmp_path / "m.onnx"
    file.write_bytes(ONNX)
    control = ModelControl(ControlMode.EXPLICIT, ("m",))
    engine = Engine(open_sources([file]), BackendLoader(), Options(), control=control)
    try:
        assert await engine.start() == []
        first = engine.model("m")
        (tmp_path / "other.onnx").write_bytes(ONNX)
        await engine.load("m")
        assert engine.model("m") is first
        about = file.stat()
        os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns + 10**9))
        await engine.load("m")
        assert engine.model("m") is not first
        file.unlink()
        with pytest.raises(InvalidArgument):
            await engine.load("m")
        assert engine.model("m").version == 1
    finally:
        await engine.close()
