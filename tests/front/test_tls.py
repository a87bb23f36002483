"""TLS on both doors: what is refused, who the client is, and certificates that change while calls are running."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import subprocess
import threading
from collections import Counter
from pathlib import Path
from subprocess import PIPE, STDOUT

import grpc
import pytest

from inferd.server.front import native
from inferd.server.front.listeners import ListenPolicy
from inferd.server.front.tls import Credentials, CredentialsError
from tests.conformance import doors
from tests.conformance.raw import Client
from tests.front import host
from tests.front.certificates import Authority, openssl
from tests.replacing import replace
from tests.waiting import look_until

both_doors = pytest.mark.parametrize("door", doors.NAMES)

KEY_UPDATES = 32
"""So many updates a client may make without sending data."""
MANY_UPDATES = 5000
LOCAL = ("DNS:localhost", "IP:127.0.0.1")


@pytest.fixture(scope="session")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def stranger(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("stranger"), "another root")


@pytest.fixture(scope="session")
def server_pair(authority):
    return authority.issue("server", *LOCAL)


@pytest.fixture(scope="session")
def client_pair(authority):
    return authority.issue("client", "DNS:client.example", "URI:spiffe://example/client")


def channel(address, authority, pair=None):
    own = (
        {}
        if pair is None
        else {"private_key": pair.key.read_bytes(), "certificate_chain": pair.certificate.read_bytes()}
    )
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(authority.root.read_bytes(), **own))


def told(address, authority, pair=None):
    with channel(address, authority, pair) as opened:
        return host.ask(opened)


def started(door, pair, *arguments):
    return host.started(door, "127.0.0.1:0", "--certificate", pair.certificate, "--key", pair.key, *arguments)


def client_context(authority, *protocols):
    context = ssl.create_default_context(cafile=authority.root)
    if protocols:
        context.set_alpn_protocols(list(protocols))
    return context


def handshake(address, context):
    """The name of the certificate that the server shows, and what the connection gives first."""
    name, port = address.rsplit(":", 1)
    with (
        socket.create_connection((name, int(port)), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname=name) as encrypted,
    ):
        subject = dict(pair for names in encrypted.getpeercert()["subject"] for pair in names)
        encrypted.settimeout(60)
        return subject["commonName"], encrypted.recv(9)


@pytest.fixture(scope="module", params=doors.NAMES)
def address(request, server_pair):
    """The address of a door that asks for no certificates."""
    with started(request.param, server_pair) as process:
        yield process.address


@pytest.fixture(scope="module")
def native_address(server_pair):
    with started("native", server_pair) as process:
        yield process.address


def test_a_call_over_tls_has_its_peer_and_plaintext_is_refused(address, authority):
    answer = told(address, authority)
    assert answer["peer"].startswith("ipv4:127.0.0.1:")
    assert "transport_security_type" in answer["auth"]
    assert answer["names"] == answer["identities"] == []
    assert answer["identity_key"] is None
    with grpc.insecure_channel(address) as plain, pytest.raises(grpc.RpcError) as refused:
        host.ask(plain, timeout=2)
    assert refused.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_old_versions_are_refused(address, authority):
    old = client_context(authority, "h2")
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version = ssl.TLSVersion.TLSv1
    old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        handshake(address, old)
    assert handshake(address, client_context(authority, "h2"))[0] == "server"


@pytest.mark.parametrize("protocols", [(), ("http/1.1",)])
def test_without_http2_there_is_no_connection(address, authority, protocols):
    try:
        _, first = handshake(address, client_context(authority, *protocols))
    except (ssl.SSLError, ConnectionError):
        return
    assert first == b""


def test_a_client_that_ends_tls_gets_the_end_of_the_server(native_address, authority):
    """Both ends say close_notify, so that the client knows that it has got all that the server has sent."""
    name, port = native_address.rsplit(":", 1)
    plain = socket.create_connection((name, int(port)), timeout=60)
    encrypted = client_context(authority, "h2").wrap_socket(plain, server_hostname=name)
    with Client(encrypted) as client:
        client.h2.ping(bytes(8))
        client.flush()
        client.receive_until(lambda: client.pings)
        encrypted.unwrap()


@both_doors
def test_a_client_must_show_a_certificate_of_the_root(door, authority, stranger, server_pair, client_pair):
    with started(door, server_pair, "--root", authority.root) as process:
        answer = told(process.address, authority, client_pair)
        assert answer["names"] == ["client", "client.example", "spiffe://example/client"]
        assert answer["identity_key"] == "x509_subject_alternative_name"
        assert answer["identities"] == ["client.example", "spiffe://example/client"]
        assert {"x509_common_name", "x509_pem_cert"} <= set(answer["auth"])
        for pair in (None, stranger.issue("intruder")):
            with pytest.raises(grpc.RpcError) as refused:
                told(process.address, authority, pair)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        if door == "native":  # C core does its handshakes itself
            for why in ("peer did not return a certificate", "unable to get local issuer certificate"):
                assert "TLS: the handshake failed: " in process.says(why)
        nameless = told(process.address, authority, authority.issue("plain"))
        assert nameless["identity_key"] == "x509_common_name"
        assert nameless["identities"] == nameless["names"] == ["plain"]
        named = authority.issue("directory", "dirName:other\n[other]\nCN=inner")  # a name that has parts itself
        assert told(process.address, authority, named)["names"][0] == "directory"


@both_doors
def test_unix_sockets_stay_plain(door, authority, server_pair, tmp_path):
    files = ("--certificate", server_pair.certificate, "--key", server_pair.key)
    with host.started(door, "127.0.0.1:0", f"unix:{tmp_path}/s", *files) as process:
        assert told(process.address, authority)
        with grpc.insecure_channel(f"unix:{tmp_path}/s") as plain:
            assert host.ask(plain)["peer"].startswith("unix:")


@both_doors
def test_a_changed_certificate_is_served_and_drops_no_call(door, authority, tmp_path):
    certificate, key = tmp_path / "server.pem", tmp_path / "server.key"
    first, second = (authority.issue(f"generation{i}", *LOCAL) for i in (1, 2))
    first.install(certificate, key)
    outcome: Counter[str] = Counter()
    stopping = threading.Event()

    def call(opened):
        while not stopping.is_set():
            try:
                host.ask(opened, wait=0.01)
                outcome["answered"] += 1
            except grpc.RpcError as error:
                outcome[str(error)] += 1

    with (
        host.started(door, "127.0.0.1:0", "--certificate", certificate, "--key", key) as process,
        channel(process.address, authority) as opened,
    ):
        context = client_context(authority, "h2")
        assert handshake(process.address, context)[0] == "generation1"
        long = opened.unary_unary(host.WHO).future(b"2", timeout=60)
        threads = [threading.Thread(target=call, args=(opened,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        # half of a change, as while files are being replaced: the old pair stays
        replace(key, second.key.read_bytes())

        def complaints():
            assert handshake(process.address, context)[0] == "generation1"  # when the grpcio door looks at the files
            return [line for line in process.lines if "stays as it was" in line]

        [complaint] = look_until(complaints)
        assert "does not belong to the certificate" in complaint
        assert handshake(process.address, context)[0] == "generation1"
        replace(certificate, second.certificate.read_bytes())
        look_until(lambda: handshake(process.address, context)[0], lambda name: name == "generation2")
        assert long.result()
        stopping.set()
        for thread in threads:
            thread.join()
    assert set(outcome) == {"answered"}
    assert sum("stays as it was" in line for line in process.lines) == 1


@both_doors
def test_a_changed_root_counts_for_new_connections(door, authority, stranger, server_pair, client_pair, tmp_path):
    root = tmp_path / "root.pem"
    root.write_bytes(authority.root.read_bytes())
    with started(door, server_pair, "--root", root) as process, channel(process.address, authority, client_pair) as old:
        assert host.ask(old)
        replace(root, stranger.root.read_bytes())
        friend = stranger.issue("friend")

        def named():
            try:
                return told(process.address, authority, friend)["names"]
            except grpc.RpcError as error:
                return error.details()

        look_until(named, lambda names: names == ["friend"])
        assert host.ask(old)


@both_doors
def test_a_session_is_not_resumed(door, authority, server_pair, client_pair):
    """A client whose certificate has expired, or is of a root that was replaced, could go on with an old session."""

    def connected(context, session=None):
        name, port = process.address.rsplit(":", 1)
        plain = socket.create_connection((name, int(port)), timeout=60)
        made = context.wrap_socket(plain, server_hostname=name, session=session)
        made.settimeout(60)
        assert made.recv(9), "the server's SETTINGS, behind which all tickets have come"
        return made

    with started(door, server_pair, "--root", authority.root) as process:
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            context = client_context(authority, "h2")
            context.load_cert_chain(client_pair.certificate, client_pair.key)
            context.minimum_version = context.maximum_version = version
            with connected(context) as first, connected(context, first.session) as again:
                assert not again.session_reused
                assert again.session is None or again.session.id != first.session.id or not first.session.id


def test_without_client_certificates_a_session_is_resumed(native_address, authority):
    """Resumption spares both sides the signature; with client certificates it would bypass their check."""
    context = client_context(authority, "h2")
    name, port = native_address.rsplit(":", 1)

    def connected(session=None):
        plain = socket.create_connection((name, int(port)), timeout=60)
        made = context.wrap_socket(plain, server_hostname=name, session=session)
        assert made.recv(9), "the server's SETTINGS, behind which its ticket has come"
        return made

    with connected() as first, connected(first.session) as again:
        assert again.session_reused


def test_a_flood_of_key_updates_ends_its_connection(native_address, authority):
    """One costs the server 20 us and the client 22 bytes: those of one turn kept all others out for half a second."""
    command = ["openssl", "s_client", "-connect", native_address, "-alpn", "h2", "-CAfile", authority.root]
    updates, said = 0, b""
    with subprocess.Popen([*command, "-tls1_3"], bufsize=0, stdin=PIPE, stdout=PIPE, stderr=STDOUT) as client:
        assert client.stdin and client.stdout
        client.stdin.write(b"k\n")
        while updates < MANY_UPDATES and (read := client.stdout.read(1 << 16)):
            said += read
            *done, said = said.split(b"KEYUPDATE\n")
            for _ in done:
                updates += 1
                with contextlib.suppress(BrokenPipeError):
                    client.stdin.write(b"k\n")
        client.kill()
    assert KEY_UPDATES <= updates < MANY_UPDATES
    assert told(native_address, authority)


async def test_a_part_of_a_record_is_a_sign_of_life(server_pair, authority):
    """A client that takes long to send a record is not silent: keepalive asks when the last byte came."""
    credentials = Credentials(server_pair.certificate, server_pair.key)
    door = native.NativeDoor(policy=ListenPolicy(credentials=credentials))
    port = await door.start("127.0.0.1:0")
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = client_context(authority, "h2").wrap_bio(incoming, outgoing, server_hostname="localhost")
    try:
        async with asyncio.timeout(30):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            while True:
                try:
                    tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    writer.write(outgoing.read())
                    incoming.write(await reader.read(1 << 16))
            tls.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
            writer.write(outgoing.read())
            while not [driver for driver in door._drivers if driver._connection.greeted]:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            [connection] = [driver._connection for driver in door._drivers]
            before = connection.received_at
            tls.write(bytes(1000))
            writer.write(outgoing.read()[:100])
            while connection.received_at == before:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            writer.close()
    finally:
        await door.stop(0)


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(server_pair, authority, tmp_path):
    certificate, key, root = tmp_path / "server.pem", tmp_path / "server.key", tmp_path / "root.pem"
    server_pair.install(certificate, key)
    root.write_bytes(authority.root.read_bytes())
    return certificate, key, root


@pytest.mark.parametrize(
    ("missing", "option"), [(0, "grpc-server-cert"), (1, "grpc-server-key"), (2, "grpc-root-cert")]
)
def test_files_that_cannot_be_read(files, missing, option):
    files[missing].unlink()
    with pytest.raises(CredentialsError, match=f"--{option}: cannot read {files[missing]}: No such file"):
        Credentials(*files)


def test_the_handshake_timeout_is_for_tls_and_http2_together(authority, server_pair, tmp_path):
    """The default is 10 s, so a connection that is closed within 8 s was closed by the half second that is set."""
    models = tmp_path / "models"
    models.mkdir()
    options = ["--grpc-use-ssl", "--grpc-server-cert", server_pair.certificate, "--grpc-server-key", server_pair.key]
    options += ["--grpc-handshake-timeout=500"]
    with doors.running_server("native", models, *map(str, options)) as process:
        host_name, port = process.address.split(":")
        with socket.create_connection((host_name, int(port)), timeout=8) as silent:
            assert silent.recv(1) == b""
        with socket.create_connection((host_name, int(port)), timeout=8) as peer:
            greeted = client_context(authority, "h2").wrap_socket(peer, server_hostname="127.0.0.1")
            while greeted.recv(4096):  # the server's SETTINGS, and then the end
                pass


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (0, "--grpc-server-cert: {} holds no certificate in PEM form"),
        (1, "--grpc-server-key: {} holds no private key in PEM form"),
        (2, "--grpc-root-cert: {} holds no certificate in PEM form"),
    ],
)
def test_files_that_hold_something_else(files, wrong, text):
    files[wrong].write_text("nothing of use")
    with pytest.raises(CredentialsError, match=text.format(files[wrong])):
        Credentials(*files)


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_files_that_are_damaged(files, wrong):
    lines = files[wrong].read_text().splitlines()
    files[wrong].write_text("\n".join([*lines[:1], "AAAA", *lines[-1:]]) + "\n")
    with pytest.raises(CredentialsError, match="cannot be used"):
        Credentials(*files)


def test_a_key_of_another_certificate(files, client_pair):
    files[1].write_bytes(client_pair.key.read_bytes())
    with pytest.raises(CredentialsError, match=r"the key in .*server\.key does not belong to the certificate in"):
        Credentials(*files)


def test_a_key_with_a_passphrase(files):
    openssl("ec", "-aes128", "-passout", "pass:secret", "-in", files[1], "-out", files[1].with_suffix(".locked"))
    files[1].with_suffix(".locked").replace(files[1])
    with pytest.raises(CredentialsError, match="has a passphrase"):
        Credentials(*files)


def test_a_file_that_is_gone_for_a_while_changes_nothing(files, caplog):
    credentials = Credentials(*files)
    before = credentials.material
    kept = files[0].read_bytes()
    files[0].unlink()
    assert not credentials.refresh()
    assert not credentials.refresh()
    assert len(caplog.records) == 1
    files[0].write_bytes(kept)
    assert credentials.refresh()
    assert credentials.material is not before


async def test_a_lack_of_memory_ends_no_looks_at_the_files(files, monkeypatch):
    """A door goes on looking after an error that is not one of the files."""
    monkeypatch.setattr(native, "RELOAD_INTERVAL", 0.01)
    looks = asyncio.Event()
    loop = asyncio.get_running_loop()
    errors = [MemoryError()]

    def refresh(self):
        if errors:
            raise errors.pop()
        loop.call_soon_threadsafe(looks.set)
        return False

    monkeypatch.setattr(Credentials, "refresh", refresh)
    door = native.NativeDoor(policy=ListenPolicy(credentials=Credentials(*files)))
    await door.start("127.0.0.1:0")
    try:
        async with asyncio.timeout(30):
            await looks.wait()
    finally:
        await door.stop(0)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
@pytest.mark.parametrize("number", range(3))
def test_what_is_no_file_is_refused_and_never_waited_for(files, make, number):
    """To open a FIFO can take for ever: no certificate would be read any more, and the server would not end."""
    credentials = Credentials(*files)
    replaced = files[number]
    content = replaced.read_bytes()
    replaced.unlink()
    make(replaced)
    assert not credentials.refresh()
    with pytest.raises(CredentialsError, match="cannot read"):
        Credentials(*files)
    (replaced.rmdir if replaced.is_dir() else replaced.unlink)()
    replaced.write_bytes(content)
    assert credentials.refresh()


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_file_that_goes_while_it_is_looked_at_changes_nothing(files, monkeypatch, gone):
    """An error of another kind than `refresh` expects would end the looks for good."""
    credentials = Credentials(*files)
    content = files[gone].read_bytes()
    replace(files[gone], content)
    whole = Credentials._load
    with monkeypatch.context() as patched:
        patched.setattr(Credentials, "_load", lambda self: files[gone].unlink() or whole(self))
        assert not credentials.refresh()
    files[gone].write_bytes(content)
    assert credentials.refresh()
