"""Registration of shared memory with real servers: who may, which objects, for how long, and what is refused."""

from __future__ import annotations

import os
import random
import socket
import string
import subprocess
import sys
import tempfile
from pathlib import Path

import grpc
import pytest
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as triton_shm
from tritonclient.utils import InferenceServerException

from inferd_client.pb import grpc_service_pb2 as pb
from tests.conformance import shared
from tests.conformance.shared import Object, connected, register, registered, serving, unregister

Code = grpc.StatusCode
DISABLED = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
OTHER_USER = 54321

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture(scope="module", params=["native", "grpcio"])
def opened(request, repository, tmp_path_factory):
    """A server that lets everybody use shared memory."""
    with serving(request.param, repository, tmp_path_factory.mktemp("open"), "--allow-client-shm=true") as server:
        yield server


@pytest.fixture(scope="module", params=["native", "grpcio"])
def closed(request, repository, tmp_path_factory):
    """A server as it is without options; `door` is its front door."""
    with serving(request.param, repository, tmp_path_factory.mktemp("closed")) as server:
        server.door = request.param
        yield server


@pytest.fixture
def stub(opened):
    with connected(opened.tcp) as stub:
        yield stub
        unregister(stub)


@pytest.fixture
def made():
    with Object(bytes(range(256)) * 32) as made:
        yield made


def refused(call, *arguments, **keywords):
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, **keywords)
    return caught.value.code(), caught.value.details()


# ---- tritonclient ----


@pytest.mark.parametrize("where", ["tcp", "unix"])
def test_tritonclient_registers_and_unregisters(opened, where):
    with triton.InferenceServerClient(getattr(opened, where)) as client:
        handle = triton_shm.create_shared_memory_region("input_data", f"inferd-test-{os.getpid()}", 64)
        try:
            client.register_system_shared_memory("input_data", f"/inferd-test-{os.getpid()}", 32, offset=16)
            status = client.get_system_shared_memory_status(as_json=True)["regions"]
            assert status == {
                "input_data": {
                    "name": "input_data", "key": f"/inferd-test-{os.getpid()}", "offset": "16", "byte_size": "32",
                }
            }  # fmt: skip
            with pytest.raises(InferenceServerException, match="shared memory region 'input_data' already in manager"):
                client.register_system_shared_memory("input_data", f"/inferd-test-{os.getpid()}", 32)
            client.unregister_system_shared_memory("input_data")
            assert client.get_system_shared_memory_status(as_json=True) == {}
        finally:
            triton_shm.destroy_shared_memory_region(handle)


# ---- who may ----


def test_over_tcp_it_is_off_and_the_refusal_names_the_flag(closed, made):
    with connected(closed.tcp) as stub:
        for call in (lambda: register(stub, "r", made, 64), lambda: unregister(stub, "r"), lambda: unregister(stub)):
            code, text = refused(call)
            assert code is Code.UNIMPLEMENTED
            assert text.startswith(DISABLED)
        assert registered(stub) == {}
        assert refused(registered, stub, "r")[0] is Code.NOT_FOUND


def test_over_a_unix_socket_it_is_on_where_the_user_is_known(closed, made):
    with connected(closed.unix) as stub:
        if closed.door != "native":
            assert refused(register, stub, "r", made, 64)[0] is Code.UNIMPLEMENTED
            return
        register(stub, "r", made, 64)
        assert registered(stub) == {"r": (made.key, 0, 64)}
        with connected(closed.tcp) as outsider:
            assert registered(outsider) == {}
        unregister(stub, "r")
        assert registered(stub) == {}


AS_USER = """
import os, sys, grpc
from tests.conformance import shared
os.setgroups([]); os.setgid(int(sys.argv[4])); os.setuid(int(sys.argv[4]))
with shared.connected(sys.argv[1]) as stub:
    for name, key in (("own", sys.argv[2]), ("other", sys.argv[3])):
        try:
            shared.register(stub, name, key, 64)
        except grpc.RpcError as error:
            print(name, error.code().name, error.details())
    print("sees", shared.registered(stub))
    request = shared.pb.ModelInferRequest(model_name="simple")
    tensor = request.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 2])
    tensor.parameters["shared_memory_byte_size"].int64_param = 8
    for region in ("own", "hers"):
        tensor.parameters["shared_memory_region"].string_param = region
        try:
            print(region, stub.ModelInfer(request).raw_output_contents[0])
        except grpc.RpcError as error:
            print(region, error.code().name, error.details())
    shared.unregister(stub)
"""


