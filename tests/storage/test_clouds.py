"""Repositories in object stores: what is served, what is copied again, and what happens when the store fails.

S3 is moto's, Azure's azurite, where it is installed; of GCS there is a stub: no cloud itself has been asked.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inferd.backends.loader import BackendLoader
from inferd.server.checking import check
from inferd.server.engine.config import Options
from inferd.server.engine.engine import Engine
from inferd.server.engine.loading.control import ControlMode, ModelControl
from inferd.server.engine.repository.folders import CONFIGURATION
from inferd.server.engine.repository.remote import mirror, stores
from inferd.server.engine.repository.remote.mirror import CloudSource
from inferd.server.engine.repository.remote.stores import parse_url
from inferd.server.engine.repository.sources import Repositories, open_sources
from inferd.server.errors import ConfigError, InvalidArgument
from tests.engine.serving import infer, poll, request, row
from tests.storage.stores import Stub, azure, azurite, gcs, s3

CONFIG = b"""
backend: "identity"
max_batch_size: 8
version_policy { all { } }
input { name: "x" data_type: TYPE_INT64 dims: [ -1 ] }
output { name: "y" data_type: TYPE_INT64 dims: [ -1 ] }
"""


@pytest.fixture(params=["s3", "as", "gs"])
def cloud(request):
    """A repository with the model m, versions 1 and 2, in each kind of store."""
    if request.param == "as" and azurite() is None:
        pytest.skip("not installed: azurite")
    with {"s3": s3, "as": azure, "gs": gcs}[request.param]() as cloud:
        write(cloud.put)
        yield cloud


def write(put, name: str = "m") -> None:
    put(f"{name}/config.pbtxt", CONFIG)
    put(f"{name}/1/weights.bin", b"one")
    put(f"{name}/2/weights.bin", b"two")
    put(f"{name}/2/deep/more.bin", b"")


@pytest.fixture
def stub():
    """A store that does as the test says, with the model m; a source of it; no patience."""
    stub = Stub()
    write(lambda path, content: stub.objects.__setitem__(f"repository/{path}", content))
    yield stub
    stub.close()


def source_of(stub: Stub, monkeypatch) -> CloudSource:
    monkeypatch.setitem(stores._RETRY, "max_retries", 0)
    return CloudSource("gs://bucket/repository", {"STORAGE_EMULATOR_HOST": stub.address})


def engine_of(source, mode: ControlMode = ControlMode.EXPLICIT, *names: str) -> Engine:
    return Engine([source], BackendLoader(), Options(), control=ModelControl(mode, names))


async def answered(engine: Engine) -> None:
    answer = await infer(engine, request(x=row(7)))
    assert (answer.status, answer.array("y").tolist()) == (0, [[7]])


async def test_a_repository_is_served_and_changes(cloud) -> None:
    """The versions whose files have not changed stay loaded; what is new, changed or gone is seen."""
    engine = engine_of(CloudSource(cloud.url, cloud.environment), ControlMode.EXPLICIT, "*")
    try:
        assert await engine.start() == []
        assert {(each.name, each.version, each.state) for each in engine.index()} == {
            ("m", "1", "READY"),
            ("m", "2", "READY"),
        }
        await answered(engine)
        first, second = engine.versions("m")
        assert (first.lane and second.version) == 2
        cloud.put("m/2/weights.bin", b"other")
        cloud.put("m/3/weights.bin", b"three")
        cloud.delete("m/2/deep/more.bin")
        await engine.load("m")
        assert [each.version for each in engine.versions("m")] == [1, 2, 3]
        assert engine.versions("m")[0] is first
        assert engine.versions("m")[1] is not second
        with pytest.raises(Exception, match="failed to poll from model repository"):
            await engine.load("nothing")
        cloud.put("n/config.pbtxt", CONFIG)
        cloud.put("n/1/x", b"x")
        assert {each.name for each in await engine.repository_index()} == {"m", "n"}
    finally:
        await engine.close()


def test_what_lies_here_is_what_lies_there(cloud, tmp_path: Path) -> None:
    source = CloudSource(cloud.url, cloud.environment | {"TRITON_AWS_MOUNT_DIRECTORY": str(tmp_path)})
    assert [folder.name for folder in source.scan()] == ["m"]
    assert source.has("m") and not source.has("n") and not source.has("") and not source.has("..")
    folder = source.find("m")
    assert folder is not None
    files = {str(path.relative_to(folder.path)): path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    assert files == {"config.pbtxt": CONFIG, "1/weights.bin": b"one", "2/weights.bin": b"two", "2/deep/more.bin": b""}
    assert folder.versions == (1, 2)
    source.close()
    assert not folder.path.exists()


def test_only_what_has_changed_is_copied_again(stub, monkeypatch) -> None:
    """The previous copy stays as it was, because loaded models use it."""
    source = source_of(stub, monkeypatch)
    before = source.find("m")
    stub.gets.clear()
    assert source.find("m") == before
    assert stub.gets == []
    stub.objects["repository/m/2/weights.bin"] = b"2222"
    after = source.find("m")
    assert stub.gets == ["repository/m/2/weights.bin"]
    assert (before.path / "2/weights.bin").read_bytes() == b"two"
    assert (after.path / "2/weights.bin").read_bytes() == b"2222"
    assert {part for part in after.seen if after.seen[part] != before.seen[part]} == {"2"}
    stub.objects["repository/m/2/config.pbtxt"] = b"max_batch_size: 2"
    own = source.find("m")
    assert (own.path / "2/config.pbtxt").read_bytes() == b"max_batch_size: 2"
    assert {part for part in own.seen if own.seen[part] != after.seen[part]} == {CONFIGURATION}
    for number in range(3):
        stub.objects["repository/m/2/weights.bin"] = f"{number}".encode()
        after = source.find("m")
    assert not (before.path / "2" / "weights.bin").exists(), "old copies do not pile up"
    assert (before.path / "1" / "weights.bin").samefile(after.path / "1" / "weights.bin"), "it may be loaded from there"
    stub.objects["repository/m/1/weights.bin"] = b"1"
    del stub.objects["repository/m/2/deep/more.bin"]
    source.find("m")
    assert not before.path.exists()
    source.close()


def deny(method: str, key: str):
    return 403, b"<Error><Code>AccessDenied</Code></Error>"


def throttle(method: str, key: str):
    return 503, b"<Error><Code>SlowDown</Code></Error>"


def interrupt(method: str, key: str):
    return (200, b"tw") if key.endswith("2/weights.bin") else None


def vanish(method: str, key: str):
    return (404, b"<Error><Code>NoSuchKey</Code></Error>") if key.endswith("2/weights.bin") else None


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (deny, "gs://bucket/repository/m: the credentials may not read it, HTTP 403 Forbidden, AccessDenied"),
        (throttle, "the store is throttling, or out of service, HTTP 503 Service Unavailable, SlowDown"),
        (interrupt, "gs://bucket/repository: repository/m/2/weights.bin: "),
        (vanish, "gs://bucket/repository/m: it has changed 3 times while it was copied: try again later"),
    ],
)
async def test_a_store_that_fails_changes_nothing(stub, monkeypatch, failure, text: str) -> None:
    """The error says what the store said; what was loaded serves on, and nothing half lies anywhere."""
    source = source_of(stub, monkeypatch)
    engine = engine_of(source, ControlMode.EXPLICIT, "m")
    try:
        assert await engine.start() == []
        served = engine.model("m")
        stub.objects["repository/m/2/weights.bin"] = b"other"
        stub.intercept = failure
        with pytest.raises(InvalidArgument, match="load failed for model 'm'") as raised:
            await engine.load("m")
        assert text in str(raised.value)
        assert engine.model("m") is served
        await answered(engine)
        root = served_root(source)
        assert len(list(root.iterdir())) == 1
        stub.intercept = lambda method, key: None
        await engine.load("m")
        assert engine.model("m") is not served
    finally:
        await engine.close()


@pytest.mark.parametrize(
    ("status", "text"),
    [(403, "answers HTTP 403 Forbidden"), (404, "answers HTTP 404 Not Found"), (0, "does not answer")],
)
def test_where_there_are_no_credentials_it_is_said(stub, monkeypatch, status, text) -> None:
    """The last to be asked for some is the metadata service of the machine; its refusal is not the store's."""
    stub.intercept = lambda method, key: (status, b"denied")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://{stub.address if status else '127.0.0.1:1'}")
    monkeypatch.setitem(stores._RETRY, "max_retries", 0)
    source = CloudSource(f"s3://{stub.address}/bucket/repository", {})
    expected = f"set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or TRITON_CLOUD_CREDENTIAL_PATH; .*{text}$"
    with pytest.raises(ConfigError, match=f"/repository: no credentials were found: {expected}"):
        source.scan()
    source.close()


