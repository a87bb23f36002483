"""Calls of the methods that Python handles: health, metadata, statistics, the repository; and what they owe the client.

A question stands among the streams of its client (`Client.talks`). What it asks, and what the answer has to say, is
drawn here.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from inferd.server.front.services import Policy, install
from inferd.server.rpc.metadata import EXTENSIONS, Identity
from inferd.server.rpc.service import GROUP_OF, SERVICE, table
from inferd_client.pb import grpc_service_pb2 as pb
from tests.simulation.kinds import KINDS, STEPS
from tests.simulation.operator import BROKEN, LACKS_STEP, NO_ROOM, UNREACHABLE
from tests.simulation.wire import Stream, Violation, framed, take_message

if TYPE_CHECKING:
    from tests.simulation.clients import Call, Client
    from tests.simulation.simulation import Simulation

US = 1000
MS = 1000 * US
SHARE = 0.5  # of simulations in which clients ask such questions
HEALTH = "/grpc.health.v1.Health/"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
NAMES = (SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection")
OK, INVALID, NOT_FOUND, EXHAUSTED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE = 0, 3, 5, 8, 12, 13, 14
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
POLLED = "explicit model load / unload is not allowed if polling is enabled"
OVERRIDES = "loads with a configuration or files of their own"
STOPPED = "the server is stopping"
IDENTITY = Identity("simulated", "1.2.3")
# units of grpc-timeout, each with a number of them that is never reached
TIMEOUTS = ("99999999H", "9000000M", "99999999S", "99999999m")
BAD_TIMEOUTS = ("", "1", "12", "S", "123456789S", "1x", "-1S", "1.5S", "1 S")
LONG = "x" * 5000

Judge = Callable[["Question", bytes], None]


class QuestionSpec:
    """A question: its method, its messages, and the responses that are due.

    Args:
        method: its path, or its name in the service of inference.
        messages: that are sent.
        model: that they are about; "" for none.
        answers: judges each answer; None: there is none.
        refused: the status with which it ends, 0 for any, and a part of the text; None: it is not to be refused.
        may: parts of texts with which it may be refused.
        goes_on: it goes on until the client leaves.
        headers: beside those of every call.
        head_is_wrong: it is refused before anybody looks who asks.
        body: bytes that are sent behind the messages.
    """

    def __init__(
        self,
        method: str,
        *messages: bytes,
        model: str = "",
        answers: Judge | None = None,
        refused: tuple[int, str] | None = None,
        may: tuple[str, ...] = (),
        goes_on: bool = False,
        headers: tuple[tuple[str, str], ...] = (),
        head_is_wrong: bool = False,
        body: bytes = b"",
    ) -> None:
        self.path = method if method.startswith("/") else f"/{SERVICE}/{method}"
        self.messages = messages
        self.model = model
        self.answers = answers
        self.refused = refused
        self.may = may
        self.goes_on = goes_on
        self.headers = headers
        self.head_is_wrong = head_is_wrong
        self.body = body


class Question:
    """One call.

    Args:
        client: whose it is.
        stream: its HTTP/2 stream.
        asked: what it is.
        deadline_ns: from now; negative for none.
        headers: that it was opened with, beside those of every call.
    """

    sequence = None
    wrong = False
    kept = None

    def __init__(
        self,
        client: Client,
        stream: Stream,
        asked: QuestionSpec,
        deadline_ns: int,
        headers: tuple[tuple[str, str], ...],
    ) -> None:
        self.client = client
        self.stream = stream
        self.asked = asked
        self.deadline_ns = deadline_ns
        self.headers = headers
        self.opened_ns = client.simulation.world.now()
        self.number = stream.number
        self.sent_ns = 1 << 62
        self.place = 0
        self.open: list[Call] = []
        self.answers = 0  # that have come
        self.last = -1  # the status of a Watch that it was told last
        self.good = dict(client.simulation.questions.good)  # answers of models that have come before
        self.told = dict(client.simulation.questions.told)  # what statistics have said before

    def __str__(self) -> str:
        deadline = f" deadline {self.deadline_ns // US} us" if self.deadline_ns >= 0 else ""
        return f"question {self.number} of client {self.client.number} {self.asked.path} '{self.asked.model}'{deadline}"

    def receive(self) -> None:
        """Take the answers that have come."""
        while (message := take_message(self.stream.data)) is not None:
            self.answers += 1
            if self.asked.answers is None:
                raise Violation(f"{self}: it is answered, and has to be refused: {self.asked.refused}")
            if self.answers > 1 and not self.asked.goes_on:
                raise Violation(f"{self}: {self.answers} answers")
            self.client.simulation.rights.check_question(self)
            self.asked.answers(self, message)

    def ended(self) -> None:
        """The server has ended it."""
        self.client.simulation.oracle.question_ended(self)

    def let_go(self) -> None:
        """Called when nothing will come any more."""
        self.stream.cancelled = not self.stream.ended

    # -- what there was meanwhile

    def was_there(self, model: str) -> bool | None:
        """Whether a model was ready from when this was asked until now; None: perhaps only at times."""
        simulation = self.client.simulation
        oracle, now = simulation.oracle, simulation.world.now()
        if model not in simulation.kinds:
            return False
        away = [(since, until) for since, until in oracle.away.get(model, ()) if until >= self.opened_ns]
        if model in simulation.versions and not away and oracle.since[model] < self.opened_ns:
            # a version serves before its workers are up, and after they have ended, and is not ready then
            return None if any(KINDS[name].style == "worker" for name in STEPS[model]) else True
        if any(since < self.opened_ns and until > now for since, until in away):
            return False
        never = model not in oracle.since and model not in simulation.versions
        return False if never and simulation.demand.on else None


class Questions:
    """Those of a simulation.

    Attributes:
        share: how often an action of a client is one.
        good: how many answers the version of each model has given that serves.
        told: successes and failures that its statistics have told, with when it has begun to serve.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        on = simulation.has("questions", SHARE, when=simulation.scale.questions)
        self.share = Random(f"{simulation.outcome.seed} questions").choice((0.03, 0.1, 0.3)) if on else 0.0
        self.good: dict[str, int] = {}
        self.told: dict[str, tuple[int, int, int]] = {}

    def install(self) -> None:
        """Have the door serve them, and inference, where that is handled in Python, too."""
        simulation = self._simulation
        if not (self.share or simulation.by_python):
            return
        policy = Policy(access=simulation.rights.access, forwarder=simulation.forwarding.forwarder)
        install(simulation.door, table(simulation.engine, IDENTITY), simulation.engine, policy)

    def loaded(self, name: str) -> None:
        """Another version of this model serves."""
        self.good[name] = 0
        self.told.pop(name, None)

    def heard(self, call: Call) -> None:
        """A call has a good answer, which the version that serves has given if it was opened under it; a sequence stays
        with the version under which it began."""
        begun_ns = call.opened_ns if call.sequence is None else call.sequence.begun_ns
        if call.kind.name in self.good and self._simulation.oracle.since[call.kind.name] < begun_ns:
            self.good[call.kind.name] += 1

    # -- clients

    def ask(self, client: Client) -> None:
        """Have a client ask one."""
        simulation, random = self._simulation, client.random
        makers = (MAKERS * 3 + WRONG) if simulation.scale.errors else MAKERS
        asked = random.choice(makers)(simulation, random)
        deadline = random.choice(client.temper.deadlines) if simulation.scale.deadlines else -1
        if asked.head_is_wrong:
            deadline = -1
        shown = client.headers(deadline)
        own = {name for name, _ in asked.headers} | ({"grpc-encoding"} if asked.body else set())
        shown = tuple(pair for pair in shown if pair[0] not in own)
        headers = (*shown, *asked.headers)
        stream = client.wire.open(asked.path, headers, b"")
        question = Question(client, stream, asked, deadline, headers)
        packing = "" if asked.head_is_wrong or asked.body else client.packing
        for message in asked.messages:
            stream.body += framed(message, packed=packing)
        stream.body += asked.body
        client.talks[question.number] = question
        client.unsent.append(question)
        client.tell(f"asks {question}")
        if asked.goes_on or random.random() < client.temper.cancels:
            pause = random.randint(0, 20 * MS if asked.goes_on else MS)
            simulation.later(pause, lambda: client.leave_question(question))


