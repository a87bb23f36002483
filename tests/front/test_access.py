"""Who may call what, through real clients: every RPC, with every state of a credential, on both doors."""

from __future__ import annotations

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from inferd._native.service import access, authorizer
from inferd.server.addresses import RESTRICTABLE
from inferd.server.front.access import Access
from inferd.server.rpc.service import GROUP_OF, GROUPS, MODEL_FIELD, SERVICE
from inferd_client.pb import grpc_service_pb2 as pb
from tests import forkserver, richerrors
from tests.conformance import doors
from tests.conformance.client import Stub, floats, request
from tests.conformance.raw import Client

SERVED = {method.name: method for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods}
HEALTH = "/grpc.health.v1.Health/"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
OTHERS = {
    f"{HEALTH}Check": health_pb2.HealthCheckRequest(),
    f"{HEALTH}Watch": health_pb2.HealthCheckRequest(),
    REFLECTION: reflection_pb2.ServerReflectionRequest(list_services=""),
}
LIST = f"{HEALTH}List"  # hosted by newer versions of grpcio-health-checking
PATHS = [f"/{SERVICE}/{name}" for name in SERVED] + list(OTHERS)


SIMPLE_GROUPS = "inference,health,metadata,statistics,model-repository"
TOKENS = f"""
# who          what
all-rights     all
only-simple    models=simple,vers*   groups={SIMPLE_GROUPS}
traces-simple  models=simple         groups=trace
only-health    groups=health
"""


def bearer(token):
    return ("authorization", f"Bearer {token}")


@pytest.fixture(scope="module")
def token_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("tokens") / "tokens"
    file.write_text(TOKENS)
    return file


@pytest.fixture(scope="module", params=doors.NAMES)
def door(request):
    return request.param


@pytest.fixture(scope="module")
def guarded(door, repository, token_file):
    """A server that wants tokens."""
    with doors.running_server(door, repository, f"--grpc-token-file={token_file}") as process:
        yield process
    text = "\n".join(process.lines)
    assert "all-rights" not in text
    assert "wrong-token" not in text


@pytest.fixture(scope="module")
def restricted(door, repository):
    """A server with Triton's restricted protocols."""
    with doors.running_server(
        door,
        repository,
        "--grpc-restricted-protocol=inference,health:infer-key=infer-value",
        "--grpc-restricted-protocol=model-repository,reflection:Admin=admin value",
    ) as process:
        yield process
    assert "infer-value" not in "\n".join(process.lines)


def message_for(path):
    name = path.rpartition("/")[2]
    if path in OTHERS:
        return OTHERS[path]
    if GROUP_OF[path] == "inference":
        return request("simple", floats(1))
    message = getattr(pb, SERVED[name].input_type.name)()
    if name in MODEL_FIELD:
        setattr(message, MODEL_FIELD[name], "simple")
    return message


def status(address, path, *metadata, message=None, timeout=10):
    """The code of a call of any method, and its error."""
    message = (message_for(path) if message is None else message).SerializeToString()
    streams = path in (f"/{SERVICE}/ModelStreamInfer", REFLECTION)
    with grpc.insecure_channel(address) as channel:
        try:
            if streams:
                next(channel.stream_stream(path)(iter([message]), metadata=metadata, timeout=timeout))
            elif path.endswith("Watch"):
                next(channel.unary_stream(path)(message, metadata=metadata, timeout=timeout))
            else:
                channel.unary_unary(path)(message, metadata=metadata, timeout=timeout)
        except grpc.RpcError as error:
            return error.code(), error
    return grpc.StatusCode.OK, None


# ---- the table ------------------------------------------------------------------------------------------------------


def test_every_hosted_rpc_belongs_to_a_group():
    """The doors say which RPCs they host, so an RPC that is added tomorrow is tested, too."""
    from inferd.server.front import services
    from inferd.server.rpc.metadata import Identity
    from inferd.server.rpc.service import table
    from tests.conformance.fake_engine import FakeEngine

    class Door:
        paths: list[str]

        def __init__(self):
            self.paths = []

        def add_generic_rpc_handlers(self, handlers):
            pass

        def add_registered_method_handlers(self, service, handlers):
            self.paths += [f"/{service}/{name}" for name in handlers]

    door = Door()
    services.install(door, table(FakeEngine(), Identity()), FakeEngine())
    assert set(door.paths) | {LIST} == set(GROUP_OF) == set(PATHS) | {LIST}


def test_the_groups_are_the_same_everywhere():
    assert tuple(GROUPS) == authorizer.GROUPS == RESTRICTABLE
    assert len(GROUP_OF) == sum(map(len, GROUPS.values()))


