"""EXECUTION_ENV_PATH: virtual environments, archives, and what is wrong with others."""

import os
import pwd
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from inferd.backends.api import BackendError, ModelSpec
from inferd.backends.python.environment import activated, find_environment, passed_on, unpack
from inferd.backends.python.options import read_backend_options, read_model_options
from tests.backends.python.served import CONFIG, add_model, ask, serving

PREFIX = """
import sys
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        own = int(sys.prefix.endswith("/environment"))
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([[own]], np.int64))]) for _ in requests]
"""


def make_environment(place):
    """A virtual environment that sees the packages of this one, without an installation."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    site = next((place / "lib").glob("python*/site-packages"))
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (site / "ours.pth").write_text("\n".join(ours))
    return place


def parameter(value):
    return CONFIG + f'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{value}" }} }}'


async def test_a_virtual_environment_beside_the_model(tmp_path):
    add_model(tmp_path, "m", PREFIX, parameter("$$TRITON_MODEL_DIRECTORY/environment"))
    make_environment(tmp_path / "m" / "environment")
    async with serving(tmp_path) as engine:
        assert (await ask(engine, 0)).array().tolist() == [[1]]


def test_the_server_s_own_interpreter(tmp_path):
    assert find_environment("", tmp_path, tmp_path).python == sys.executable


def test_an_interpreter_that_is_called_python3_alone(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(sys.executable)
    assert find_environment(str(tmp_path), tmp_path, tmp_path).python == str(tmp_path / "bin" / "python3")


def test_variables_of_an_activated_environment(tmp_path):
    (tmp_path / "pyvenv.cfg").touch()
    out = activated(tmp_path, {"PATH": "/bin", "PYTHONHOME": "/x", "KEPT": "1"})
    assert out == {"PATH": f"{tmp_path}/bin:/bin", "KEPT": "1", "VIRTUAL_ENV": str(tmp_path)}
    (tmp_path / "pyvenv.cfg").unlink()
    out = activated(tmp_path, {"PATH": "/bin", "LD_LIBRARY_PATH": "/lib"})
    assert (out["CONDA_PREFIX"], out["LD_LIBRARY_PATH"]) == (str(tmp_path), f"{tmp_path}/lib:/lib")


def test_activation_scripts_set_variables_and_those_of_other_machines_do_no_harm(tmp_path, caplog):
    """Guards what activation scripts export: places of data, for one. Output of a script is in the log."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").write_text(
        'export VIRTUAL_ENV=/elsewhere PATH="/elsewhere/bin:$PATH" LINES="a\nb=c" PS1="(x)"\n'
        "echo made elsewhere\nunset GONE\n[ -n '' ]\n"
    )
    (tmp_path / "pyvenv.cfg").touch()
    out = activated(tmp_path, {"PATH": "/bin", "GONE": "1", "KEPT": "1"})
    paths = f"{tmp_path}/bin:/elsewhere/bin:{tmp_path}/bin:/bin"
    assert out == {"PATH": paths, "KEPT": "1", "VIRTUAL_ENV": str(tmp_path), "LINES": "a\nb=c"}
    assert "says: made elsewhere" in caplog.text


def test_scripts_of_conda_packages(tmp_path):
    """Guards conda environments, which have their scripts in a folder: GDAL_DATA and PROJ_LIB come from there."""
    scripts = tmp_path / "etc" / "conda" / "activate.d"
    scripts.mkdir(parents=True)
    (scripts / "b.sh").write_text('export PROJ_LIB="$GDAL_DATA/proj"')
    (scripts / "a.sh").write_text('export GDAL_DATA="$CONDA_PREFIX/share/gdal"')
    (scripts / "a.fish").write_text("exit 1")
    out = activated(tmp_path, {"PATH": "/bin"})
    assert out["PROJ_LIB"] == f"{tmp_path}/share/gdal/proj"


def test_an_activation_script_that_gives_up_is_told(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "bin" / "activate").write_text("echo no licence >&2\nexit 3\n")
    with pytest.raises(BackendError, match=r"bin/activate ended its shell with status 3: no licence"):
        find_environment(str(tmp_path), tmp_path, tmp_path)