def some_model(simulation: Simulation, random: Random) -> str:
    """One that there is, or was; or that there never is."""
    return random.choice((*sorted(simulation.kinds), "nobody"))


# ---------------------------------------------------------------------------------------------------------------------
# The questions, and the responses that are due


def live(_: Simulation, _random: Random) -> QuestionSpec:
    def judge(question: Question, message: bytes) -> None:
        if not pb.ServerLiveResponse.FromString(message).live:
            raise Violation(f"{question}: the server does not live")

    return QuestionSpec("ServerLive", b"", answers=judge)


def ready(simulation: Simulation, _: Random) -> QuestionSpec:
    def judge(question: Question, message: bytes) -> None:
        is_ready = pb.ServerReadyResponse.FromString(message).ready
        there = all(question.was_there(name) for name in simulation.kinds)
        # a model whose newer files do not load is not ready, though its older version serves
        if (
            not is_ready
            and there
            and not (simulation.operator.is_stopping or simulation.shelf.moody or simulation.graphics.lost)
        ):
            raise Violation(f"{question}: the server is not ready, and has all models")

    return QuestionSpec("ServerReady", b"", answers=judge)


def model_ready(simulation: Simulation, random: Random) -> QuestionSpec:
    model = some_model(simulation, random)
    version = random.choice(("", "", "1", "2"))

    def judge(question: Question, message: bytes) -> None:
        is_ready = pb.ModelReadyResponse.FromString(message).ready
        there = question.was_there(model)
        if simulation.graphics.lost and any(KINDS[name].style == "gpu" for name in STEPS.get(model, ())):
            return  # one whose device is lost is not ready
        if simulation.demand.on and not there:
            return  # a request would load it, or its load has failed before
        if there is not None and is_ready != (there and version != "2"):
            raise Violation(f"{question}: version '{version}' is said to be ready: {is_ready}, and is there: {there}")

    message = pb.ModelReadyRequest(name=model, version=version)
    return QuestionSpec("ModelReady", message.SerializeToString(), model=model, answers=judge)


