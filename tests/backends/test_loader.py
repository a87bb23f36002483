"""Finding backends: by name, by platform, from a user's folder; what is missing is told with its remedy."""

import importlib.abc
import subprocess
import sys
from pathlib import Path

import pytest

from inferd.backends.api import BackendError
from inferd.backends.loader import BUILTIN, BackendLoader, backend_of_platform
from tests.threads import in_threads

USER_BACKEND = """
from inferd.backends.api import Backend, Instance, Model

class Echo(Backend):
    name = "echo"
    def load(self, source):
        raise AssertionError
"""


@pytest.mark.parametrize("name", BUILTIN)
def test_builtin_backends_are_found_once(name):
    loader = BackendLoader()
    assert loader.backend(name).name == name
    assert loader.backend(name) is loader.backend(name)


@pytest.mark.parametrize("name", BUILTIN)
def test_the_table_and_the_class_agree_on_the_file(name):
    assert BackendLoader().backend(name).model_filename == BUILTIN[name].model_filename


@pytest.mark.parametrize(
    ("platform", "name"),
    [
        ("pytorch_libtorch", "pytorch"),
        ("onnxruntime_onnx", "onnxruntime"),
        ("tensorrt_plan", "tensorrt"),
        ("tensorflow_graphdef", "tensorflow"),
    ],
)
def test_platforms_are_aliases(platform, name):
    loader = BackendLoader()
    assert loader.backend(platform) is loader.backend(name)
    assert backend_of_platform(platform) == name


def test_an_unknown_platform_means_no_backend():
    assert backend_of_platform("caffe2_netdef") is None


@pytest.mark.parametrize("name", ["nothing", "", "../identity", "a.b", "os"])
def test_an_unknown_name_is_told_with_the_known_ones(name, tmp_path):
    with pytest.raises(BackendError) as caught:
        BackendLoader(directory=tmp_path).backend(name)
    assert str(caught.value) == (
        f"unable to find backend '{name}': it is none of identity, pytorch, onnxruntime, openvino, tensorflow, "
        f"tensorrt, python, nor is it in the backend directory '{tmp_path}'"
    )


@pytest.mark.parametrize(("name", "meant"), [("onnx", "onnxruntime"), ("torch", "pytorch"), ("tensorrtt", "tensorrt")])
def test_a_name_that_is_nearly_known_is_told_with_the_known_one(name, meant):
    with pytest.raises(BackendError, match=f"'{name}': did you mean '{meant}'\\? It is none of identity, "):
        BackendLoader().backend(name)


def test_configuration_reaches_the_backend_its_own_before_that_of_all():
    loader = BackendLoader({"": {"a": "all", "b": "all"}, "identity": {"b": "own"}, "pytorch": {"c": "other"}})
    assert dict(loader.backend("identity").config) == {"a": "all", "b": "own"}


class Missing(importlib.abc.MetaPathFinder):
    """Hides installed packages."""

    def __init__(self, *names):
        self.names = names

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named '{fullname}'", name=fullname)
        return


@pytest.mark.parametrize(
    ("name", "framework"), [("pytorch", "torch"), ("onnxruntime", "onnxruntime"), ("openvino", "openvino")]
)
def test_a_missing_framework_is_named_with_the_command(monkeypatch, name, framework):
    for module in [module for module in sys.modules if module.partition(".")[0] == framework]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [Missing(framework), *sys.meta_path])
    with pytest.raises(BackendError) as caught:
        BackendLoader().backend(name)
    assert str(caught.value) == (
        f"backend '{name}' needs {framework}, which {sys.executable} does not find: "
        f"{sys.executable} -m pip install {framework}"
    )


