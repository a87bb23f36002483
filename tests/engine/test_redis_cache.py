"""Guards the response cache in Redis: servers share answers, and whatever Redis does, requests are answered in time."""

import asyncio
import logging
import zlib

import pytest
import redis

from bench.processes import free_port
from inferd._native.service.response_store import ResponseStore
from inferd.server.caching import RedisCache
from inferd.server.engine.caching import circuit, redis_store
from inferd.server.engine.config import Options
from inferd.server.engine.engine import Engine
from inferd_client.pb import grpc_service_pb2 as pb
from tests.engine.cached import CACHED, Cached
from tests.engine.serving import CONFIG, Gate, Loader, Pending, infer, request, row
from tests.front.certificates import Authority
from tests.redis_servers import Puppet, redis_server

PATIENT = 30.0  # seconds: a test that hangs fails, none waits for it
MISSING = b"_\r\n"

ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input { name: "a" data_type: TYPE_INT64 dims: [ -1 ] }
output { name: "b" data_type: TYPE_INT64 dims: [ -1 ] }
ensemble_scheduling { step { model_name: "m" model_version: -1
    input_map { key: "x" value: "a" } output_map { key: "y" value: "b" } } }
response_cache { enable: true }
"""


pytestmark = pytest.mark.usefixtures("native_counters")


@pytest.fixture
def real(tmp_path):
    """A real Redis server: its unix socket."""
    with redis_server(tmp_path) as path:
        yield path


def cache_at(path, **settings):
    return RedisCache(str(path), **{"socket_timeout": PATIENT, "wait_timeout": PATIENT, **settings})


class Server(Cached):
    """One with its cache in Redis."""

    async def written(self):
        """Wait until everything on its way to Redis has arrived there."""
        await asyncio.gather(*self.engine._store._tasks)


async def test_servers_with_equal_files_share_answers(tmp_path, real):
    async with Server(tmp_path / "a", cache_at(real)) as first:
        await first.ask(1, 2)
        await first.written()
        await first.ask(1, 2)
        assert first.model.requests == 1
        assert first.counts("hits", "misses") == (1, 1)
    async with Server(tmp_path / "b", cache_at(real)) as second:
        await second.ask(1, 2)
        assert second.model.requests == 0
        statistics = second.engine.model("m").statistics()
        assert statistics.inference_stats.cache_hit.count == 1
        assert statistics.inference_stats.success.count == 1
        assert statistics.inference_count == 0
        await second.ask(1, 3)
        assert second.model.requests == 1
        assert second.engine.model("m").statistics().inference_stats.cache_miss.count == 1


async def test_a_large_answer_comes_whole(tmp_path, real):
    async with Server(tmp_path / "a", cache_at(real)) as server:
        for _ in range(2):
            await server.ask(*range(300_000))
            await server.written()
        assert server.model.requests == 1


@pytest.mark.parametrize("change", ["a file", "the configuration"])
async def test_a_model_that_has_changed_does_not_answer_with_what_it_was(tmp_path, real, change):
    async with Server(tmp_path / "a", cache_at(real), files={"weights": "old"}) as first:
        await first.ask(1)
        await first.written()
    config = CACHED + 'parameters { key: "k" value { string_value: "v" } }' if change == "the configuration" else CACHED
    files = {"weights": "new" if change == "a file" else "old"}
    async with Server(tmp_path / "b", cache_at(real), files=files, m=config) as second:
        await second.ask(1)
        assert second.model.requests == 1


@pytest.mark.parametrize("weights", ["old", "new"])
async def test_the_answers_of_an_ensemble_depend_on_the_models_of_its_steps(tmp_path, real, weights):
    asked = request("e", a=row(1))
    async with Server(tmp_path / "a", cache_at(real), files={"weights": "old"}, m=CONFIG, e=ENSEMBLE) as first:
        assert (await infer(first.engine, asked)).array("b").tolist() == [[2]]
        await first.written()
    async with Server(tmp_path / "b", cache_at(real), files={"weights": weights}, m=CONFIG, e=ENSEMBLE) as second:
        assert (await infer(second.engine, asked)).array("b").tolist() == [[2]]
        assert second.model.requests == (weights == "new")


async def test_answers_leave_redis_after_their_time(tmp_path, real):
    async with Server(tmp_path / "a", cache_at(real, ttl=1000, prefix="ours")) as server:
        await server.ask(1)
        await server.written()
    with redis.Redis(unix_socket_path=str(real)) as client:
        [key] = client.keys()
        assert key.startswith(b"ours:m:1:")
        assert 0 < client.pttl(key) <= 1_000_000


@pytest.mark.parametrize("garbage", ["text", "cut", "of another key", "another type", "no message"])
async def test_what_is_no_answer_is_not_taken_for_one(tmp_path, real, garbage, caplog):
    async with Server(tmp_path / "a", cache_at(real)) as server:
        await server.ask(1)
        await server.ask(2)
        await server.written()
        with redis.Redis(unix_socket_path=str(real)) as client:
            first, second = sorted(client.keys())
            values = {first: client.get(second), second: client.get(first)}
            for key in (first, second):
                client.delete(key)
                if garbage == "another type":
                    client.hset(key, "field", "value")
                elif garbage == "of another key":
                    client.set(key, values[key])
                elif garbage == "cut":
                    client.set(key, values[key][:-1])
                elif garbage == "no message":
                    wrong = b"\xff\xff"
                    client.set(key, b"inferd1\n" + zlib.crc32(wrong, zlib.crc32(key)).to_bytes(4, "little") + wrong)
                else:
                    client.set(key, "garbage")
        await server.ask(1)
        await server.ask(2)
        assert server.model.requests == 4
        assert "such case 1" in caplog.text
        await server.written()
        if garbage != "another type":  # they were overwritten
            await server.ask(1)
            assert server.model.requests == 4


def test_an_answer_survives_the_way_with_its_parameters():
    message = pb.ModelInferResponse(model_name="m", raw_output_contents=[b"ab"])
    message.outputs.add(name="y", datatype="UINT8", shape=[1, 2])
    for name, kind, value in (
        ("a", "bool_param", True),
        ("b", "int64_param", -5),
        ("c", "string_param", "ü"),
        ("d", "double_param", 0.5),
        ("e", "uint64_param", 1 << 63),
    ):
        setattr(message.parameters[name], kind, value)
    value = redis_store._encode("key", message.SerializeToString())
    outputs, parameters = redis_store._decode("key", value)
    assert outputs == [("y", "UINT8", [1, 2], b"ab")]
    assert sorted(parameters) == [("a", 1, True), ("b", 2, -5), ("c", 3, "ü"), ("d", 4, 0.5), ("e", 5, 1 << 63)]


async def test_who_asks_the_same_meanwhile_shares_the_lookup(tmp_path):
    async with (
        Puppet().serving(tmp_path / "s") as puppet,
        Server(tmp_path / "a", cache_at(tmp_path / "s")) as server,
    ):
        pending = [Pending(server.engine, request(x=row(1), request_id=str(i))) for i in range(5)]
        await puppet.asked.acquire()
        puppet.release()
        assert [(await each.answer()).response.id for each in pending] == list("01234")
        assert server.model.requests == 1
        assert server.counts("followers", "hits", "misses") == (4, 0, 5)


async def test_requests_with_other_parameters_are_looked_up_apart(tmp_path):
    """Each type of value is a part of the key."""
    values = ({"string_param": "a"}, {"string_param": "b"}, {"double_param": 0.5}, {"double_param": 0.25})
    values += ({"int64_param": 1}, {"bool_param": True})
    async with (
        Puppet().serving(tmp_path / "s") as puppet,
        Server(tmp_path / "a", cache_at(tmp_path / "s")) as server,
    ):
        pending = []
        for value in values:
            message = request(x=row(1))
            message.parameters["note"].CopyFrom(pb.InferParameter(**value))
            pending.append(Pending(server.engine, message))
            await puppet.asked.acquire()
            puppet.release()
            await pending[-1].answer()
        keys = [command[1] for command in puppet.commands if command[0].upper() == b"GET"]
        assert len(set(keys)) == len(keys) == len(values)
        assert server.model.requests == len(values)


async def test_a_hit_answers_all_who_wait(tmp_path):
    answer = pb.ModelInferResponse(raw_output_contents=[row(7).tobytes()])
    answer.outputs.add(name="y", datatype="INT64", shape=[1, 1])
    async with (
        Puppet().serving(tmp_path / "s") as puppet,
        Server(tmp_path / "a", cache_at(tmp_path / "s")) as server,
    ):
        pending = [Pending(server.engine, request(x=row(1), request_id=str(i))) for i in range(3)]
        await puppet.asked.acquire()
        value = redis_store._encode(puppet.commands[-1][1].decode(), answer.SerializeToString())
        puppet.release(b"$%d\r\n%s\r\n" % (len(value), value))
        for number, each in enumerate(pending):
            answer = await each.answer()
            assert answer.array().tolist() == [[7]]
            assert (answer.response.model_name, answer.response.id) == ("m", str(number))
        assert server.model.requests == 0
        assert server.counts("followers", "hits", "misses") == (2, 3, 0)


async def test_the_lookup_of_who_joins_one_is_as_long_as_it_has_waited(tmp_path):
    answer = pb.ModelInferResponse(raw_output_contents=[row(7).tobytes()])
    answer.outputs.add(name="y", datatype="INT64", shape=[1, 1])
    async with (
        Puppet().serving(tmp_path / "s") as puppet,
        Server(tmp_path / "a", cache_at(tmp_path / "s")) as server,
    ):
        pending = [Pending(server.engine, request(x=row(1)))]
        await puppet.asked.acquire()
        pending += [Pending(server.engine, request(x=row(1))) for _ in range(20)]
        value = redis_store._encode(puppet.commands[-1][1].decode(), answer.SerializeToString())
        puppet.release(b"$%d\r\n%s\r\n" % (len(value), value))
        for each in pending:
            await each.answer()
        said = server.engine.model("m").statistics().inference_stats
        assert said.cache_hit.count == said.success.count == 21
        assert said.cache_hit.ns <= said.success.ns


async def test_an_answer_with_other_outputs_is_none(tmp_path, caplog):
    wrong = pb.ModelInferResponse(raw_output_contents=[row(7).tobytes()])
    wrong.outputs.add(name="y", datatype="INT64", shape=[1, 2])
    async with (
        Puppet().serving(tmp_path / "s") as puppet,
        Server(tmp_path / "a", cache_at(tmp_path / "s")) as server,
    ):
        pending = Pending(server.engine, request(x=row(1)))
        await puppet.asked.acquire()
        value = redis_store._encode(puppet.commands[-1][1].decode(), wrong.SerializeToString())
        puppet.release(b"$%d\r\n%s\r\n" % (len(value), value))
        assert (await pending.answer()).array().tolist() == [[2]]
        assert "output 'y' of shape [1, 2] has 8 bytes" in caplog.text


async def test_those_who_wait_have_their_own_deadlines_and_may_leave(tmp_path):
    async with (
        Puppet().serving(tmp_path / "s") as puppet,
        Server(tmp_path / "a", cache_at(tmp_path / "s")) as server,
    ):
        first = Pending(server.engine, request(x=row(1)))
        late = Pending(server.engine, request(x=row(1)), timeout_ns=1_000_000)
        last = Pending(server.engine, request(x=row(1)))
        await puppet.asked.acquire()
        assert (await late.answer()).status == 4
        first.ticket.cancel()
        puppet.release()
        assert (await last.answer()).array().tolist() == [[2]]
        assert first.answers == []


async def test_when_all_have_left_nothing_is_executed(tmp_path):
    async with (
        Puppet().serving(tmp_path / "s") as puppet,
        Server(tmp_path / "a", cache_at(tmp_path / "s")) as server,
    ):
        gone = Pending(server.engine, request(x=row(1)))
        await puppet.asked.acquire()
        gone.ticket.cancel()
        puppet.release()
        await server.ask(2)
        assert server.model.requests == 1
        assert server.engine.model("m").statistics().inference_stats.fail.count == 1


async def test_a_lookup_that_is_over_has_no_effect(tmp_path):
    """A client may leave on another thread just before the loop uses the answer."""
    async with (
        Puppet().serving(tmp_path / "s") as puppet,
        Server(tmp_path / "a", cache_at(tmp_path / "s")) as server,
    ):
        gone = Pending(server.engine, request(x=row(1)))
        await puppet.asked.acquire()
        [lookup] = server.engine._store._lookups
        gone.ticket.cancel()
        assert lookup.parts() is None
        lookup.found([("y", "INT64", [1, 1], bytes(8))], [])
        puppet.release()
        await server.ask(2)
        assert server.model.requests == 1


async def test_what_is_being_looked_up_is_executed_when_the_server_ends(tmp_path):
    async with Puppet().serving(tmp_path / "s") as puppet:
        async with Server(tmp_path / "a", cache_at(tmp_path / "s")) as server:
            pending = Pending(server.engine, request(x=row(1)))
            await puppet.asked.acquire()
        assert (await pending.answer()).array().tolist() == [[2]]


async def test_an_answer_is_not_kept_when_the_model_has_changed_meanwhile(tmp_path):
    gate = Gate(lambda batch: batch.set_output("y", batch.input("x").numpy() * 2))
    async with (
        Puppet(MISSING).serving(tmp_path / "s") as puppet,
        Server(tmp_path / "a", cache_at(tmp_path / "s"), gate) as server,
    ):
        for changes in (False, True):
            pending = Pending(server.engine, request(x=row(changes)))
            await gate.entered()
            if changes:
                server.engine._store._identity = lambda name, version: b"another"
            gate.go()
            assert (await pending.answer()).status == 0
            await server.written()
        assert [command[0] for command in puppet.commands].count(b"SET") == 1


async def test_a_slow_redis_is_waited_for_no_longer_than_the_timeout_and_then_not_at_all(tmp_path, caplog):
    async with (
        Puppet().serving(tmp_path / "s") as puppet,
        Server(tmp_path / "a", cache_at(tmp_path / "s", socket_timeout=1)) as server,
    ):
        for value in range(circuit.TIMEOUTS + 3):
            await server.ask(value)
        assert [command[0] for command in puppet.commands].count(b"GET") == circuit.TIMEOUTS
        assert caplog.text.count("does not answer") == 1


async def test_more_lookups_than_connections_wait_their_turn(tmp_path, real):
    async with Server(tmp_path / "a", cache_at(real, pool_size=2)) as server:
        for _ in range(2):
            await asyncio.gather(*(server.ask(value) for value in range(100)))
            await server.written()
        assert server.model.requests == 100
        assert server.counts("hits", "misses") == (100, 100)


async def test_without_redis_requests_are_executed_until_it_is_there(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(circuit, "PROBE_SECONDS", 0.001)
    caplog.set_level(logging.INFO, "inferd.cache")
    async with Server(tmp_path / "a", cache_at(tmp_path / "redis.sock")) as server:
        for _ in range(10):
            await server.ask(1)
        assert server.model.requests == 10
        with redis_server(tmp_path):
            await server.engine._store._circuit._probing
            for _ in range(2):
                await server.ask(1)
                await server.written()
            assert server.model.requests == 11
        await server.ask(1)
        assert server.model.requests == 12
        assert caplog.text.count("does not answer") == 1
        assert caplog.text.count("answers again") == 1


async def test_identical_requests_behind_a_lookup_are_executed_once_more_without_coalescing(tmp_path):
    # the first is missing and runs; a later one does not wait for it, as it does not with a local cache
    gate = Gate(lambda batch: batch.set_output("y", batch.input("x").numpy() * 2))
    async with (
        Puppet(MISSING).serving(tmp_path / "s"),
        Server(tmp_path / "a", cache_at(tmp_path / "s"), gate) as server,
    ):
        first = Pending(server.engine, request(x=row(1)))
        await gate.entered()
        second = Pending(server.engine, request(x=row(1)))
        gate.go(2)
        assert (await first.answer()).array().tolist() == (await second.answer()).array().tolist() == [[2]]
        assert len(gate.batches) == 2


async def test_a_user_with_a_password_over_tls(tmp_path):
    authority = Authority(tmp_path / "ca")
    pair = authority.issue("localhost", "DNS:localhost")
    port = free_port()
    files = ("--tls-cert-file", str(pair.certificate), "--tls-key-file", str(pair.key))
    files += ("--tls-ca-cert-file", str(authority.root), "--tls-port", str(port))
    user = ("--user", "inferd", "on", ">secret", "~inferd:*", "+@all", "--user", "default", "off")
    cache = RedisCache(
        "localhost",
        port,
        user="inferd",
        password="secret",
        cert=pair.certificate,
        key=pair.key,
        cacert=authority.root,
        socket_timeout=PATIENT,
    )
    with redis_server(tmp_path, *files, *user):
        async with Server(tmp_path / "a", cache) as server:
            for _ in range(2):
                await server.ask(1)
                await server.written()
            assert server.model.requests == 1


async def test_a_wrong_password_is_told_and_harms_nobody(tmp_path, caplog):
    with redis_server(tmp_path, "--requirepass", "right") as path:
        async with Server(tmp_path / "a", cache_at(path, password="geheim")) as server:
            await server.ask(1)
            assert server.model.requests == 1
    assert "does not answer" in caplog.text
    assert "geheim" not in caplog.text


def test_without_the_client_library_the_server_says_what_to_install(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    with pytest.raises(Exception, match=r"pip install 'inferd\[redis\]'"):
        Engine([tmp_path], Loader({}), Options(), cache=RedisCache("h", 1))


def test_a_store_that_lacks_a_method_cannot_be_made():
    """The coalescer calls all three, where nothing can be raised any more."""

    class Forgetful(ResponseStore):
        def look(self, lookup):
            return True

        def keep(self, lookup, answer):
            pass

    with pytest.raises(TypeError, match="forget"):
        Forgetful()