async def test_errors_name_the_original_and_not_the_copy(stub, monkeypatch, caplog) -> None:
    """Nor do warnings. Folders that are no versions, as TensorFlow Serving's with leading zeros, are named."""
    write(lambda path, content: stub.objects.__setitem__(f"repository/{path}", content), "padded")
    for path in ("1/weights.bin", "2/weights.bin", "2/deep/more.bin"):
        stub.objects[f"repository/padded/0000{path}"] = stub.objects.pop(f"repository/padded/{path}")
    stub.objects["repository/m/config.pbtxt"] = CONFIG + b"nothing: 1"
    source = source_of(stub, monkeypatch)
    engine = engine_of(source)
    try:
        for name, text in {"padded": "00001 is ignored: .* no leading zeros, rename it to 1;", "m": "nothing"}.items():
            with pytest.raises(InvalidArgument, match=f"gs://bucket/repository/{name}.*{text}") as raised:
                await engine.load(name)
            assert str(source._root) not in str(raised.value) + caplog.text
    finally:
        await engine.close()


def served_root(source: CloudSource) -> Path:
    folder = source._copies["m"][0][0]
    return folder.path.parent.parent


async def test_a_model_that_changes_while_it_is_copied_is_copied_again(stub, monkeypatch) -> None:
    """No mixture of two states is ever served."""
    source = source_of(stub, monkeypatch)
    changes = iter([b"first", b"second"])

    def change(method: str, key: str):
        if method == "GET" and key.endswith("config.pbtxt") and (content := next(changes, None)):
            stub.objects["repository/m/1/weights.bin"] = content
            stub.objects["repository/m/2/weights.bin"] = content
        return

    stub.intercept = change
    folder = source.find("m")
    assert {(folder.path / version / "weights.bin").read_bytes() for version in "12"} == {b"second"}
    source.close()


