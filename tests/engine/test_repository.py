"""Finding models and versions; nothing is loaded."""

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from inferd._native.model_files import Watch
from inferd.server.engine.repository.folders import (
    AMBIGUOUS,
    CONFIGURATION,
    REST,
    ModelFolder,
    check_name,
    find,
    look,
    marks,
    part_of,
    scan,
    select_versions,
    versions_of,
    warn_misnamed_versions,
)
from inferd.server.engine.repository.sources import Repositories, open_sources
from inferd.server.errors import ConfigError, InvalidArgument
from inferd_client.pb import model_config_pb2 as pb


def make(repository: Path, name: str, *versions: str) -> Path:
    for version in versions:
        (repository / name / version).mkdir(parents=True)
    (repository / name).mkdir(parents=True, exist_ok=True)
    return repository / name


def test_models_of_several_repositories_by_name(tmp_path: Path) -> None:
    make(tmp_path / "a", "zebra", "1")
    make(tmp_path / "a", "ant", "3", "10", "2")
    (make(tmp_path / "b", "cat") / "config.pbtxt").touch()
    (tmp_path / "b" / "README.md").touch()
    (tmp_path / "b" / ".git").mkdir()
    found = scan([tmp_path / "a", tmp_path / "b"])
    assert [(folder.name, folder.versions, folder.problem) for folder in found] == [
        ("ant", (2, 3, 10), ""),
        ("cat", (), ""),
        ("zebra", (1,), ""),
    ]
    assert found[0].version_path(10) == tmp_path / "a" / "ant" / "10"


def test_a_name_in_two_repositories_is_ambiguous(tmp_path: Path) -> None:
    make(tmp_path / "a", "m", "1")
    make(tmp_path / "b", "m", "1")
    (found,) = scan([tmp_path / "a", tmp_path / "b"])
    assert found.problem == AMBIGUOUS == "model appears in two or more repositories"


def test_one_repository_given_twice_is_one(tmp_path: Path) -> None:
    make(tmp_path / "a", "m", "1")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (found,) = scan([tmp_path / "a", tmp_path / "a" / ".", tmp_path / "link"])
    assert found.problem == ""


def test_a_repository_that_is_no_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file or directory"):
        scan([tmp_path / "absent"])
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="not a directory"):
        scan([tmp_path / "file"])
    (tmp_path / "loop").symlink_to("loop")
    for name in ("absent", "loop"):
        with pytest.raises(ConfigError, match="cannot be read"):
            Repositories(open_sources([tmp_path / name])).scan()


def test_what_is_no_version_is_ignored_aloud(tmp_path: Path, caplog) -> None:
    path = make(tmp_path, "m", "1", "007", "v2", "-1", "٣", "9" * 30, "0", "warmup", "configs", "initial_state", ".x")
    (path / "5").touch()
    assert versions_of(path) == (0, 1)
    with caplog.at_level(logging.WARNING):
        warn_misnamed_versions(*scan([path.parent]))
    assert sorted(Path(record.args[0]).name for record in caplog.records) == sorted(["007", "v2", "-1", "٣", "9" * 30])
    assert "leading zeros" in caplog.text


NAMES = [
    "a\nb",
    ".",
    "..",
    "../b",
    "a/b",
    ".hidden",
    "x" * 300,
    "a\0b",
    "a\\b",
    "é" * 200,
    "\ufffd",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_leads_elsewhere_or_cannot_be_shown_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="invalid model name"):
        check_name(name)


@pytest.mark.parametrize("name", ["", " ", "\t"])
def test_an_empty_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="Model name cannot be empty"):
        check_name(name)


@pytest.mark.parametrize(
    "name", ["m", "bert-base_v1.2", "1", "模型", "a.onnx", "llm@2025", "a b", "model..1", "-c", "a;id", "$(id)"]
)
def test_ordinary_names_pass(name: str) -> None:
    check_name(name)


def test_a_folder_with_a_refused_name_is_listed_with_its_problem(tmp_path: Path) -> None:
    make(tmp_path, "a\nid", "1")
    make(tmp_path, os.fsdecode(b"\xff\xfe"), "1")
    make(tmp_path, "good", "1")
    found = {folder.name: folder.problem for folder in scan([tmp_path])}
    assert found.pop("good") == ""
    assert len(found) == 2
    assert all(problem.startswith("invalid model name") for problem in found.values())


def test_what_file_systems_and_tools_leave_is_no_model(tmp_path: Path, caplog) -> None:
    for name in ("lost+found", "__pycache__", ".git"):
        make(tmp_path, name, "1")
    make(tmp_path, "empty")
    make(tmp_path, "good", "1")
    assert [folder.name for folder in scan([tmp_path])] == ["good"]
    assert [record.getMessage() for record in caplog.records] == [f"{tmp_path}/empty: ignored: the folder is empty"]


