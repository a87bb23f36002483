"""Rights that change while a call is open, and the file that says them; on both doors."""

from __future__ import annotations

import asyncio
import hashlib
import os
import queue
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from inferd._native.service.authorizer import Authorizer
from inferd._native.service.tokens import GROUPS, TokenTable
from inferd._native.siphash import siphash_of
from inferd.server.front import tokens
from inferd.server.front.access import Access
from inferd.server.front.tokens import TokenFile, TokenFileError, parse
from inferd.server.rpc.service import SERVICE
from inferd_client.pb import grpc_service_pb2 as pb
from tests.conformance import doors
from tests.conformance.client import Stub, floats, request
from tests.conformance.raw import Client
from tests.framing import framed
from tests.replacing import replace

KEY = bytes(range(16))


@pytest.fixture(scope="module", params=doors.NAMES)
def door(request):
    return request.param


class Guarded:
    """A server with a file of tokens."""

    def __init__(self, process, file):
        self.process = process
        self.address = process.address
        self.file = file

    def allow(self, text):
        """Have this in force."""
        before = sum('] "read ' in line for line in self.process.lines)
        replace(self.file, text)
        self.process.says('] "read ', count=before + 1)


@pytest.fixture(scope="module")
def guarded(door, repository, tmp_path_factory):
    file = tmp_path_factory.mktemp("rights") / "tokens"
    file.write_text("first all\n")
    file.chmod(0o600)
    with doors.running_server(door, repository, f"--grpc-token-file={file}") as process:
        yield Guarded(process, file)


def bearer(token):
    return (("authorization", f"Bearer {token}"),) if token else ()


class Stream:
    """A ModelStreamInfer call, one question at a time."""

    def __init__(self, channel, token):
        self._questions = queue.Queue()
        self._answers = Stub(channel).ModelStreamInfer(iter(self._questions.get, None), metadata=bearer(token))

    def ask(self, model):
        """The error's text; empty for an answer."""
        self._questions.put(request(model, floats(1, 2, 3, 4) if model == "versions" else floats(1)))
        return next(self._answers).error_message

    def end(self):
        self._questions.put(None)
        assert list(self._answers) == []


def test_an_open_stream_loses_the_group_that_is_taken_away(guarded):
    guarded.allow("t groups=inference\n")
    with grpc.insecure_channel(guarded.address) as channel:
        stream = Stream(channel, "t")
        assert stream.ask("simple") == ""
        guarded.allow("t groups=health\n")
        assert stream.ask("simple") == "the token does not allow inference calls"
        guarded.allow("t groups=inference models=versions\n")
        assert stream.ask("simple") == "the token does not allow model 'simple'"
        assert stream.ask("versions") == ""
        guarded.allow("other all\n")
        assert "the token is not known" in stream.ask("versions")
        stream.end()


def test_an_anonymous_stream_gets_nothing_from_a_line_that_allows_less(guarded):
    """The models of the line for health must not be those of an inference stream."""
    guarded.allow("* groups=inference models=versions\n")
    with grpc.insecure_channel(guarded.address) as channel:
        stream = Stream(channel, "")
        assert "model 'simple' needs a token" in stream.ask("simple")
        guarded.allow("* groups=health\n")
        assert "inference calls need a token" in stream.ask("simple")
        assert "inference calls need a token" in stream.ask("versions")
        stream.end()


def test_a_message_is_judged_by_one_line_not_by_two(guarded, door):
    """The headers came when the line allowed inference of another model, the message comes when it allows health."""
    if door == "grpcio":
        pytest.skip("C core hands a unary call over when its message is there: one line decides about both")
    guarded.allow("t groups=inference models=versions\n")
    with Client(guarded.address) as client:
        stream = client.headers(f"/{SERVICE}/ModelInfer", authorization="Bearer t")
        client.h2.ping(b"headers!")
        client.flush()
        client.receive_until(lambda: client.pings)  # the server has the headers
        guarded.allow("t groups=health models=simple\n")
        client.data(stream, framed(request("simple", floats(1)).SerializeToString()), end=True)
        answer = client.answer(stream)
    assert answer.status == grpc.StatusCode.PERMISSION_DENIED.value[0]


def test_a_large_request_for_a_model_that_is_not_allowed_takes_no_memory(guarded, door):
    """The request is refused before it gets room in the model's memory, which would be when 1/64 of it has come."""
    if door == "grpcio":
        pytest.skip("C core hands a unary call over when its message is there")
    guarded.allow("t groups=inference models=versions\n")
    message = framed(request("simple", np.zeros((1, 1 << 17), np.float32)).SerializeToString())
    with Client(guarded.address) as client:
        stream = client.headers(f"/{SERVICE}/ModelInfer", authorization="Bearer t")
        client.data(stream, message[: 1 << 14])
        answer = client.answer(stream)
    assert answer.status == grpc.StatusCode.PERMISSION_DENIED.value[0]