def test_making_a_backend_imports_no_framework():
    code = (
        "import sys; from inferd.backends.loader import BUILTIN, BackendLoader; loader = BackendLoader();"
        "[loader.backend(name) for name in BUILTIN];"
        "print([name for name in ('torch', 'onnxruntime', 'onnx', 'openvino') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_threads_get_the_same_backend():
    loader = BackendLoader()
    found = in_threads(loader.backend, ["identity"] * 8)
    assert len(set(map(id, found))) == 1


# -- a user's backends


@pytest.mark.parametrize("file", ["echo.py", "echo/__init__.py"])
def test_a_users_backend(tmp_path, file):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(USER_BACKEND)
    backend = BackendLoader({"echo": {"k": "v"}}, tmp_path).backend("echo")
    assert type(backend).__name__ == "Echo"
    assert dict(backend.config) == {"k": "v"}
    assert "echo" not in sys.modules


def test_a_users_backend_replaces_one_of_ours(tmp_path):
    (tmp_path / "identity.py").write_text(USER_BACKEND)
    assert type(BackendLoader(directory=tmp_path).backend("identity")).__name__ == "Echo"


def test_a_users_backend_that_does_not_import(tmp_path):
    (tmp_path / "broken.py").write_text("import nowhere_to_be_found")
    with pytest.raises(BackendError, match=r"backend 'broken' does not import from '.*broken.py': ModuleNotFoundError"):
        BackendLoader(directory=tmp_path).backend("broken")


@pytest.mark.parametrize(
    ("text", "has"), [("", "none"), (USER_BACKEND + USER_BACKEND.replace("Echo", "Other"), "Echo, Other")]
)
def test_a_users_module_defines_one_backend(tmp_path, text, has):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(BackendError, match=f"must define one subclass of Backend, it has {has}"):
        BackendLoader(directory=tmp_path).backend("mine")


def test_the_backend_of_the_documentation_works(tmp_path):
    import numpy as np

    from tests.backends.fake_batch import FakeBatch
    from tests.backends.models import instance, source

    page = (Path(__file__).resolve().parents[2] / "docs" / "backends.md").read_text()
    (tmp_path / "scale.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    (tmp_path / "factor").write_text("2.5")
    described = source(tmp_path, [("x", "FP32", (2,))], [("y", "FP32", (2,))], max_batch_size=8)
    batch = FakeBatch({"x": np.array([[1, 2]], np.float32)}, {"y": "FP32"}, rows=1)
    instance(BackendLoader(directory=tmp_path).backend("scale"), described).execute(batch)
    assert batch.outputs["y"].tolist() == [[2.5, 5]]
    (tmp_path / "factor").write_text("much")
    with pytest.raises(BackendError, match="model 'm': could not convert string to float"):
        instance(BackendLoader(directory=tmp_path).backend("scale"), described)


# -- a package's backends


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package that brings backends; what its module is to be is written by the test."""
    brought = {"packed": "Packed", "bad": "nothing", "identity": "Packed"}
    entry = "\n".join(["[inferd.backends]", *(f"{name} = packed_backend:{found}" for name, found in brought.items())])
    folder = tmp_path / "packed-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: packed\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(entry)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "packed_backend", raising=False)
    return tmp_path / "packed_backend.py"


def test_a_packages_backend(package):
    package.write_text(USER_BACKEND.replace("Echo", "Packed") + "nothing = 1\n")
    loader = BackendLoader({"packed": {"k": "v"}, "neither": {}})
    assert type(loader.backend("packed")).__name__ == "Packed"
    assert dict(loader.backend("packed").config) == {"k": "v"}
    assert type(loader.backend("identity")).__name__ == "IdentityBackend"
    assert loader.unknown() == ["neither"]
    with pytest.raises(BackendError, match=r"python, packed, bad"):
        loader.backend("neither")
    with pytest.raises(BackendError, match=r"backend 'bad' of 'packed': 'packed_backend:nothing' must be a subclass"):
        loader.backend("bad")


def test_a_packages_backend_that_does_not_import(package):
    package.write_text("import nowhere_to_be_found")
    with pytest.raises(BackendError, match=r"backend 'packed' of 'packed' does not import from .*ModuleNotFoundError"):
        BackendLoader().backend("packed")
