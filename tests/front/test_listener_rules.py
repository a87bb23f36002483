"""Each address with rules of its own, and limits for each client: the real server, real clients, the native door."""

from __future__ import annotations

import contextlib
import os
import stat
import threading

import grpc
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from inferd.server.addresses import Bind, Rules, SettingsError, TcpAddress, UnixAddress, parse_bind
from inferd.server.front.connection_limits import ClientLimits, ConnectionLimits, ListenerPolicy, client_name
from inferd.server.front.peer import Peer
from inferd.server.rpc.call import PeerCredentials
from inferd.server.rpc.service import SERVICE
from inferd.server.settings import Settings
from inferd_client.pb import grpc_service_pb2 as pb
from tests import richerrors
from tests.conformance import doors
from tests.conformance.client import Stub, floats, request
from tests.front.certificates import Authority

LIVE = pb.ServerLiveRequest()


@contextlib.contextmanager
def connected(address, **options):
    with grpc.insecure_channel(address, options=list(options.items())) as channel:
        yield Stub(channel)


def refusal(call, *arguments, **keywords):
    with pytest.raises(grpc.RpcError) as error:
        call(*arguments, **keywords, timeout=10)
    return error.value.code(), error.value.details()


# ---- the text -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "bind"),
    [
        ("10.0.0.5:9,groups=health+inference", Bind(TcpAddress("10.0.0.5", 9), Rules(groups=("health", "inference")))),
        ("[::1],tls=off,max-connections=7", Bind(TcpAddress("::1", 8001), Rules(tls=False, max_connections=7))),
        (
            "unix:///run/a,b=.sock/x,mode=0600,owner=:web,tokens=off,reflection=on",
            None,  # "b=" looks like an option: such a path cannot be given
        ),
        (
            "unix:///run/x,y.sock,mode=0600,owner=:web,tokens=off,reflection=on",
            Bind(UnixAddress("/run/x,y.sock"), Rules(mode=0o600, owner=":web", tokens=False, reflection=True)),
        ),
        ("h,keepalive-time=5000,keepalive-timeout=1,max-connection-age=0,max-connection-age-grace=2", ...),
    ],
)
def test_an_address_and_its_rules(text, bind):
    if bind is None:
        with pytest.raises(SettingsError, match="unknown option 'b'"):
            parse_bind(text, 8001)
        return
    found = parse_bind(text, 8001)
    if bind is not ...:
        assert found == bind
    assert parse_bind(str(found), 0) == found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("h,color=red", "unknown option 'color'"),
        ("h,tls=yes", "tls: expected on or off, got 'yes'"),
        ("h,tls=on,tls=on", "tls is given twice"),
        ("h,groups=health+nonsense", "groups: expected some of health, metadata"),
        ("h,mode=0600", "mode and owner are of unix sockets"),
        ("unix:/x,tls=on", "TLS is for TCP"),
        ("unix:/x,mode=9", "expected an octal mode"),
        ("h,keepalive-time=0", "expected 1 to 2147483647"),
        ("h,keepalive-time=5,", "expected ADDRESS,KEY=VALUE"),
    ],
)
def test_wrong_rules_are_told(text, says):
    with pytest.raises(SettingsError, match=r"grpc-address: .*") as error:
        parse_bind(text, 8001)
    assert says in str(error.value)


def test_grpcio_has_only_some_of_them(tmp_path):
    Settings(model_repository=(str(tmp_path),), transport="grpcio", grpc_address=("unix:/x,mode=0600",))
    with pytest.raises(SettingsError, match="only tls, mode and owner for one address, got groups=health"):
        Settings(
            model_repository=(str(tmp_path),), transport="grpcio", grpc_address=("unix:/x,mode=0600,groups=health",)
        )
    for option in ("grpc_max_calls_per_client", "grpc_max_connections"):
        with pytest.raises(SettingsError, match=f"{option.replace('_', '-')}: gRPC's C core has no such option"):
            Settings(model_repository=(str(tmp_path),), transport="grpcio", **{option: 3})


def test_tls_of_one_address_needs_certificates(tmp_path):
    with pytest.raises(SettingsError, match="grpc-server-cert: tls=on of --grpc-address needs it"):
        Settings(model_repository=(str(tmp_path),), grpc_address=("127.0.0.1,tls=on",))


# ---- rules of one address -------------------------------------------------------------------------------------------


def test_groups_of_an_address(repository, tmp_path):
    """The port serves inference and health only, the socket everything."""
    socket = f"unix:{tmp_path}/admin"
    arguments = ("--grpc-address", "127.0.0.1,groups=inference+health", "--grpc-address", socket)
    with doors.running_server("native", repository, *arguments) as process:
        with connected(process.address) as stub:
            assert stub.ServerLive(LIVE).live
            assert stub.ModelInfer(request("simple", floats(1))).model_name == "simple"
            code, details = refusal(stub.ServerMetadata, pb.ServerMetadataRequest())
            assert code is grpc.StatusCode.UNIMPLEMENTED
            assert details == "metadata calls are not served at this address"
        with connected(socket) as stub:
            assert stub.ServerMetadata(pb.ServerMetadataRequest()).name == "triton"