def test_every_request_that_names_a_model_is_known():
    for name, method in SERVED.items():
        fields = {"name", "model_name"} & {field.name for field in method.input_type.fields}
        if "SharedMemory" not in name and GROUP_OF[f"/{SERVICE}/{name}"] != "inference":
            assert fields == ({MODEL_FIELD[name]} if name in MODEL_FIELD else set()), name


def was_let_in(code, error):
    """The handler answered, if only that this server's models are not controlled by clients."""
    return code in (grpc.StatusCode.OK, grpc.StatusCode.UNIMPLEMENTED) or "load / unload is not" in error.details()


# ---- tokens ---------------------------------------------------------------------------------------------------------

REFUSED = {
    "none": (),
    "wrong": (bearer("wrong-token"),),
    "empty": (("authorization", ""),),
    "no token": (("authorization", "Bearer"),),
    "another scheme": (("authorization", "Basic all-rights"),),
    "twice": (bearer("all-rights"), bearer("all-rights")),
    "right and wrong": (bearer("all-rights"), bearer("wrong-token")),
    "longer": (bearer("all-rights1"),),
    "shorter": (bearer("all-right"),),
    "very long": (bearer("a" * 4000),),
}


@pytest.mark.parametrize("path", PATHS)
def test_every_rpc_wants_a_known_token(guarded, path):
    states = REFUSED if path.endswith(("ModelInfer", "ServerLive")) else ("none", "wrong")
    for state in states:  # a request and a handler in Python; how the others find a token is the same
        code, error = status(guarded.address, path, *REFUSED[state])
        assert code is grpc.StatusCode.UNAUTHENTICATED, state
        assert richerrors.of(error).reason == "UNKNOWN_CALLER"
    assert was_let_in(*status(guarded.address, path, bearer("all-rights")))
    code, error = status(guarded.address, path, bearer("only-health"))
    assert (code is grpc.StatusCode.PERMISSION_DENIED) == (GROUP_OF[path] != "health")
    if error is not None:
        assert error.details() == f"the token does not allow {GROUP_OF[path]} calls"
        assert richerrors.of(error).reason == "NOT_ALLOWED"


def test_the_scheme_may_be_written_in_any_case(guarded):
    for scheme in ("bearer", "BEARER"):
        code, _ = status(guarded.address, f"/{SERVICE}/ModelInfer", ("authorization", f"{scheme} all-rights"))
        assert code is grpc.StatusCode.OK


def test_a_method_that_does_not_exist_is_unimplemented(guarded):
    code, _ = status(guarded.address, "/a.Service/Method", message=pb.ServerLiveRequest())
    assert code is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    "name", [name for name in MODEL_FIELD if GROUP_OF[f"/{SERVICE}/{name}"] in SIMPLE_GROUPS.split(",")]
)
def test_a_model_that_the_token_does_not_allow(guarded, name):
    path = f"/{SERVICE}/{name}"
    kind = getattr(pb, SERVED[name].input_type.name)
    code, error = status(guarded.address, path, bearer("only-simple"), message=kind(**{MODEL_FIELD[name]: "pair"}))
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert error.details() == "the token does not allow model 'pair'"
    allowed = kind(**{MODEL_FIELD[name]: "versions"})
    assert was_let_in(*status(guarded.address, path, bearer("only-simple"), message=allowed))


def test_traces_of_all_models_are_for_who_may_use_all_of_them(guarded):
    """A trace can contain tensors, so a token for some models must not switch on traces of the others."""
    path = f"/{SERVICE}/TraceSetting"
    message = pb.TraceSettingRequest(settings={"trace_rate": pb.TraceSettingRequest.SettingValue(value=["7"])})
    code, error = status(guarded.address, path, bearer("traces-simple"), message=message)
    assert code is grpc.StatusCode.PERMISSION_DENIED, error
    message.model_name = "simple"
    code, error = status(guarded.address, path, bearer("traces-simple"), message=message)
    assert code is grpc.StatusCode.OK, error


def test_inference_of_a_model_that_the_token_does_not_allow(guarded):
    path = f"/{SERVICE}/ModelInfer"
    allowed, denied = request("simple", floats(1)), request("slow", floats(1))
    for _ in range(3):
        assert status(guarded.address, path, bearer("only-simple"), message=allowed)[0] is grpc.StatusCode.OK
        code, error = status(guarded.address, path, bearer("only-simple"), message=denied)
        assert code is grpc.StatusCode.PERMISSION_DENIED
        assert richerrors.of(error).reason == "NOT_ALLOWED"
    # a model that does not exist looks the same
    code, _ = status(guarded.address, path, bearer("only-simple"), message=request("nope", floats(1)))
    assert code is grpc.StatusCode.PERMISSION_DENIED


def test_a_stream_is_judged_request_by_request(guarded):
    with grpc.insecure_channel(guarded.address) as channel:
        requests = [request(name, floats(1), id=name) for name in ("simple", "slow", "simple")]
        answers = list(Stub(channel).ModelStreamInfer(iter(requests), metadata=(bearer("only-simple"),)))
    texts = [answer.error_message for answer in answers]
    assert texts == ["", "the token does not allow model 'slow'", ""]