def server_metadata(_: Simulation, _random: Random) -> QuestionSpec:
    expected = pb.ServerMetadataResponse(name=IDENTITY.name, version=IDENTITY.version, extensions=EXTENSIONS)

    def judge(question: Question, message: bytes) -> None:
        if (told := pb.ServerMetadataResponse.FromString(message)) != expected:
            raise Violation(f"{question}: {told}")

    return QuestionSpec("ServerMetadata", b"", answers=judge)


def model_metadata(simulation: Simulation, random: Random) -> QuestionSpec:
    model = some_model(simulation, random)
    version = random.choice(("", "1"))

    def judge(question: Question, message: bytes) -> None:
        spec = KINDS[model].spec("", 1)
        expected = pb.ModelMetadataResponse(
            name=model, versions=["1"], platform="ensemble" if spec.ensemble else "simulated"
        )
        batch = (-1,) if spec.max_batch_size else ()
        for given, tensors in ((expected.inputs, spec.inputs), (expected.outputs, spec.outputs)):
            for tensor in tensors:
                # a shape tensor says first how many rows there are
                shape = (tensor.dims[0] + 1,) if tensor.shape_tensor else (*batch, *tensor.dims)
                given.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
        told = pb.ModelMetadataResponse.FromString(message)
        if KINDS[model].reorders:  # as its version has them
            for tensors in (told.inputs, told.outputs, expected.inputs, expected.outputs):
                tensors.sort(key=lambda tensor: tensor.name)
        if told != expected:
            raise Violation(f"{question}: {told}")
        _must_be_there(question, model)

    message = pb.ModelMetadataRequest(name=model, version=version)
    return QuestionSpec("ModelMetadata", message.SerializeToString(), model=model, answers=judge, may=AWAY)