@pytest.mark.parametrize(
    ("policy", "chosen"),
    [
        ({}, [9]),
        ({"latest": {"num_versions": 2}}, [4, 9]),
        ({"latest": {"num_versions": 99}}, [1, 4, 9]),
        ({"all": {}}, [1, 4, 9]),
        ({"specific": {"versions": [9, 1, 1]}}, [1, 9]),
        ({"specific": {"versions": [1, 7]}}, [1]),
    ],
)
def test_the_version_policy_selects(policy: dict, chosen: list[int]) -> None:
    folder = ModelFolder("m", Path("m"), Path(), (1, 4, 9))
    assert select_versions(pb.ModelConfig(version_policy=policy), folder) == chosen


@pytest.mark.parametrize(("policy", "versions"), [({"all": {}}, ()), ({"specific": {"versions": [7]}}, (1, 4))])
def test_no_version_is_an_error(policy: dict, versions: tuple[int, ...]) -> None:
    folder = ModelFolder("m", Path("m"), Path(), versions)
    with pytest.raises(
        ConfigError, match="at least one version must be available under the version policy of model 'm'"
    ):
        select_versions(pb.ModelConfig(version_policy=policy), folder)


# -- one model, and what has changed of it --


def test_one_model_is_found_as_by_a_scan(tmp_path: Path) -> None:
    make(tmp_path / "a", "m", "1", "2")
    make(tmp_path / "a", "twice", "1")
    make(tmp_path / "b", "twice", "1")
    repositories = [tmp_path / "a", tmp_path / "b", tmp_path / "a" / "."]
    scanned = {folder.name: folder for folder in scan(repositories)}
    assert find(repositories, "m") == scanned["m"]
    assert find(repositories, "twice") == scanned["twice"]
    assert find(repositories, "nothing") is None


@pytest.mark.parametrize("name", ["../outside", "..", ".", "", "m/../m", "m/1", ".hidden"])
def test_no_name_leads_out_of_a_repository(tmp_path: Path, name: str) -> None:
    make(tmp_path / "a", "m", "1")
    make(tmp_path / "a", ".hidden", "1")
    make(tmp_path, "outside", "1")
    assert find([tmp_path / "a"], name) is None


def test_each_part_of_a_model_has_its_marks(tmp_path: Path) -> None:
    path = make(tmp_path, "m", "1", "2", "configs", "warmup", "1/__pycache__", "1/configs/deep", "1/deep")

    def changed(*file: str) -> set[str]:
        """The parts whose marks are others after the file was written."""
        [folder] = scan([tmp_path])
        before = marks(folder)
        target = path.joinpath(*file)
        target.write_text(target.read_text() + "x" if target.exists() else "x")
        after = marks(folder)
        return {part for part in after if before.get(part) != after[part]}

    for _ in range(2):  # made, then changed
        assert changed("config.pbtxt") == {CONFIGURATION}
        assert changed("configs", "large.pbtxt") == {CONFIGURATION}
        assert changed("1", "config.pbtxt") == {CONFIGURATION}
        assert changed("1", "configs", "large.pbtxt") == {CONFIGURATION}
        assert changed("1", "configs", "vocabulary.json") == {"1"}, "data of the version, whatever its folder's name"
        assert changed("1", "configs", "deep", "large.pbtxt") == {"1"}
        assert changed("configs", "vocabulary.json") == {REST}
        assert changed("1", "model.onnx") == {"1"}
        assert changed("1", "deep", "config.pbtxt") == {"1"}
        assert changed("2", "model.onnx") == {"2"}
        assert changed("labels.txt") == {REST}
        assert changed("warmup", "sample") == {REST}
        assert changed("1", "__pycache__", "model.cpython-311.pyc") == set()
        assert changed("1", ".hidden") == set()


def test_marks_follow_links_and_end(tmp_path: Path) -> None:
    path = make(tmp_path / "a", "m")
    elsewhere = make(tmp_path, "elsewhere")
    (elsewhere / "model.onnx").write_text("x")
    (path / "1").symlink_to(elsewhere)
    (elsewhere / "circle").symlink_to(path)
    (path / "labels.txt").symlink_to(tmp_path / "nowhere")
    [folder] = scan([tmp_path / "a"])
    before = marks(folder)
    assert before["1"]
    (elsewhere / "model.onnx").write_text("other")
    assert marks(folder)["1"] != before["1"]


def test_marks_do_not_leave_by_a_link_to_what_is_around(tmp_path: Path) -> None:
    """A link to / would have the whole system walked in each round."""
    folder = make(tmp_path / "repository", "m", "1")
    (folder / "1" / "model").touch()
    (tmp_path / "repository" / "other").mkdir()
    (tmp_path / "repository" / "other" / "model").touch()
    for name, target in {"root": "/", "up": str(tmp_path), "repository": str(tmp_path / "repository")}.items():
        (folder / "1" / name).symlink_to(target)
    (folder / "1" / "beside").symlink_to(tmp_path / "repository" / "other")
    found = marks(ModelFolder("m", folder, tmp_path / "repository", (1,)))
    assert sum(part.files for part in found.values()) == found["1"].files == 2, "1/model and 1/beside/model"