def test_lists_show_what_the_token_allows(guarded):
    with grpc.insecure_channel(guarded.address) as channel:
        stub = Stub(channel)
        metadata = (bearer("only-simple"),)
        index = stub.RepositoryIndex(pb.RepositoryIndexRequest(), metadata=metadata)
        assert {model.name for model in index.models} == {"simple", "versions"}
        statistics = stub.ModelStatistics(pb.ModelStatisticsRequest(), metadata=metadata)
        assert {model.name for model in statistics.model_stats} == {"simple", "versions"}


@pytest.mark.parametrize("method", ["Check", "Watch"])
def test_health_of_a_model_that_the_token_does_not_allow(guarded, method):
    for service, expected in (
        ("", grpc.StatusCode.OK),
        (SERVICE, grpc.StatusCode.OK),
        ("versions/3", grpc.StatusCode.OK),
        ("pair", grpc.StatusCode.PERMISSION_DENIED),
        ("pair/1", grpc.StatusCode.PERMISSION_DENIED),
    ):
        message = health_pb2.HealthCheckRequest(service=service)
        assert status(guarded.address, f"{HEALTH}{method}", bearer("only-simple"), message=message)[0] is expected


def test_a_refused_call_does_not_wait_for_its_message(guarded, door):
    if door == "grpcio":
        pytest.skip("C core reads the message of a unary call before it asks")
    with Client(guarded.address) as client:
        stream = client.headers(f"/{SERVICE}/ModelInfer")
        assert client.answer(stream).status == grpc.StatusCode.UNAUTHENTICATED.value[0]


@pytest.mark.parametrize("text", [None, "a rights=all\n"])
def test_a_wrong_file_of_tokens_keeps_the_server_from_starting(repository, tmp_path, text):
    file = tmp_path / "tokens"
    if text:
        file.write_text(text)
    options = ("--model-repository", str(repository), "--grpc-port", "0", "--grpc-token-file", str(file))
    ended = forkserver.run("inferd", "serve", *options)
    assert ended.returncode == 1
    assert f"grpc-token-file: {file}" in ended.stderr


# ---- Triton's restricted protocols ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_a_restricted_protocol_is_served_only_with_its_header(restricted, path):
    group = GROUP_OF[path]
    key, value = {
        "inference": ("infer-key", "infer-value"),
        "health": ("infer-key", "infer-value"),
        "model-repository": ("admin", "admin value"),
        "reflection": ("admin", "admin value"),
    }.get(group, ("", ""))
    header = f"triton-grpc-protocol-{key}"
    states = {
        "none": (),
        "wrong": ((header, "x"),),
        "empty": ((header, ""),),
        "twice": ((header, value), (header, value)),
        "another": (("triton-grpc-protocol-other", value),),
    }
    for state in states if path.endswith(("ModelInfer", "ServerLive")) else ("none", "wrong"):
        code, error = status(restricted.address, path, *states[state])
        if not key:
            assert was_let_in(code, error), state
            continue
        assert code is grpc.StatusCode.UNAUTHENTICATED, state
        assert error.details() == f"This protocol is restricted, expecting header '{header}'"
    if key:
        assert was_let_in(*status(restricted.address, path, (header, value)))


def test_tritonclient_sends_the_header(restricted):
    from tritonclient import grpc as triton
    from tritonclient.utils import InferenceServerException

    client = triton.InferenceServerClient(restricted.address)
    assert client.is_server_live(headers={"triton-grpc-protocol-infer-key": "infer-value"})
    with pytest.raises(InferenceServerException, match="This protocol is restricted, expecting header"):
        client.is_server_live()


# ---- without a server -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "text", "matches"),
    [
        ("", "", True),
        ("", "a", False),
        ("*", "", True),
        ("*", "anything", True),
        ("a*", "abc", True),
        ("a*c", "abc", True),
        ("a*c", "abcd", False),
        ("*b*", "abc", True),
        ("a?c", "abc", True),
        ("a?c", "ac", False),
        ("a*b*c", "aXbXbXc", True),
        ("abc", "abcd", False),
        ("abcd", "abc", False),
        ("a.c", "abc", False),
        ("[ab]", "a", False),
    ],
)
def test_a_pattern_matches_whole_names_by_star_and_question_mark(pattern, text, matches):
    assert access.glob_matches(pattern, text) is matches


def test_a_method_of_no_group_is_refused():
    from inferd.server.errors import Denied, Status

    with pytest.raises(Denied) as error:
        Access().caller("/inference.GRPCInferenceService/Tomorrow", ())
    assert error.value.status is Status.PERMISSION_DENIED