def model_config(simulation: Simulation, random: Random) -> QuestionSpec:
    model = some_model(simulation, random)

    def judge(question: Question, message: bytes) -> None:
        told = pb.ModelConfigResponse.FromString(message).config
        if (told.name, told.max_batch_size) != (model, KINDS[model].spec("", 1).max_batch_size):
            raise Violation(f"{question}: {told}")
        _must_be_there(question, model)

    message = pb.ModelConfigRequest(name=model)
    return QuestionSpec("ModelConfig", message.SerializeToString(), model=model, answers=judge, may=AWAY)


AWAY = ("unknown model", "load failed for model", "models are not loaded", "has no available versions")


def _must_be_there(question: Question, model: str) -> None:
    if question.was_there(model) is False and not question.client.simulation.demand.on:
        raise Violation(f"{question}: an answer of a model that is not there")


def model_statistics(simulation: Simulation, random: Random) -> QuestionSpec:
    model = random.choice(("", some_model(simulation, random)))

    def judge(question: Question, message: bytes) -> None:
        told = pb.ModelStatisticsResponse.FromString(message).model_stats
        names = [each.name for each in told]
        if names != sorted(names):
            raise Violation(f"{question}: models {names}")
        asked = [model] if model else sorted(simulation.kinds)
        for name in asked:
            there = question.was_there(name)
            may = simulation.rights.may_know(question, name)
            if names.count(name) != 1 and (there and may is True):
                raise Violation(f"{question}: '{name}' is there, and not in {names}")
            if name in names and (there is False or may is False) and not simulation.demand.on:
                raise Violation(f"{question}: '{name}' is not there, or not for this client, and in {names}")
        for each in told:
            if each.name not in asked or each.version != "1":
                raise Violation(f"{question}: statistics of '{each.name}' version {each.version}")
            check_statistics(question, each)

    message = pb.ModelStatisticsRequest(name=model)
    may = ("is not available",)
    return QuestionSpec("ModelStatistics", message.SerializeToString(), model=model, answers=judge, may=may)


def check_statistics(question: Question, told: pb.ModelStatistics) -> None:
    """The sums agree with each other, with what was told before, and with what clients have heard."""
    simulation = question.client.simulation
    said, kind = told.inference_stats, KINDS[told.name]
    success, failed = said.success.count, said.fail.count
    since = simulation.oracle.since.get(told.name, -1)
    if since < 0 or simulation.is_faulty:
        return
    if since < question.opened_ns and question.was_there(told.name):
        good = question.good.get(told.name, 0)
        if success < good:
            raise Violation(f"{question}: {success} successes, and clients have heard of {good}")
        before, *counts = question.told.get(told.name, (since, 0, 0))
        if before == since and (success < counts[0] or failed < counts[1]):
            raise Violation(f"{question}: {success} successes and {failed} failures, where {counts} were told before")
        if simulation.oracle.since[told.name] == since:
            _, *latest = simulation.questions.told.get(told.name, (since, 0, 0))
            simulation.questions.told[told.name] = (since, max(success, latest[0]), max(failed, latest[1]))
    counted = sum(each.compute_infer.count for each in told.batch_stats)
    if counted != told.execution_count:
        raise Violation(f"{question}: {told.execution_count} executions, and batches of all sizes are {counted}")
    if not (kind.repeats or kind.steps) and told.inference_count < told.execution_count:
        raise Violation(f"{question}: {told.inference_count} rows in {told.execution_count} executions")


def index(simulation: Simulation, random: Random) -> QuestionSpec:
    only_ready = random.random() < 0.5

    def judge(question: Question, message: bytes) -> None:
        told = pb.RepositoryIndexResponse.FromString(message).models
        names = [each.name for each in told]
        if names != sorted(names) or not set(names) <= simulation.kinds.keys():
            raise Violation(f"{question}: models {names}")
        for name in simulation.kinds:
            states = [each.state for each in told if each.name == name]
            there, may = question.was_there(name), simulation.rights.may_know(question, name)
            if there and may and "READY" not in states:
                raise Violation(f"{question}: '{name}' is there, and told as {states}")
            if "READY" in states and (there is False or may is False):
                raise Violation(f"{question}: '{name}' is not there, or not for this client, and told as {states}")
            if may is False and states:
                raise Violation(f"{question}: the client may not know of '{name}': {states}")
        if only_ready and any(each.state != "READY" for each in told):
            raise Violation(f"{question}: it asks for models that are ready, and is told of {told}")

    message = pb.RepositoryIndexRequest(ready=only_ready)
    return QuestionSpec("RepositoryIndex", message.SerializeToString(), answers=judge, may=(UNREACHABLE,))