@needs_root
def test_users_have_their_own_regions_and_only_their_own_objects(repository):
    with tempfile.TemporaryDirectory() as folder, Object(bytes(64)) as mine, Object(b"12345678" * 8) as theirs:
        Path(folder).chmod(0o755)
        mine.path.chmod(0o666)
        os.chown(theirs.path, OTHER_USER, OTHER_USER)
        with (
            serving("native", repository, Path(folder), "--grpc-unix-mode", "0666") as server,
            connected(server.unix) as stub,
        ):
            register(stub, "own", mine, 64)
            register(stub, "hers", mine, 64)
            code, text = refused(register, stub, "x", theirs, 64)
            assert code is Code.PERMISSION_DENIED
            assert text.endswith(f"its object belongs to user {OTHER_USER}, expected the caller's user 0")
            command = [sys.executable, "-c", AS_USER, server.unix, theirs.key, mine.key, str(OTHER_USER)]
            said = subprocess.run(command, cwd=shared.doors.ROOT, capture_output=True, text=True, check=False)
            assert said.stdout.splitlines() == [
                "other PERMISSION_DENIED failed to register shared memory region 'other': its object belongs to user "
                f"0, expected the caller's user {OTHER_USER}",
                f"sees {{'own': ('{theirs.key}', 0, 64)}}",
                f"own {b'12345678'}",
                "hers NOT_FOUND Unable to find shared memory region: 'hers'",
            ], said.stderr
            assert set(registered(stub)) == {"own", "hers"}, "unregistering all took only the other user's"


def test_it_can_be_off_everywhere(repository, tmp_path, made):
    with serving("native", repository, tmp_path, "--client-shm-access=none") as server, connected(server.unix) as stub:
        assert refused(register, stub, "r", made, 64)[0] is Code.UNIMPLEMENTED
        assert "system_shared_memory" not in stub.ServerMetadata(pb.ServerMetadataRequest()).extensions


# ---- which objects ----


@pytest.mark.parametrize(
    "key", ["", "/", "//", "a/b", "/../x", "..", ".", "/./x", "sem.x", "a\0b", "x" * 256, "/" * 999 + "x"]
)
def test_keys_that_no_object_has(stub, key):
    code, text = refused(register, stub, "r", key, 64)
    assert code is Code.INVALID_ARGUMENT
    shown = key[:255].replace("\0", " ") if "\0" not in text else key
    assert text.startswith(f"cannot register shared memory region 'r' - invalid shm key '{shown}'")


@pytest.mark.parametrize("slashes", ["", "/", "///"])
def test_keys_of_the_python_backend(stub, slashes):
    code, text = refused(register, stub, "r", f"{slashes}triton_python_backend_shm_region_1", 64)
    assert code is Code.INVALID_ARGUMENT
    assert text == (
        f"cannot register shared memory region 'r' with key '{slashes}triton_python_backend_shm_region_1' as the key "
        "contains the reserved prefix 'triton_python_backend_shm_region_'"
    )


def test_an_object_that_is_not_there(stub):
    assert refused(register, stub, "r", "/inferd-test-nothing", 64) == (
        Code.INTERNAL, "Unable to open shared memory region: '/inferd-test-nothing'",
    )  # fmt: skip