def test_marks_of_very_many_files_end(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr("inferd.server.engine.repository.folders.MAX_FILES", 5)
    folder = make(tmp_path, "m", "1")
    for number in range(9):
        (folder / "1" / f"part {number}").touch()
    assert sum(part.files for part in marks(ModelFolder("m", folder, tmp_path, (1,))).values()) == 5
    assert "more than 5 files" in caplog.text


# -- the looks of a poll, against plain Python --


def files_of(folder: Path) -> Iterator[tuple[str, int, int]]:
    """Path, time of modification and size of the files that `marks` is about, for trees without circles."""
    for entry in folder.iterdir():
        if entry.name.startswith(".") or entry.name == "__pycache__" or not entry.exists():
            continue
        if entry.is_dir():
            yield from ((f"{entry.name}/{path}", *rest) for path, *rest in files_of(entry))
        else:
            about = entry.stat()
            yield entry.name, about.st_mtime_ns, about.st_size


def plain_marks(folder: Path) -> dict[str, set[tuple[str, int, int]]]:
    """By part; parts without files are left out."""
    found: dict[str, set[tuple[str, int, int]]] = {}
    for path, modified, size in files_of(folder):
        found.setdefault(part_of(path), set()).add((path, modified, size))
    return found


FOLDERS = ("", "1", "2", "10", "configs", "1/configs", "2/inner", "1/inner/1", "warmup", "one", ".hidden", "1/.h", "x")
FILES = ("config.pbtxt", "model.onnx", "a.pbtxt", "1", "\u00e4.txt", ".hidden", "b\udcff")


def disturb(model: Path, random: Random) -> None:
    """Change one thing in a model's folder."""
    folder = model / random.choice(FOLDERS)
    file = folder / random.choice(FILES)
    what = random.randrange(12)
    if any(each.is_file() for each in (folder, *folder.parents)):
        return  # "1" may be a file
    if what == 0 and folder != model:
        folder.unlink() if folder.is_symlink() else shutil.rmtree(folder, ignore_errors=True)
    elif what == 1:
        folder.mkdir(parents=True, exist_ok=True)
    elif what == 2 and not folder.exists():
        target = model.parent.parent / "elsewhere" / str(random.randrange(2))
        if target not in [path.resolve() for path in model.rglob("*") if path.is_symlink()]:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.symlink_to(target)  # the only one: a second link would not be followed
    elif what == 3 and file.is_file():
        os.utime(file, ns=(0, random.randrange(10**18)))
    elif what == 4 and file.is_file():
        file.unlink()
    elif folder.is_dir() and not folder.is_symlink() and not file.is_dir():
        file.write_text("x" * random.randrange(3))
        os.utime(file, ns=(0, random.randrange(3)))


@pytest.mark.parametrize("seed", range(3))
def test_looks_see_what_plain_python_sees(tmp_path: Path, seed: int) -> None:
    """A part has another mark, and a model another state, if and only if something has changed there."""
    random = Random(seed)
    root = tmp_path / "repository"
    model = root / "m"
    (root / "m" / "1").mkdir(parents=True)
    (root / "other" / "1").mkdir(parents=True)
    for number in range(2):
        (tmp_path / "elsewhere" / str(number)).mkdir(parents=True)
        (tmp_path / "elsewhere" / str(number) / "config.pbtxt").touch()
    watch = Watch()
    before: tuple[Any, ...] = ()
    changes = 0
    for _ in range(300):
        plain = plain_marks(model)
        found = marks(scan([root])[0])
        assert {part: (mark.files, mark.size) for part, mark in found.items() if mark.files} == {
            part: (len(files), sum(size for *_, size in files)) for part, files in plain.items()
        }
        inside = {each.name for each in model.iterdir() if each.is_dir() and not each.name.startswith(".")}
        state = look(root, watch)
        if before:
            parts = plain.keys() | before[0].keys()
            assert {part for part in parts if found.get(part) != before[1].get(part)} == {
                part for part in parts if plain.get(part) != before[0].get(part)
            }
            assert (state["m"] != before[3]["m"]) == ((plain, inside) != (before[0], before[2]))
            assert state["other"] == before[3]["other"]
            changes += state["m"] != before[3]["m"]
        before = plain, found, inside, state
        disturb(model, random)
    assert changes > 40


def test_a_look_finds_the_models_of_a_scan(tmp_path: Path) -> None:
    make(tmp_path, "m", "1")
    (make(tmp_path, "configured") / "config.pbtxt").touch()
    for name in ("empty", ".hidden", "__pycache__", "lost+found"):
        make(tmp_path, name)
    (make(tmp_path, "nothing but hidden") / ".keep").touch()
    (tmp_path / "README.md").touch()
    (tmp_path / "link").symlink_to(tmp_path / "m")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    make(tmp_path, "wrong\udcff name", "1")
    assert look(tmp_path, Watch()).keys() == {folder.name for folder in scan([tmp_path])}
    with pytest.raises(ConfigError, match="cannot be read: no such file or directory"):
        look(tmp_path / "nowhere", Watch())


def test_a_look_ends_when_it_is_told_to(tmp_path: Path) -> None:
    """A stop does not wait until the files of thousands of models were looked at."""
    make(tmp_path, "m", "1")
    watch = Watch()
    watch.end()
    with pytest.raises(InterruptedError):
        look(tmp_path, watch)