def archive(tmp_path, fixer=""):
    """An archive as conda-pack makes it, with an interpreter that is a shell script."""
    content = tmp_path / "content" / "bin"
    content.mkdir(parents=True)
    (content / "python").write_text('#!/bin/sh\nexec /bin/sh "$@"\n')
    (content / "python").chmod(0o755)
    if fixer:
        (content / "conda-unpack").write_text(fixer)
    with tarfile.open(tmp_path / "environment.tar.gz", "w:gz") as out:
        out.add(tmp_path / "content", ".")
    return tmp_path / "environment.tar.gz"


def test_an_archive_is_unpacked_once_and_its_paths_are_mended(tmp_path):
    packed = archive(tmp_path, 'echo mended >> "$(dirname "$0")/mended"\n')
    environment = find_environment("environment.tar.gz", tmp_path, tmp_path / "cache")
    assert environment.python == str(unpack(packed, tmp_path / "cache") / "bin" / "python")
    mended = unpack(packed, tmp_path / "cache") / "bin" / "mended"
    assert mended.read_text() == "mended\n"
    os.utime(packed, (1, 1))
    assert unpack(packed, tmp_path / "cache") != mended.parent.parent


def test_what_an_archive_brings_to_mend_its_paths_gets_no_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITONCACHE_REDIS_PASSWORD", "secret")
    monkeypatch.setenv("SEEN", "seen")
    archive(tmp_path, 'echo "${TRITONCACHE_REDIS_PASSWORD:-none} ${SEEN:-none}" > "$(dirname "$0")/told"\n')
    for number, (passed, told) in enumerate([(("*",), "none seen\n"), (("PATH",), "none none\n")]):
        cache = tmp_path / f"cache{number}"
        python = find_environment("environment.tar.gz", tmp_path, cache, passed).python
        assert Path(python).with_name("told").read_text() == told


def test_other_users_of_the_machine_can_keep_no_lock_of_the_cache(tmp_path):
    """A load would wait for whoever keeps it; to keep it takes no more than to read the file."""
    unpack(archive(tmp_path), tmp_path / "cache")
    (lock,) = (tmp_path / "cache").glob("*.lock")
    for path in (lock, lock.parent):
        assert path.stat().st_mode & 0o077 == 0, path


def test_an_archive_that_cannot_be_mended_is_not_kept(tmp_path):
    packed = archive(tmp_path, "exit 1\n")
    for _ in range(2):
        with pytest.raises(BackendError, match="conda-unpack"):
            unpack(packed, tmp_path / "cache")


def test_a_truncated_archive_is_named(tmp_path):
    packed = archive(tmp_path)
    packed.write_bytes(packed.read_bytes()[:-40])
    with pytest.raises(BackendError, match=r"environment\.tar\.gz' cannot be unpacked"):
        unpack(packed, tmp_path / "cache")


@pytest.mark.parametrize("path", ["missing", "plain", "text"])
def test_what_is_no_environment_is_refused(tmp_path, path):
    (tmp_path / "plain").mkdir()
    (tmp_path / "text").write_text("not an archive")
    with pytest.raises(BackendError, match="EXECUTION_ENV_PATH"):
        find_environment(path, tmp_path, tmp_path / "cache")


def test_options_have_their_values_and_errors(caplog):
    caplog.set_level("INFO")
    options = read_backend_options({"stub-timeout-seconds": "5", "shm-default-byte-size": "1", "typo": "x"})
    assert options.stub_timeout == 5
    assert options.busy_poll == 60e-6
    assert read_backend_options({"busy-poll-microseconds": "0"}).busy_poll == 0
    assert "shm-default-byte-size has no effect" in caplog.text
    assert "'typo' has no effect" in caplog.text
    with pytest.raises(BackendError, match="expected at least 1"):
        read_backend_options({"stub-timeout-seconds": "0"})
    with pytest.raises(BackendError, match="expected at least 0"):
        read_backend_options({"busy-poll-microseconds": "-1"})
    for key in ("stub-timeout-seconds", "busy-poll-microseconds"):
        with pytest.raises(BackendError, match="expected at most 1000000000"):
            read_backend_options({key: "1" + "0" * 400})
    spec = ModelSpec("m", "python", parameters={"EXECUTION_TIMEOUT_SECONDS": "soon"})
    with pytest.raises(BackendError, match="expected a number of seconds"):
        read_model_options(spec, options)


