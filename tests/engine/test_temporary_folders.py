"""Folders of what a server needs while it runs: removed by it, or after it, and never while it runs."""

import errno
import fcntl
import subprocess
import sys
from pathlib import Path

from inferd.backends.temporary import TemporaryFolder, remove_left_folders

OWNER = """
import sys
from inferd.backends.temporary import TemporaryFolder
folder = TemporaryFolder("test", sys.argv[1])
(folder.path / "content").write_text("x")
print(folder.path, flush=True)
sys.stdin.read()
"""


def test_a_folder_is_removed_by_its_owner(tmp_path):
    """By `cleanup`, or with the object."""
    folder = TemporaryFolder("test", str(tmp_path))
    (folder.path / "content").write_text("x")
    folder.cleanup()
    folder.cleanup()
    assert not any(tmp_path.iterdir())
    del folder
    TemporaryFolder("test", str(tmp_path))
    assert not any(tmp_path.iterdir())


def test_what_a_killed_process_has_left_is_removed_and_nothing_else(tmp_path):
    mine = TemporaryFolder("test", str(tmp_path))
    foreign = tmp_path / "inferd-of-somebody"
    foreign.mkdir()
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdin=-1, stdout=-1, text=True)
    try:
        left = Path(owner.stdout.readline().strip())
        remove_left_folders(str(tmp_path))
        assert (left / "content").exists()
    finally:
        owner.kill()
        owner.communicate()
    remove_left_folders(str(tmp_path))
    assert sorted(tmp_path.iterdir()) == sorted((mine.path, foreign))
    mine.cleanup()


def test_a_file_system_without_locks_will_do(tmp_path, monkeypatch):
    """Guards that the server starts with such a folder for copies; only its owner removes what is in it."""

    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", flock)
        folder = TemporaryFolder("test", str(tmp_path))
    remove_left_folders(str(tmp_path))
    assert folder.path.is_dir()
    folder.cleanup()
    assert not any(tmp_path.iterdir())
