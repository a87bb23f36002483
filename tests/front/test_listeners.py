"""The addresses at which doors listen: TCP on both families, unix sockets, shared ports; and who a client is."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import os
import socket
import stat
import sys
from pathlib import Path

import grpc
import pytest

from inferd.server.addresses import TcpAddress, UnixAddress, parse_address
from inferd.server.front import listeners
from inferd.server.front.listeners import InUseError, ListenError, ListenPolicy
from tests import forkserver
from tests.conformance import doors
from tests.front import host

doors_under_test = pytest.mark.parametrize("door", doors.NAMES)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback address")


def told(address: str) -> dict:
    with grpc.insecure_channel(address) as channel:
        return host.ask(channel)


def failed(door: str, *arguments: str) -> str:
    """The output of a host that cannot start."""
    run = forkserver.run("tests.front.host", door, *arguments)
    assert run.returncode != 0
    return run.stderr


# ---- both doors -----------------------------------------------------------------------------------------------------


@needs_ipv6
@doors_under_test
def test_several_listeners_at_once(door, tmp_path):
    path = tmp_path / "s"
    with host.started(door, "127.0.0.1:0", "[::1]:0", f"unix://{path}") as process:
        first = process.address
        assert told(first)["peer"].startswith("ipv4:127.0.0.1:")
        second = process.says("[::1]:")
        assert told(second)["peer"].startswith("ipv6:")
        assert told(f"unix:{path}")["peer"].startswith("unix:")
    assert not path.exists()


@doors_under_test
def test_the_mode_of_a_unix_socket(door, tmp_path):
    path = tmp_path / "s"
    with host.started(door, f"unix:{path}", "--mode", "640", "--owner", f":{os.getgid()}"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        assert path.stat().st_gid == os.getgid()


@doors_under_test
def test_a_lock_on_the_folder_keeps_no_server_from_starting(door, tmp_path):
    """Everybody who may read the folder can take it, and never give it back."""
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        with host.started(door, f"unix:{tmp_path}/s") as process:
            assert told(f"unix:{tmp_path}/s")
    finally:
        os.close(folder)
    assert "somebody keeps the folder locked" in "\n".join(process.lines)


@doors_under_test
def test_a_stale_socket_is_replaced_and_a_live_one_is_not(door, tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with host.started(door, f"unix:{path}"):
        assert f"Socket 'unix:{path}' already in use" in failed(door, f"unix:{path}")
        assert told(f"unix:{path}")["peer"].startswith("unix:")


@doors_under_test
def test_the_socket_of_a_killed_server_is_replaced(door, tmp_path):
    path = tmp_path / "s"
    killed = doors.Process(sys.executable, "-m", "tests.front.host", door, f"unix:{path}")
    killed.wait_until_it_listens()
    killed.kill()
    assert path.exists()
    with host.started(door, f"unix:{path}"):
        assert told(f"unix:{path}")


@doors_under_test
def test_a_taken_port_gives_one_sentence(door):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"Socket '127.0.0.1:{port}' already in use" in failed(door, f"127.0.0.1:{port}")


@doors_under_test
def test_an_address_of_another_machine(door):
    assert "cannot listen on 192.0.2.1:1234: Cannot assign requested address" in failed(door, "192.0.2.1:1234")


@doors_under_test
def test_a_shared_port(door):
    with host.started(door, "127.0.0.1:0", "--reuse-port") as first:
        with host.started(door, first.address, "--reuse-port") as second:
            assert second.address == first.address
        assert told(first.address)
        assert "already in use" in failed(door, first.address)


# ---- who the client is ----------------------------------------------------------------------------------------------


def test_the_native_door_knows_the_process_behind_a_unix_socket(tmp_path):
    with host.started("native", "127.0.0.1:0", f"unix:{tmp_path}/s") as process:
        assert told(f"unix:{tmp_path}/s")["credentials"] == [os.getpid(), os.getuid(), os.getgid()]
        assert told(process.address)["credentials"] is None


def test_the_grpcio_door_does_not(tmp_path):
    with host.started("grpcio", f"unix:{tmp_path}/s"):
        assert told(f"unix:{tmp_path}/s")["credentials"] is None


# ---- the sockets ----------------------------------------------------------------------------------------------------


def test_a_host_name_is_all_its_addresses_on_one_port():
    sockets = listeners.open_tcp(TcpAddress("localhost", 0))
    try:
        assert len({opened.getsockname()[1] for opened in sockets}) == 1
        assert len({opened.family for opened in sockets}) == len(sockets)
    finally:
        for opened in sockets:
            opened.close()


@needs_ipv6
def test_the_ipv6_wildcard_takes_ipv4_too():
    (opened,) = listeners.open_tcp(TcpAddress("::", 0))
    with opened:
        opened.listen()
        socket.create_connection(("127.0.0.1", opened.getsockname()[1]), timeout=5).close()


def link_local() -> str:
    """An address that is valid on one interface only, with the interface; empty without one."""
    try:
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    except OSError:
        return ""
    return next((f"{ipaddress.IPv6Address(bytes.fromhex(row[0]))}%{row[5]}" for row in rows if row[3] == "20"), "")


@pytest.mark.skipif(not link_local(), reason="this machine has no link-local address")
def test_an_address_of_one_interface():
    for opened in listeners.open_tcp(TcpAddress(link_local(), 0)):
        opened.close()


def test_an_unknown_host():
    with pytest.raises(ListenError, match=r"cannot listen on no\.such\.host\.invalid:1"):
        listeners.open_tcp(TcpAddress("no.such.host.invalid", 1))


def opened_unix(path, **policy):
    return listeners.open_unix(UnixAddress(str(path)), ListenPolicy(**policy))


def test_a_file_that_is_not_a_socket_is_left_alone(tmp_path):
    path = tmp_path / "s"
    path.write_text("precious")
    with pytest.raises(ListenError, match="is not a socket"):
        opened_unix(path)
    assert path.read_text() == "precious"


def test_a_path_that_is_not_utf8(tmp_path):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    opened, file = opened_unix(parse_address(f"unix:{path}", 0).path)
    opened.close()
    file.remove()


def test_a_missing_folder(tmp_path):
    with pytest.raises(ListenError, match=f"cannot listen on unix:{tmp_path}/no/s: No such file or directory"):
        opened_unix(tmp_path / "no" / "s")


def test_an_unknown_owner_leaves_no_file(tmp_path):
    with pytest.raises(ListenError, match="to 'nobody-of-that-name': no such user or group"):
        opened_unix(tmp_path / "s", unix_owner="nobody-of-that-name")
    assert not (tmp_path / "s").exists()


def test_a_number_that_no_owner_has_leaves_no_file(tmp_path):
    with pytest.raises(ListenError, match="to '99999999999': no such user or group"):
        opened_unix(tmp_path / "s", unix_owner="99999999999")
    assert not (tmp_path / "s").exists()


def test_a_file_system_without_locks_keeps_no_server_from_starting(tmp_path, monkeypatch, caplog):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(listeners.fcntl, "flock", flock)
    opened, file = opened_unix(tmp_path / "s")
    opened.close()
    file.remove()
    assert "the folder cannot be locked: No locks available: going on without the lock" in caplog.text


@pytest.mark.parametrize("moment", ["before the probe", "after the probe"])
def test_a_stale_file_that_its_server_removes_meanwhile(tmp_path, monkeypatch, moment):
    """The server that made the file may be ending: it takes no lock to remove the file."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))

    class Probe(socket.socket):
        def connect(self, address):
            if moment == "before the probe":
                path.unlink()
            try:
                super().connect(address)
            finally:
                path.unlink(missing_ok=True)

    monkeypatch.setattr(listeners.socket, "socket", Probe)
    opened, file = opened_unix(path)
    opened.close()
    file.remove()