async def test_polling_tries_again_what_could_not_be_had(stub, monkeypatch) -> None:
    """A failed transfer is no state of the repository: the next look must not take the model for seen."""
    engine = engine_of(source_of(stub, monkeypatch), ControlMode.POLL)
    try:
        assert await engine.start() == []
        served = engine.model("m")
        stub.objects["repository/m/2/weights.bin"] = b"other"
        stub.intercept = interrupt
        await poll(engine)
        assert engine.model("m") is served
        stub.intercept = lambda method, key: None
        await poll(engine)
        assert engine.model("m") is not served
        stub.intercept = deny
        with pytest.raises(ConfigError, match="may not read it"):
            await poll(engine)
        assert engine.model("m").version == 2
    finally:
        await engine.close()


async def test_models_come_at_their_first_request(stub, monkeypatch) -> None:
    engine = engine_of(source_of(stub, monkeypatch), ControlMode.LAZY)
    try:
        assert await engine.start() == []
        assert await engine.is_on_demand("m")
        assert stub.gets == []
        await answered(engine)
        assert len(stub.gets) == 4
    finally:
        await engine.close()


def test_check_looks_into_the_models(stub, monkeypatch) -> None:
    repositories = Repositories([source_of(stub, monkeypatch)])
    assert [(each.name, each.problem) for each in check(repositories, Options(), BackendLoader())] == [("m", "")]
    repositories.close()


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("s3://bucket/a/b/", ("s3", "bucket", "a/b", "", "")),
        ("s3://bucket", ("s3", "bucket", "", "", "")),
        ("s3://host:9000/bucket/a", ("s3", "bucket", "a", "http://host:9000", "")),
        ("s3://https://host:9000/bucket/a", ("s3", "bucket", "a", "https://host:9000", "")),
        ("s3://http://10.0.0.1:9000/bucket", ("s3", "bucket", "", "http://10.0.0.1:9000", "")),
        ("gs://bucket/a", ("gs", "bucket", "a", "", "")),
        ("as://account/container/a", ("as", "container", "a", "", "account")),
        ("as://account.blob.core.windows.net/container", ("as", "container", "", "", "account")),
    ],
)
def test_a_url_means_what_it_means_to_triton(url: str, parts: tuple[str, ...]) -> None:
    found = parse_url(url)
    assert (found.scheme, found.bucket, found.prefix, found.endpoint, found.account) == parts


@pytest.mark.parametrize("url", ["s3://", "gs:///a", "as://account", "s3://host:9000/"])
def test_a_url_without_a_bucket_is_an_error(url: str) -> None:
    with pytest.raises(ConfigError, match="expected s3://"):
        parse_url(url)


def test_another_scheme_is_an_error() -> None:
    with pytest.raises(ConfigError, match="ftp://host/models: expected a path, or a URL that begins with one of s3://"):
        open_sources(["ftp://host/models"])


def test_the_credential_file_says_who_by_the_longest_beginning(tmp_path: Path) -> None:
    path = tmp_path / "credentials.json"
    entries = {
        "": {"key_id": "any", "secret_key": "s"},
        "s3://bucket": {"key_id": "bucket", "secret_key": "s", "region": "eu-west-1"},
        "s3://bucket/a": {"key_id": "folder", "secret_key": "s", "session_token": "t"},
        "s3://profile": {"profile": "p"},
    }
    path.write_text(json.dumps({"s3": entries, "gs": {"": "/key.json"}}))
    environment = {"TRITON_CLOUD_CREDENTIAL_PATH": str(path), "AWS_ACCESS_KEY_ID": "environment"}
    for url, who in {"s3://other/x": "any", "s3://bucket/b": "bucket", "s3://bucket/a/c": "folder"}.items():
        assert stores.open_store(url, environment).config["access_key_id"] == who
    with pytest.raises(ConfigError, match="no profile"):
        stores.open_store("s3://profile/x", environment)
    for text in ("[", '{"s3": {"": "key"}}', '{"s3": ["s3://other"]}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"TRITON_CLOUD_CREDENTIAL_PATH: .*: it is not JSON as Triton documents"):
            stores.open_store("s3://other/x", environment)


def test_without_the_library_it_is_said_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"pip install 'inferd\[cloud\]'"):
        mirror.CloudSource("s3://bucket/a", {})


def test_in_an_image_it_is_said_how_to_build_one_with_the_library(monkeypatch, tmp_path: Path) -> None:
    """There is no pip in it."""
    (tmp_path / "sbom.cdx.json").touch()
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"build the image with --build-arg 'PACKAGES=inferd\[cloud\]'$"):
        mirror.CloudSource("s3://bucket/a", {})