def test_watching_health_ends_with_the_right_to_it(guarded):
    guarded.allow("t groups=health models=simple\n")
    with grpc.insecure_channel(guarded.address) as channel:
        watch = channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        of_model = watch(health_pb2.HealthCheckRequest(service="simple"), metadata=bearer("t"), timeout=60)
        of_server = watch(health_pb2.HealthCheckRequest(), metadata=bearer("t"), timeout=60)
        assert next(of_model).status == next(of_server).status == health_pb2.HealthCheckResponse.SERVING
        guarded.allow("t groups=health models=other\nspare all\n")
        with pytest.raises(grpc.RpcError) as denied:
            next(of_model)
        assert denied.value.code() is grpc.StatusCode.PERMISSION_DENIED
        guarded.allow("spare all\n")
        with pytest.raises(grpc.RpcError) as denied:
            next(of_server)
        assert denied.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_an_open_reflection_stream_is_judged_request_by_request(guarded):
    guarded.allow("t groups=reflection\n")
    questions = queue.Queue()
    with grpc.insecure_channel(guarded.address) as channel:
        reflect = channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        answers = reflect(iter(questions.get, None), metadata=bearer("t"), timeout=60)
        questions.put(reflection_pb2.ServerReflectionRequest(list_services=""))
        assert next(answers).list_services_response.service
        guarded.allow("t groups=health\n")
        questions.put(reflection_pb2.ServerReflectionRequest(list_services=""))
        with pytest.raises(grpc.RpcError) as denied:
            next(answers)
        questions.put(None)
    assert denied.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_who_is_refused_is_in_the_log(guarded):
    """With peer, method and rule; and not a line for each of many."""
    guarded.allow("t groups=health\n")
    with grpc.insecure_channel(guarded.address) as channel:
        stub = Stub(channel)
        for _ in range(100):
            with pytest.raises(grpc.RpcError):
                stub.ModelInfer(request("simple", floats(1)))
        with pytest.raises(grpc.RpcError):
            stub.RepositoryIndex(pb.RepositoryIndexRequest(), metadata=bearer("t"))
    line = guarded.process.says("RepositoryIndex: the token does not allow model-repository calls")
    assert "refused: ipv4:127.0.0.1:" in line
    lines = [line for line in guarded.process.lines if f"/{SERVICE}/ModelInfer: inference calls need a token" in line]
    assert 'inferd.access] "refused: ipv4:127.0.0.1:' in lines[0]
    assert len(lines) < 90


def test_who_is_refused_a_model_is_in_the_log(guarded):
    """The request that is refused when its message has come, alone and in a stream, like a call that is refused."""
    guarded.allow("t groups=inference,health,metadata models=mine\n")
    with grpc.insecure_channel(guarded.address) as channel:
        with pytest.raises(grpc.RpcError):
            Stub(channel).ModelInfer(request("simple", floats(1)), metadata=bearer("t"))
        stream = Stream(channel, "t")
        assert stream.ask("versions")
        stream.end()
    for method, model in (("ModelInfer", "simple"), ("ModelStreamInfer", "versions")):
        line = guarded.process.says(f"{method}: the token does not allow model '{model}'")
        assert "refused: ipv4:127.0.0.1:" in line
        assert f" /{SERVICE}/{method}: " in line
    assert not [line for line in guarded.process.lines if "refused: PERMISSION_DENIED" in line], "it is said once"


def test_a_file_that_is_wrong_or_was_cut_leaves_the_tokens_as_they_were(guarded):
    """Cut within a token, its beginning would be a token; cut behind the groups, the line would allow every model."""
    guarded.allow("secret groups=inference models=versions\n")

    def refused(token, code):
        with grpc.insecure_channel(guarded.address) as channel, pytest.raises(grpc.RpcError) as denied:
            Stub(channel).ModelInfer(request("simple", floats(1)), metadata=bearer(token))
        assert denied.value.code() is code

    for cut in ("sec", "secret groups=inference"):
        before = sum("the last line has no end" in line for line in guarded.process.lines)
        replace(guarded.file, cut)
        guarded.process.says("the last line has no end", count=before + 1)
        expected = grpc.StatusCode.UNAUTHENTICATED if cut == "sec" else grpc.StatusCode.PERMISSION_DENIED
        refused(cut.split()[0], expected)
    replace(guarded.file, "secret groups=everything\nwrong-token all\n")
    guarded.process.says(f"the tokens stay as they were: {guarded.file}:1: unknown group 'everything'")
    refused("wrong-token", grpc.StatusCode.UNAUTHENTICATED)
    guarded.file.unlink()
    guarded.process.says(f"the tokens stay as they were: {guarded.file}: No such file or directory")
    refused("secret", grpc.StatusCode.PERMISSION_DENIED)
    guarded.allow("spare all\n")
    assert not [line for line in guarded.process.lines if "wrong-token" in line or "secret" in line]