def health_check(simulation: Simulation, random: Random) -> QuestionSpec:
    name = _health_name(simulation, random)
    model = name.partition("/")[0] if name not in ("", SERVICE) else ""

    def judge(question: Question, message: bytes) -> None:
        _judge_health(question, name, health_pb2.HealthCheckResponse.FromString(message).status)

    message = health_pb2.HealthCheckRequest(service=name)
    return QuestionSpec(
        f"{HEALTH}Check",
        message.SerializeToString(),
        model=model,
        answers=judge,
        may=(f"unknown service '{name}'",),
    )


def health_watch(simulation: Simulation, random: Random) -> QuestionSpec:
    name = _health_name(simulation, random)
    model = name.partition("/")[0] if name not in ("", SERVICE) else ""

    def judge(question: Question, message: bytes) -> None:
        status = health_pb2.HealthCheckResponse.FromString(message).status
        if status == question.last:
            raise Violation(f"{question}: it is told {status} again")
        question.last = status
        _judge_health(question, name, status)

    message = health_pb2.HealthCheckRequest(service=name)
    return QuestionSpec(f"{HEALTH}Watch", message.SerializeToString(), model=model, answers=judge, goes_on=True)


def _health_name(simulation: Simulation, random: Random) -> str:
    model = some_model(simulation, random)
    return random.choice(("", SERVICE, model, f"{model}/1"))


def _judge_health(question: Question, name: str, status: int) -> None:
    """What a model's status is depends on whether it was there all the time."""
    simulation = question.client.simulation
    model = name.partition("/")[0]
    if simulation.demand.on or simulation.operator.is_stopping:
        return
    models = tuple(simulation.kinds) if name in ("", SERVICE) else (model,)
    there = [question.was_there(each) for each in models]
    if (all(there) and status != SERVING) or (model == name and there == [False] and status == SERVING):
        raise Violation(f"{question}: '{name}' has status {status}, and is there: {there}")


def reflect(_: Simulation, _random: Random) -> QuestionSpec:
    def judge(question: Question, message: bytes) -> None:
        listed = reflection_pb2.ServerReflectionResponse.FromString(message).list_services_response.service
        if sorted(each.name for each in listed) != sorted(NAMES):
            raise Violation(f"{question}: services {listed}")

    message = reflection_pb2.ServerReflectionRequest(list_services="")
    return QuestionSpec(REFLECTION, message.SerializeToString(), answers=judge)


def slow(_: Simulation, random: Random) -> QuestionSpec:
    """With a deadline in a unit that makes it long."""
    asked = live(_, random)
    asked.headers = (("grpc-timeout", random.choice(TIMEOUTS)),)
    return asked


def described(_: Simulation, random: Random) -> QuestionSpec:
    """With headers that Python is told, and that nobody asks for."""
    asked = live(_, random)
    asked.headers = (
        ("x-note-bin", random.choice(("AAEC", "AAE", "A", "AAEC,AAE", "!", ""))),
        ("x-note", random.choice(("", "a", LONG[:100]))),
        ("user-agent", "simulated"),
    )
    return asked


# -- what has to be refused


def unknown_method(_: Simulation, random: Random) -> QuestionSpec:
    path = random.choice((f"/{SERVICE}/Nothing", "/nobody/Nothing", "/nobody"))
    return QuestionSpec(path, b"", refused=(UNIMPLEMENTED, f"Method not found: {path}"))


def not_served(_: Simulation, random: Random) -> QuestionSpec:
    name = random.choice(("TraceSetting", "LogSettings"))
    text = f"{name} is part of the protocol, but this server does not serve it"
    return QuestionSpec(name, b"", refused=(UNIMPLEMENTED, text))