def test_native_inference_may_be_kept_from_an_address(repository, tmp_path):
    socket = f"unix:{tmp_path}/admin,groups=health+model-repository"
    with (
        doors.running_server("native", repository, "--grpc-address", "127.0.0.1", "--grpc-address", socket) as process,
        connected(process.address) as stub,
        connected(f"unix:{tmp_path}/admin") as admin,
    ):
        assert stub.ModelInfer(request("simple", floats(1))).model_name == "simple"
        code, details = refusal(admin.ModelInfer, request("simple", floats(1)))
        assert (code, details) == (grpc.StatusCode.UNIMPLEMENTED, "inference calls are not served at this address")
        assert admin.RepositoryIndex(pb.RepositoryIndexRequest()).models
        assert refusal(admin.ServerMetadata, pb.ServerMetadataRequest())[0] is grpc.StatusCode.UNIMPLEMENTED
        for group, method in (("inference", "ModelInfer"), ("metadata", "ServerMetadata")):
            line = process.says(f"/{SERVICE}/{method}: {group} calls are not served at this address")
            assert f"refused: unix: user {os.geteuid()} /" in line


def test_a_socket_whose_callers_are_trusted(repository, tmp_path):
    """Tokens are asked for at the port; at the socket its mode is the guard, for models too."""
    tokens = tmp_path / "tokens"
    tokens.write_text("secret models=other\n")
    arguments = ("--grpc-token-file", str(tokens), "--grpc-restricted-protocol", "metadata:k=v")
    arguments += ("--grpc-address", "127.0.0.1", "--grpc-address", f"unix:{tmp_path}/in,tokens=off,mode=0600")
    with doors.running_server("native", repository, *arguments) as process:
        assert stat.S_IMODE((tmp_path / "in").stat().st_mode) == 0o600
        with connected(process.address) as stub:
            assert refusal(stub.ModelInfer, request("simple", floats(1)))[0] is grpc.StatusCode.UNAUTHENTICATED
        with connected(f"unix:{tmp_path}/in") as stub:
            assert stub.ModelInfer(request("simple", floats(1))).model_name == "simple"
            assert stub.ServerMetadata(pb.ServerMetadataRequest()).name == "triton"
            (answer,) = stub.ModelStreamInfer(iter([request("simple", floats(1))]))
            assert not answer.error_message
            assert stub.ModelReady(pb.ModelReadyRequest(name="simple")).ready


def test_reflection_where_only_this_machine_can_ask(repository, tmp_path):
    """The port is public and the socket is not, so reflection answers at one of them."""
    arguments = ("--grpc-address", "0.0.0.0", "--grpc-address", f"unix:{tmp_path}/s")
    with doors.running_server("native", repository, *arguments) as process:
        with grpc.insecure_channel(f"unix:{tmp_path}/s") as channel:
            assert ProtoReflectionDescriptorDatabase(channel).get_services()
        with grpc.insecure_channel(process.address) as channel, pytest.raises(grpc.RpcError) as error:
            ProtoReflectionDescriptorDatabase(channel).get_services()
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_tls_at_one_address_and_none_at_another(repository, tmp_path):
    authority = Authority(tmp_path / "ca")
    pair = authority.issue("server", "IP:127.0.0.1")
    arguments = ("--grpc-server-cert", str(pair.certificate), "--grpc-server-key", str(pair.key))
    arguments += ("--grpc-address", "127.0.0.1,tls=on", "--grpc-address", "localhost:0")
    with doors.running_server("native", repository, *arguments) as process:
        process.says("GRPCInferenceService at", count=2)
        encrypted, plain = (each.split()[-2] for each in process.lines if "GRPCInferenceService at" in each)
        with connected(plain) as stub:
            assert stub.ServerLive(LIVE).live
        credentials = grpc.ssl_channel_credentials(authority.root.read_bytes())
        with grpc.secure_channel(encrypted, credentials) as channel:
            assert Stub(channel).ServerLive(LIVE).live


def test_connections_of_one_address_are_counted_for_themselves(repository, tmp_path):
    arguments = ("--grpc-address", "127.0.0.1,max-connections=1", "--grpc-address", f"unix:{tmp_path}/s")
    with (
        doors.running_server("native", repository, *arguments) as process,
        connected(process.address, **{"grpc.use_local_subchannel_pool": 1}) as first,
        connected(process.address, **{"grpc.use_local_subchannel_pool": 1}) as second,
        connected(f"unix:{tmp_path}/s") as other,
    ):
        assert first.ServerLive(LIVE).live
        assert refusal(second.ServerLive, LIVE)[0] is grpc.StatusCode.UNAVAILABLE
        assert other.ServerLive(LIVE).live