def test_the_server_s_secrets_are_not_passed_on():
    theirs = {"HOME": "/", "AWS_REGION": "x", "AWS_ACCESS_KEY_ID": "y", "HF_TOKEN": "z"}
    own = {"INFERD_GRPC_TOKENS": "a", "TRITONCACHE_REDIS_PASSWORD": "b"}
    assert passed_on(theirs | own, ("*",)) == theirs
    assert passed_on(theirs | own, ("HOME", "AWS_*", "INFERD_GRPC_TOKENS", "MISSING")) == {
        "HOME": "/", "AWS_REGION": "x", "AWS_ACCESS_KEY_ID": "y",
    }  # fmt: skip


SHOWS = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        text = " ".join(os.environ.get(name, "-") for name in ("TRITONCACHE_REDIS_PASSWORD", "OMP_NUM_THREADS", "SEEN"))
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError(text)) for _ in requests]
"""


async def test_the_environment_of_a_worker(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITONCACHE_REDIS_PASSWORD", "secret")
    monkeypatch.setenv("SEEN", "seen")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    add_model(tmp_path, "two", SHOWS, CONFIG.replace("count: 1", "count: 2"))
    async with serving(tmp_path, one=SHOWS) as engine:
        cores = len(os.sched_getaffinity(0))
        assert (await ask(engine, 0, model="one")).text == "- - seen"
        assert (await ask(engine, 0, model="two")).text == f"- {max(1, cores // 2)} seen"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    async with serving(tmp_path, {"environment-variables": "OMP_*:PATH"}) as engine:
        assert (await ask(engine, 0, model="two")).text == "- 5 -"


def test_an_archive_whose_unpacking_was_interrupted_is_unpacked_again(tmp_path):
    """Also where that was killed between the last file and what must be done to the files."""
    content = tmp_path / "content"
    (content / "bin").mkdir(parents=True)
    (content / "bin" / "python").touch()
    archive = tmp_path / "environment.tar.gz"
    with tarfile.open(archive, "w:gz") as out:
        out.add(content, arcname=".")
    place = unpack(archive, tmp_path / "cache")
    (place / "bin" / "python").unlink()
    assert unpack(archive, tmp_path / "cache") == place
    assert not (place / "bin" / "python").exists()  # complete: not looked at again
    (place / ".inferd-complete").unlink()
    unpack(archive, tmp_path / "cache")
    assert (place / "bin" / "python").exists()


def test_an_activation_script_that_ends_the_shell_is_told(tmp_path):
    """Otherwise the workers would get no variables at all."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "bin" / "activate").write_text("export SEEN=1\nexit 0\n")
    with pytest.raises(BackendError, match=r"one of the activation scripts in .*bin ends its shell"):
        find_environment(str(tmp_path), tmp_path, tmp_path)


def test_a_user_without_a_home_needs_a_folder_for_archives_only(tmp_path, monkeypatch):
    def unknown(_):
        raise KeyError

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    options = read_backend_options({})
    assert find_environment("", tmp_path, options.cache).python == sys.executable
    archive(tmp_path)
    with pytest.raises(BackendError, match=r"no home folder; name another one by .*environment-cache-directory"):
        find_environment("environment.tar.gz", tmp_path, options.cache)
    options = read_backend_options({"environment-cache-directory": str(tmp_path / "cache")})
    find_environment("environment.tar.gz", tmp_path, options.cache)


def test_a_server_that_is_killed_while_it_unpacks_leaves_nothing_that_stays(tmp_path):
    packed = archive(tmp_path)
    killed = f"""
import os, pathlib, tarfile
from inferd.backends.python.environment import unpack
extract = tarfile.TarFile.extractall
def die(*arguments, **more):
    extract(*arguments, **more)
    os._exit(9)
tarfile.TarFile.extractall = die
unpack(pathlib.Path({str(packed)!r}), pathlib.Path({str(tmp_path / "cache")!r}))
"""
    assert subprocess.run([sys.executable, "-c", killed], check=False).returncode == 9
    place = unpack(packed, tmp_path / "cache")
    assert {each.name for each in (tmp_path / "cache").iterdir()} == {place.name, f"{place.name}.lock"}