def test_the_server_does_not_wait_for_a_fifo_in_the_place_of_the_file(guarded):
    guarded.file.unlink()
    os.mkfifo(guarded.file)
    assert "the tokens stay as they were" in guarded.process.says("expected a regular file")
    guarded.file.unlink()
    guarded.allow("t groups=inference\n")
    with grpc.insecure_channel(guarded.address) as channel:
        assert Stub(channel).ModelInfer(request("simple", floats(1)), metadata=bearer("t")).outputs


# ---- the file -------------------------------------------------------------------------------------------------------


def rights(text):
    """What an authorizer says about token `t`: (groups, models among a and b, overrides); None when it is not known."""
    authorizer = Authorizer()
    authorizer.set_tokens(parse(text.encode(), "tokens", authorizer.key))
    verdicts = [authorizer.authorize(group, bearer("t")) for group in GROUPS]
    groups = [group for group, (status, *_) in zip(GROUPS, verdicts, strict=True) if not status]
    caller = verdicts[0][-1]
    if not caller:
        return None
    models = [
        name for name in ("a", "b") for group in groups[:1] if not authorizer.authorize_message(caller, group, name)[0]
    ]
    return groups, models, not authorizer.authorize_override(caller)[0]


def test_what_a_line_allows():
    every = list(GROUPS)
    assert rights("t\n") == ([], [], False)
    assert rights("t all\n") == (every, ["a", "b"], False)
    assert rights("t all overrides\n") == (every, ["a", "b"], True)
    assert rights("t all models=a*\n") == (every, ["a"], False)
    assert rights("t groups=health\n") == (["health"], ["a", "b"], False)
    assert rights("t groups=health models=\n") == (["health"], [], False)
    assert rights("t models=a\n") == ([], [], False)
    assert rights("x all\n") is None


def test_a_comment_begins_a_line_or_follows_a_blank():
    assert rights("# t all\n  # t all\nt groups=health # all\n") == (["health"], ["a", "b"], False)
    assert rights("t groups=health #models=a\n") == (["health"], ["a", "b"], False)
    for text in ("t#x all\n", "t groups=health#\n", "t all#\n"):
        with pytest.raises(TokenFileError):
            parse(text.encode(), "tokens", KEY)


@pytest.mark.parametrize(
    "text",
    ["t groups=inference models=a overrides\n", "tttttttttttt all\n", "* groups=health models=a\nt all models=a,b\n"],
)
def test_a_file_that_was_cut_anywhere_is_refused_or_allows_no_more(text):
    allowed = rights(text) or ((), ())
    whole = [set(found) for found in allowed[:2]]
    for size in range(1, len(text)):
        cut = text[:size]
        if cut.endswith("\n"):
            found = rights(cut)
            assert found is None or (set(found[0]) <= whole[0] and set(found[1]) <= whole[1])
            continue
        with pytest.raises(TokenFileError, match="the last line has no end"):
            parse(cut.encode(), "tokens", KEY)


@pytest.mark.parametrize("text", ["a\na\n", "a rights=all\n", "ä\n", "a groups=everything\n"])
def test_a_wrong_line_is_refused(text):
    with pytest.raises(TokenFileError, match=r"tokens:[12]: "):
        parse(text.encode(), "tokens", KEY)


@pytest.mark.parametrize("hidden", ["\0", "\x0b", "\x1b", "\x85", "\u2028"])
def test_a_file_with_control_characters_is_refused(hidden):
    """Zeros that a disk has in the place of a part would end a pattern before its end, and so widen it."""
    with pytest.raises(TokenFileError, match="tokens:2: the line has a control character"):
        parse(f"a all\nt groups=inference models=m*{hidden}x\n".encode(), "tokens", KEY)
    assert rights("t\tgroups=health\r\n") == (["health"], ["a", "b"], False)


def test_a_file_is_used_when_two_looks_have_found_it_the_same(tmp_path):
    path = tmp_path / "tokens"
    path.write_text("a all\n")
    file = TokenFile(path, KEY)
    assert len(file.first()) == 1
    assert file.changed() is None
    path.write_text("a all\nb all\n")
    assert file.changed() is None  # the first look at it
    path.write_text("a all\nb all\nc all\n")
    assert file.changed() is None  # it has changed again
    assert len(file.changed()) == 3
    assert file.changed() is None