def no_message(_: Simulation, random: Random) -> QuestionSpec:
    count = random.choice((0, 2, 3))
    text = f"expected one request message, got {'more' if count else 'none'}"
    return QuestionSpec("ServerLive", *[b""] * count, refused=(UNIMPLEMENTED, text))


def garbled(_: Simulation, random: Random) -> QuestionSpec:
    name = random.choice(("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics", "RepositoryIndex"))
    data = b"\x0a\xff" + bytes(random.randrange(20))
    text = f"cannot parse the request: {len(data)} bytes are not a valid inference.{name}Request"
    return QuestionSpec(name, data, refused=(INTERNAL, text))


def garbled_health(_: Simulation, random: Random) -> QuestionSpec:
    name = random.choice(("Check", "Watch"))
    text = "cannot parse the request: 2 bytes are not a valid grpc.health.v1.HealthCheckRequest"
    return QuestionSpec(f"{HEALTH}{name}", b"\x0a\xff", refused=(INVALID, text))


def long_health(_: Simulation, _random: Random) -> QuestionSpec:
    message = health_pb2.HealthCheckRequest(service=LONG)
    text = f"expected the name of a service of at most 4096 bytes, got {len(LONG)}"
    return QuestionSpec(f"{HEALTH}Check", message.SerializeToString(), refused=(INVALID, text))


def other_repository(_: Simulation, random: Random) -> QuestionSpec:
    makers = (pb.RepositoryIndexRequest, pb.RepositoryModelLoadRequest, pb.RepositoryModelUnloadRequest)
    message = random.choice(makers)(repository_name="elsewhere")
    name = type(message).__name__.removesuffix("Request")
    text = "'repository_name' specification is not supported"
    return QuestionSpec(name, message.SerializeToString(), refused=(UNIMPLEMENTED, text))


def wrong_load(simulation: Simulation, random: Random) -> QuestionSpec:
    model = some_model(simulation, random)
    message = pb.RepositoryModelLoadRequest(model_name=model)
    what = random.choice(("nothing", "config", "file:1/x", "override"))
    text = f"invalid value type for load parameter '{what}', expected {'bytes' if '/' in what else 'string'}_param."
    status = INVALID
    if what == "nothing":
        text = "unrecognized load parameter 'nothing'."
        message.parameters[what].bool_param = True
    elif what != "override":
        message.parameters[what].int64_param = 3
    elif simulation.operator.polls and not simulation.rights.on:
        message.parameters["config"].string_param = "{}"
        status, text = 0, POLLED
    elif simulation.rights.refuses_overrides:  # no token has the right to them
        message.parameters["config"].string_param = "{}"
        status, text = 0, OVERRIDES
    else:
        message.parameters["config"].bool_param = True
        text = text.replace("override", "config")
    return QuestionSpec("RepositoryModelLoad", message.SerializeToString(), model=model, refused=(status, text))


def wrong_unload(simulation: Simulation, random: Random) -> QuestionSpec:
    model = some_model(simulation, random)
    message = pb.RepositoryModelUnloadRequest(model_name=model)
    if random.random() < 0.5:
        message.parameters["nothing"].bool_param = True
        text = "unrecognized unload parameter 'nothing'."
    else:
        message.parameters["unload_dependents"].int64_param = 1
        text = "invalid value type for 'unload_dependents' parameter, expected bool_param."
    return QuestionSpec("RepositoryModelUnload", message.SerializeToString(), model=model, refused=(INVALID, text))


def bad_timeout(_: Simulation, random: Random) -> QuestionSpec:
    text = "grpc-timeout must be at most 8 digits and one of H M S m u n"
    headers = (("grpc-timeout", random.choice(BAD_TIMEOUTS)),)
    return QuestionSpec("ServerLive", b"", refused=(INTERNAL, text), headers=headers, head_is_wrong=True)


