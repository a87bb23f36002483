"""Guards the native reads of small files: what they give is what plain Python gives, errors included."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from inferd._native.file_contents import find_beginning, read_regular
from inferd._native.model_files import folders_in


@pytest.mark.parametrize("size", [0, 1, 9, 10, 11, 12, 100_000])
def test_a_file_is_read_up_to_a_limit(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    (tmp_path / "file").write_bytes(content)
    assert read_regular(str(tmp_path / "file"), 10) == content[:11]
    assert read_regular(str(tmp_path / "file"), 1 << 40) == content


def test_a_file_without_a_known_size_is_read_to_its_end() -> None:
    assert read_regular("/proc/self/limits", 1 << 20).startswith(b"Limit")
    assert len(read_regular("/proc/self/limits", 10)) == 11


def test_what_is_no_regular_file_is_not_read(tmp_path: Path) -> None:
    """Opening a FIFO would wait for ever."""
    os.mkfifo(tmp_path / "fifo")
    for path, number in {"fifo": errno.EINVAL, ".": errno.EINVAL, "nothing": errno.ENOENT}.items():
        with pytest.raises(OSError) as caught:
            read_regular(str(tmp_path / path), 10)
        assert (caught.value.errno, caught.value.filename) == (number, str(tmp_path / path))
    with pytest.raises(ValueError, match="null byte"):
        read_regular("a\0b", 10)


def test_the_first_file_that_begins_so(tmp_path: Path) -> None:
    for name, content in {
        "c": b"begin",
        "b": b"beginning",
        "a": b"begi",
        "large": b"begin" * 20,
        "d": b"other",
    }.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "0").mkdir()
    os.mkfifo(tmp_path / "1")
    (tmp_path / "2").symlink_to("nowhere")
    assert find_beginning(str(tmp_path), b"begin", 100) == "b"
    assert find_beginning(str(tmp_path), b"nothing", 100) is None
    (tmp_path / "3").symlink_to("large")
    assert find_beginning(str(tmp_path), b"begin", 101) == "3"
    with pytest.raises(FileNotFoundError):
        find_beginning(str(tmp_path / "nowhere"), b"begin", 100)


def test_files_may_go_while_they_are_looked_at(tmp_path: Path) -> None:
    """As temporary files do, where a file is replaced: the model loads all the same."""
    code = """
import os, sys
os.chdir(sys.argv[1])
names = [f"{number}" for number in range(30)]
print(flush=True)
while True:
    for name in names:
        os.close(os.open(name, os.O_CREAT | os.O_WRONLY))
    for name in names:
        os.unlink(name)
"""
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        try:
            assert {find_beginning(str(tmp_path), b"begin", 100) for _ in range(5000)} == {None}
        finally:
            writer.kill()


def test_folders_in_a_folder(tmp_path: Path) -> None:
    assert folders_in(str(tmp_path)) == ([], True)
    (tmp_path / ".hidden").mkdir()
    assert folders_in(str(tmp_path)) == ([".hidden"], True)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "broken").symlink_to("nowhere")
    names, is_empty = folders_in(str(tmp_path))
    assert (sorted(names), is_empty) == ([".hidden", "link"], False)
    with pytest.raises(NotADirectoryError):
        folders_in(str(tmp_path / "file"))