# ---- clients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peer", "name"),
    [
        (Peer("ipv4:10.1.2.3:4711"), "10.1.2.3"),
        (Peer("ipv6:[2001:db8::1]:4711"), "2001:db8::1"),
        (Peer("ipv6:[::ffff:10.1.2.3]:4711"), "10.1.2.3"),
        (Peer("unix:", PeerCredentials(1, 1000, 100)), "user 1000"),
        (
            Peer("ipv4:10.1.2.3:4711", auth={"x509_common_name": [b"robot"], "x509_pem_cert": [b"..."]}),
            "certificate robot",
        ),
        (
            Peer(
                "ipv4:10.1.2.3:4711", auth={"x509_common_name": [b"x"], "x509_subject_alternative_name": [b"a", b"b"]}
            ),
            "certificate a,b",
        ),
        (Peer("unknown"), "unknown"),
    ],
)
def test_who_is_one_client(peer, name):
    assert client_name(peer) == name


def test_the_limits_count_for_server_listener_and_client():
    limits = ConnectionLimits(max_connections=3, per_client=ClientLimits(connections=2))
    small, large = ListenerPolicy(max_connections=1), ListenerPolicy()
    alice, bob = Peer("ipv4:10.0.0.1:1"), Peer("ipv4:10.0.0.2:1")
    first = limits.admit(small, alice)
    assert limits.admit(small, bob) is None
    second = limits.admit(large, alice)
    assert limits.admit(large, alice) is None
    assert limits.admit(large, bob) is not None
    assert limits.admit(large, Peer("ipv4:10.0.0.3:1")) is None
    limits.release(first)
    assert first.use is second.use
    assert (small.count, large.count, second.use.connections) == (0, 2, 1)
    assert limits.admit(small, alice) is not None


def test_a_client_that_is_gone_is_forgotten():
    limits = ConnectionLimits(per_client=ClientLimits(calls=1))
    for number in range(100):
        limits.release(limits.admit(ListenerPolicy(), Peer(f"ipv4:10.0.0.{number}:1")))
    assert not limits._clients


def test_streams_and_calls_of_one_client(repository, tmp_path):
    """A client is its user on a socket, so both channels are one."""
    address = f"unix:{tmp_path}/s"
    arguments = ("--grpc-max-streams-per-client=2", "--grpc-max-calls-per-client=3", "--grpc-address", "127.0.0.1")
    with (
        doors.running_server("native", repository, *arguments, "--grpc-address", address) as process,
        connected(address, **{"grpc.use_local_subchannel_pool": 1}) as one,
        connected(address, **{"grpc.use_local_subchannel_pool": 1}) as two,
        connected(process.address) as stranger,
    ):
        open_streams = [Conversation(one), Conversation(two)]
        with pytest.raises(grpc.RpcError) as error:
            Conversation(two)
        user = f"client user {os.getuid()}"
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.value.details() == f"{user} has 2 streams in flight, its limit is 2"
        assert richerrors.of(error.value).reason == "CLIENT_LIMIT"

        slow = one.ModelInfer.future(request("slow", floats(1)))
        with pytest.raises(grpc.RpcError) as error:
            while True:  # until the slow one has arrived
                two.ModelInfer(request("slow", floats(1)))
                slow = one.ModelInfer.future(request("slow", floats(1)))
        assert error.value.details() == f"{user} has 4 calls in flight, which is more than its limit of 3"
        assert richerrors.of(error.value).reason == "CLIENT_LIMIT"
        assert stranger.ModelInfer(request("simple", floats(1))).model_name == "simple"
        assert slow.result().model_name == "slow"
        for stream in open_streams:
            stream.end()
        Conversation(two).end()


class Conversation:
    """A ModelStreamInfer that stays open after its first answer."""

    def __init__(self, stub):
        self._end = threading.Event()
        self._responses = stub.ModelStreamInfer(self._requests())
        next(self._responses)

    def _requests(self):
        yield request("simple", floats(1))
        self._end.wait(30)

    def end(self):
        self._end.set()
        assert list(self._responses) == []


def test_connections_and_bytes_of_one_client(repository):
    arguments = ("--grpc-max-connections-per-client=1", "--grpc-max-bytes-per-client=10000")
    with (
        doors.running_server("native", repository, *arguments) as process,
        connected(process.address, **{"grpc.use_local_subchannel_pool": 1}) as first,
    ):
        assert first.ModelInfer(request("simple", floats(1))).model_name == "simple"
        with connected(process.address, **{"grpc.use_local_subchannel_pool": 1}) as second:
            assert refusal(second.ServerLive, LIVE)[0] is grpc.StatusCode.UNAVAILABLE
        code, details = refusal(first.ModelInfer, request("simple", floats(*range(4000))))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details.startswith("client 127.0.0.1 announces a message of 16")
        assert details.endswith(" bytes, which is more than its limit of 10000")
        assert first.ModelInfer(request("simple", floats(1))).model_name == "simple"