def test_a_lack_of_memory_delays_a_change_and_does_not_lose_it(tmp_path, monkeypatch):
    path = tmp_path / "tokens"
    path.write_text("a all\n")
    file = TokenFile(path, KEY)
    file.first()
    path.write_text("a all\nb all\n")
    assert file.changed() is None  # the first look at it

    def exhausted(*_):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(tokens, "parse", exhausted)
        with pytest.raises(MemoryError):
            file.changed()
    assert len(file.changed()) == 2


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_what_is_no_file_is_refused_and_never_waited_for(tmp_path, make):
    path = tmp_path / "tokens"
    make(path)
    with pytest.raises(TokenFileError, match=r"tokens: (expected a regular file|Is a directory)"):
        TokenFile(path, KEY).first()


def test_a_file_that_everybody_can_read_or_change_is_a_warning(tmp_path, caplog):
    path = tmp_path / "tokens"
    path.write_text("t all\n")
    path.chmod(0o640)
    TokenFile(path, KEY).first()
    assert not caplog.records
    for mode, verb in ((0o644, "read"), (0o602, "change"), (0o666, "read and change")):
        path.chmod(mode)
        TokenFile(path, KEY).first()
        assert f"every user of this machine can {verb} the tokens" in caplog.messages[-1]


def test_a_token_without_rights_is_a_warning(caplog):
    parse(b"# one\nsecret\n", "tokens", KEY)
    assert "tokens:2: a token without rights" in caplog.text
    assert "secret" not in caplog.text


# ---- finding tokens -------------------------------------------------------------------------------------------------


def test_siphash_is_the_reference():
    """Vectors of the reference implementation: the message is 00 01 02 ..., the key 00 .. 0f."""
    for size, expected in {0: "310e0edd47db6f72", 1: "fd67dc93c539f874", 15: "e545be4961ca29a1"}.items():
        found = siphash_of(KEY, bytes(range(size))).to_bytes(8, "little")
        assert found.hex() == expected, size


def test_many_tokens_are_all_found_with_their_own_rights():
    table = TokenTable(KEY)
    numbers = [table.add_rights([group]) for group in GROUPS]
    names = [hashlib.sha256(str(i).encode()).hexdigest()[: 1 + i % 64] + f"-{i}" for i in range(5000)]
    for i, name in enumerate(names):
        assert table.add(name, numbers[i % len(GROUPS)])
        assert not table.add(name, 0)
    authorizer = Authorizer()
    authorizer.set_tokens(table)
    assert len(table) == len(names)
    callers = set()
    for i, name in enumerate(names):
        group = GROUPS[i % len(GROUPS)]
        status, *_, caller = authorizer.authorize(group, bearer(name))
        assert status == 0
        assert authorizer.authorize_message(caller, group, "any")[0] == 0
        assert (
            authorizer.authorize(GROUPS[(i + 1) % len(GROUPS)], bearer(name))[0]
            == grpc.StatusCode.PERMISSION_DENIED.value[0]
        )
        assert authorizer.authorize(group, bearer(name + "x"))[0] == grpc.StatusCode.UNAUTHENTICATED.value[0]
        callers.add(caller)
    assert len(callers) == len(names)


def test_a_token_keeps_its_id_from_file_to_file_and_counts_no_longer_when_it_is_gone():
    authorizer = Authorizer()
    authorizer.set_tokens(parse(b"a all\nb all models=m*\n", "tokens", authorizer.key))
    a, b = (authorizer.authorize("inference", bearer(token))[-1] for token in "ab")
    assert a != b
    assert authorizer.authorize_message(a, "inference", "x") == (0, "", 0)
    assert authorizer.authorize_message(b, "inference", "m1") == (0, "", 0)
    assert authorizer.authorize_message(b, "inference", "x")[0] == grpc.StatusCode.PERMISSION_DENIED.value[0]
    authorizer.set_tokens(parse(b"b all\n", "tokens", authorizer.key))
    assert authorizer.authorize_message(a, "inference", "x")[0] == grpc.StatusCode.UNAUTHENTICATED.value[0]
    assert authorizer.authorize_message(b, "inference", "x") == (0, "", 0)


def test_reading_many_tokens_is_not_the_loops_work(tmp_path):
    """The loop's thread spends next to nothing of the processor's time that reading them takes."""
    path = tmp_path / "tokens"
    path.write_text("t all\n")
    path.chmod(0o600)
    lines = [f"{hashlib.sha256(str(i).encode()).hexdigest()} groups=inference models=m{i % 7}\n" for i in range(50_000)]

    async def spent():
        access = Access((), path)
        path.write_text("".join(lines))
        access._file.changed()
        whole, own = time.process_time(), time.thread_time()
        await access._read(access._file)
        assert len(access.authorizer.authorize("inference", bearer(lines[-1].split()[0]))) == 4
        assert access.authorizer.authorize("inference", bearer(lines[-1].split()[0]))[0] == 0
        return time.thread_time() - own, time.process_time() - whole

    own, whole = asyncio.run(spent())
    assert own < whole / 5