def test_what_is_no_object(stub, made, tmp_path):
    """A link is not followed, a pipe does not stop the server, a folder and a socket are no memory."""
    outside = tmp_path / "file"
    outside.write_bytes(bytes(64))
    link = made.path.with_suffix(".link")
    pipe, folder, listener = (made.path.with_suffix(suffix) for suffix in (".pipe", ".folder", ".socket"))
    try:
        link.symlink_to(outside)
        os.mkfifo(pipe)
        folder.mkdir()
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(listener))
            for path, code in [
                (link, Code.INTERNAL), (pipe, Code.INVALID_ARGUMENT), (folder, Code.INTERNAL),
                (listener, Code.INTERNAL),
            ]:  # fmt: skip
                assert refused(register, stub, "r", path.name, 64)[0] is code
    finally:
        for path in (link, pipe, listener):
            path.unlink(missing_ok=True)
        if folder.exists():
            folder.rmdir()
    assert registered(stub) == {}


@pytest.mark.parametrize(
    ("offset", "size"),
    [
        (0, 0), (0, 8193), (1, 8192), (8192, 1), (2**63 - 1, 2**63 - 1), (2**64 - 1, 1), (2**64 - 1, 2**64 - 1),
        (1, 2**64 - 1),
    ],
)  # fmt: skip
def test_parts_that_the_object_does_not_have(stub, made, offset, size):
    code, text = refused(register, stub, "r", made, size, offset)
    assert code is Code.INVALID_ARGUMENT
    assert text.startswith("failed to register shared memory region 'r': invalid args")


def test_names_of_regions_have_bounds_and_may_contain_anything(stub, made):
    for name in ("", "x" * 256):
        assert refused(register, stub, name, made, 64)[0] is Code.INVALID_ARGUMENT
    for name in ("x" * 255, "ä b/\n", "a\0b"):
        register(stub, name, made, 64)
        assert registered(stub, name) == {name: (made.key, 0, 64)}
        unregister(stub, name)
    code, text = refused(registered, stub, "r")
    assert (code, text) == (Code.NOT_FOUND, "Unable to find system shared memory region: 'r'")
    unregister(stub, "r")  # which is not there


def test_several_parts_of_one_object(stub, made):
    register(stub, "a", made, 100, 1)
    register(stub, "b", made, 8192)
    assert registered(stub) == {"a": (made.key, 1, 100), "b": (made.key, 0, 8192)}
    made.path.unlink()
    assert registered(stub, "a"), "an object stays until its last user has left"
    unregister(stub)
    assert registered(stub) == {}


def test_prefixes_and_bounds(repository, tmp_path, made):
    prefixes = ("--client-shm-prefix=inferd-test", "--client-shm-prefix=b")
    regions = ("--client-shm-max-regions=2", "--client-shm-max-regions-per-user=2")
    sizes = ("--client-shm-max-byte-size=8192", "--client-shm-max-byte-size-per-user=8192")
    with (
        serving("native", repository, tmp_path, *prefixes, *regions, *sizes) as server,
        connected(server.unix) as stub,
    ):
        code, text = refused(register, stub, "r", "/c", 64)
        assert code is Code.PERMISSION_DENIED
        assert text.endswith("'inferd-test' or 'b' (--client-shm-prefix)")
        assert refused(register, stub, "r", "/b", 64)[0] is Code.INTERNAL, "there is no such object"
        register(stub, "a", made, 8000)
        assert refused(register, stub, "b", made, 193)[0] is Code.RESOURCE_EXHAUSTED
        register(stub, "b", made, 192)
        assert refused(register, stub, "c", made, 1)[0] is Code.RESOURCE_EXHAUSTED
        unregister(stub)
        register(stub, "c", made, 8192)


AS_GREEDY = """
import os, sys, grpc
from tests.conformance import shared
os.setgroups([]); os.setgid(int(sys.argv[3])); os.setuid(int(sys.argv[3]))
with shared.connected(sys.argv[1]) as stub:
    try:
        for number in range(100):
            shared.register(stub, f"r{number}", sys.argv[2], 8)
    except grpc.RpcError as error:
        print(number, error.code().name, error.details())
"""