def bad_head(_: Simulation, random: Random) -> QuestionSpec:
    """Refused for one of its headers, whatever its method."""
    status = INTERNAL
    what = random.randrange(5)
    if what == 0:
        text, header = "the HTTP method of a gRPC call must be POST", (":method", "GET")
    elif what == 1:
        kind = random.choice(("text/plain", "application/grpcs", "application/json"))
        text, header = "the content-type of a gRPC call must begin with application/grpc", ("content-type", kind)
    elif what == 2:
        text, header = "a gRPC call must carry the header 'te: trailers'", ("te", "")  # not there
    elif what == 3:
        text, status = "the grpc-encoding of the request is not supported", UNIMPLEMENTED
        header = ("grpc-encoding", random.choice(("br", "gzipp", "snappyyy")))
    else:
        text, status, header = "the request headers exceed 16384 bytes", EXHAUSTED, ("x-long", "l" * 16_080)
    path = random.choice(("ServerLive", "ModelInfer", "ModelStreamInfer"))
    return QuestionSpec(path, b"", refused=(status, text), headers=(header,), head_is_wrong=True)


def other_kind(simulation: Simulation, random: Random) -> QuestionSpec:
    """With other headers that mean the same."""
    asked = live(simulation, random)
    asked.headers = (
        random.choice((("content-type", "application/grpc+proto"), ("content-type", "application/grpc;x"))),
    )
    return asked


def bad_body(_: Simulation, random: Random) -> QuestionSpec:
    """Refused for what its message is put into, before it is decoded."""
    status, headers = INTERNAL, (("grpc-encoding", random.choice(("gzip", "deflate"))),)
    packed = framed(bytes(500) + random.randbytes(500), packed=headers[0][1])
    what = random.randrange(6)
    text = "a request message could not be decompressed"
    if what == 0:
        text, body = "the first byte of a gRPC message must be 0 or 1", b"\2\0\0\0\1x"
    elif what == 1:
        headers = (("grpc-encoding", "identity"),)
        text, body = "a message is marked as compressed but the call declares no grpc-encoding", b"\1\0\0\0\1x"
    elif what == 2:
        text, body = "the request ends in the middle of a message", framed(bytes(300))[: random.randrange(1, 300)]
    elif what == 3:
        cut = packed[5 : random.randrange(6, len(packed))]
        body = b"\1" + len(cut).to_bytes(4, "big") + cut
    elif what == 4:
        body = packed[:20] + bytes(len(packed) - 20)
    else:
        body = b"\1" + (len(packed) - 2).to_bytes(4, "big") + packed[5:] + b"end"
    path = random.choice(("ServerLive", "ModelInfer"))
    return QuestionSpec(path, refused=(status, text), headers=headers, body=body)


MAKERS = (
    other_kind,
    live,
    ready,
    model_ready,
    model_ready,
    server_metadata,
    model_metadata,
    model_metadata,
    model_config,
    model_statistics,
    model_statistics,
    model_statistics,
    index,
    index,
    health_check,
    health_check,
    health_watch,
    reflect,
    slow,
    described,
)
WRONG = (
    unknown_method,
    not_served,
    no_message,
    garbled,
    garbled_health,
    long_health,
    other_repository,
    wrong_load,
    wrong_unload,
    bad_timeout,
    bad_head,
    bad_head,
    bad_body,
    bad_body,
)


def may_fail(question: Question, status: int, text: str) -> bool:
    """Whether a question may end so, for what there is or for what it is."""
    simulation, asked = question.client.simulation, question.asked
    if asked.refused is not None:
        expected, part = asked.refused
        return part in text and status != OK and expected in (0, status)
    if STOPPED in text:
        return simulation.operator.is_stopping
    if not any(part in text for part in asked.may):
        return False
    if UNREACHABLE in text or BROKEN in text or LACKS_STEP in text or NO_ROOM in text:
        return simulation.shelf.moody > 0 or simulation.demand.on
    if "models are not loaded" in text or "load failed" in text:
        return simulation.demand.on
    if asked.path.startswith(HEALTH):
        return status == NOT_FOUND and (asked.model == "nobody" or simulation.demand.on)
    return question.was_there(asked.model) is not True


def group_of(question: Question) -> str:
    """The group of RPCs that rights name; empty: none."""
    return GROUP_OF.get(question.asked.path, "")