async def test_a_peer_that_connects_again_and_again_does_not_keep_a_listener_from_closing(monkeypatch):
    monkeypatch.setattr(listeners, "BACKLOG", 16)
    (opened,) = listeners.open_tcp(TcpAddress("127.0.0.1", 0))
    address = opened.getsockname()
    admitted = []

    def admit(accepted, _):
        accepted.close()
        admitted.append(1)
        assert len(admitted) < 1000
        socket.create_connection(address).close()

    listener = listeners.Listener(opened, admit, failed=lambda *_: None)
    listener.serve()
    socket.create_connection(address).close()
    listener.close()
    assert admitted


def test_a_socket_whose_backlog_is_full_is_alive(tmp_path):
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as waiting:
        busy.bind(str(tmp_path / "s"))
        busy.listen(0)
        waiting.connect(str(tmp_path / "s"))
        with pytest.raises(InUseError):
            opened_unix(tmp_path / "s")


def test_the_file_of_a_successor_is_not_removed(tmp_path):
    first, file = opened_unix(tmp_path / "s")
    first.close()
    second, successor = opened_unix(tmp_path / "s")
    file.remove()
    assert (tmp_path / "s").exists()
    successor.remove()
    second.close()
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("text", "ids"), [("root", (0, -1)), ("root:root", (0, 0)), (":0", (-1, 0)), ("12:34", (12, 34))]
)
def test_an_owner_is_read_as_user_and_group(text, ids):
    assert listeners.owner(text) == ids