@needs_root
def test_one_user_cannot_take_what_all_share(repository):
    """Half of it at most, and what is told of it is its own."""
    with tempfile.TemporaryDirectory() as folder, Object(bytes(64)) as mine, Object(bytes(64)) as theirs:
        Path(folder).chmod(0o755)
        os.chown(theirs.path, OTHER_USER, OTHER_USER)
        options = ("--grpc-unix-mode", "0666", "--client-shm-max-regions=8", "--client-shm-max-byte-size=4096")
        with serving("native", repository, Path(folder), *options) as server, connected(server.unix) as stub:
            register(stub, "first", mine, 64)
            command = [sys.executable, "-c", AS_GREEDY, server.unix, theirs.key, str(OTHER_USER)]
            said = subprocess.run(command, cwd=shared.doors.ROOT, capture_output=True, text=True, check=False)
            assert said.stdout == (
                "4 RESOURCE_EXHAUSTED failed to register shared memory region 'r4': 4 regions of 32 bytes are "
                "registered or in use, expected at most 4 of 2048 bytes with this one of 8 bytes\n"
            ), said.stderr
            for number in range(3):
                register(stub, f"r{number}", mine, 64)


# ---- for how long ----


@pytest.mark.parametrize("closed", ["native"], indirect=True)
def test_a_region_may_go_with_its_connection(closed, made):
    lifetime = (("inferd-shm-lifetime", "connection"),)
    with connected(closed.unix) as watcher:
        with connected(closed.unix) as stub:
            register(stub, "short", made, 64, metadata=lifetime)
            register(stub, "long", made, 64, metadata=(("inferd-shm-lifetime", "server"),))
            register(stub, "replaced", made, 64, metadata=lifetime)
            unregister(stub, "replaced")
            register(watcher, "replaced", made, 128)
            assert set(registered(watcher)) == {"short", "long", "replaced"}
        while "short" in registered(watcher):  # the server hears of the end when it hears of it
            pass
        assert registered(watcher) == {"long": (made.key, 0, 64), "replaced": (made.key, 0, 128)}
        unregister(watcher)


@pytest.mark.parametrize("opened", ["grpcio"], indirect=True)
def test_a_door_that_does_not_see_connections_says_so(opened, made):
    with connected(opened.tcp) as stub:
        code, text = refused(register, stub, "r", made, 64, metadata=(("inferd-shm-lifetime", "connection"),))
        assert code is Code.UNIMPLEMENTED
        assert "--transport native" in text
        assert registered(stub) == {}


def test_a_lifetime_that_is_not_known_is_refused(stub, made):
    code, text = refused(register, stub, "r", made, 64, metadata=(("inferd-shm-lifetime", "hour"),))
    assert code is Code.INVALID_ARGUMENT
    assert "'connection' or 'server'" in text


# ---- hostile clients ----


def test_a_thousand_hostile_registrations(opened, stub, made):
    """Each is refused with a status of the client's fault, and leaves no descriptor behind."""
    chance = random.Random(5)
    expected = {Code.INVALID_ARGUMENT, Code.INTERNAL, Code.PERMISSION_DENIED, Code.ALREADY_EXISTS}
    register(stub, "taken", made, 64)
    before = _descriptors(opened)
    for _ in range(1000):
        name = chance.choice(["taken", "r", "", "r" * chance.randrange(300), "\0"])
        key = chance.choice([
            made.key, "/", "..", "/etc/passwd", "/../etc/passwd", "sem.x", "triton_python_backend_shm_region_0",
            "/inferd-test-nothing", "".join(chance.choices(string.printable, k=chance.randrange(20))),
        ])  # fmt: skip
        offset, size = (
            chance.choice([0, 1, 64, 8191, 8192, 2**31, 2**32, 2**63, 2**63 - 1, 2**64 - 1]) for _ in range(2)
        )
        if name not in ("taken", "", "\0") and key == made.key and 0 < size <= 8192 - offset:
            continue
        try:
            register(stub, name, key, size, offset)
        except grpc.RpcError as error:
            assert error.code() in expected
            assert error.details()
        else:
            assert name
            assert len(name) < 256
            unregister(stub, name)
    assert registered(stub) == {"taken": (made.key, 0, 64)}
    assert _descriptors(opened) == before
    assert stub.ServerLive(pb.ServerLiveRequest()).live


def _descriptors(server):
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
