"""Guards the response cache: identical requests get the kept answer, within its size and its time, and no other one."""

import asyncio
import random
import weakref
from functools import partial

import numpy as np
import pytest

from bench import steps
from inferd._native.memory.resource import host as host_memory
from inferd.server.caching import CacheConfigError, LocalCache, RedisCache, parse_cache_config
from inferd.server.engine.loading.control import ALL, ControlMode, ModelControl
from tests.engine.cached import CACHED, Cached
from tests.engine.serving import CONFIG, YZ, Counting, Z, infer, infer_all, puppets_of, request, row, serving
from tests.waiting import until

ENTRY = 4096  # bytes that a small answer takes at most, question and all


pytestmark = pytest.mark.usefixtures("native_counters")


async def test_the_second_request_is_answered_from_the_cache(tmp_path):
    async with Cached(tmp_path, LocalCache(1 << 20)) as cached:
        await cached.ask(1, 2)
        await cached.ask(1, 2)
        await cached.ask(1, 2, 3)
        await cached.ask(1, 2)
        assert cached.model.requests == 2
        assert cached.counts("hits", "misses", "entries") == (2, 2, 2)
        statistics = cached.engine.model("m").statistics()
        assert statistics.inference_stats.cache_hit.count == 2
        assert statistics.inference_stats.cache_miss.count == 2
        assert statistics.inference_stats.success.count == 4
        assert statistics.inference_count == 2


async def test_answers_have_the_id_of_their_own_request(tmp_path):
    async with Cached(tmp_path, LocalCache(1 << 20)) as cached:
        for name in ("a", "b"):
            answer = await infer(cached.engine, request(x=row(1), request_id=name))
            assert answer.response.id == name


async def test_entries_of_other_sizes_leave_no_memory_behind(tmp_path):
    """The size bounds what the cache takes as memory: what leaves it does not stay among the free blocks."""
    limit = 4 << 20
    held = []
    for number, cache in enumerate((None, LocalCache(limit))):  # the first has what the requests themselves leave
        async with Cached(tmp_path / str(number), cache) as cached:
            for width in range(2000, 62000, 3000):
                for first in range(20):
                    await cached.ask_row(np.arange(first, first + width)[None])
            held.append(host_memory().usage()["held"])
            if cache is not None:
                assert cached.counts("evictions")[0] > 100
    assert held[1] - held[0] <= limit + (1 << 20)


async def test_the_least_recently_used_leaves_when_the_cache_is_full(tmp_path):
    async with Cached(tmp_path, LocalCache(10 * ENTRY)) as cached:
        await cached.ask(0)
        size = cached.counts("bytes")[0]
        assert size <= ENTRY
        fits = 10 * ENTRY // size
        for value in range(1, fits):
            await cached.ask(value)
        assert cached.counts("evictions", "entries") == (0, fits)
        await cached.ask(0)
        await cached.ask(fits)
        await cached.ask(0)
        assert cached.counts("hits", "evictions", "entries") == (2, 1, fits)
        await cached.ask(1)
        assert cached.counts("hits", "evictions") == (2, 2)
        assert cached.counts("bytes")[0] <= 10 * ENTRY


async def test_what_is_larger_than_the_cache_is_not_kept(tmp_path):
    async with Cached(tmp_path, LocalCache(64 << 10)) as cached:
        await cached.ask(*range(20_000))
        await cached.ask(*range(20_000))
        assert cached.model.requests == 2
        assert cached.counts("entries", "bytes") == (0, 0)


async def test_one_answer_does_not_take_the_place_of_all_others(tmp_path):
    """An entry may have a quarter of the cache, or what the operator says; a larger response is not kept."""
    for name, cache in (("usual", LocalCache(512 << 10)), ("said", LocalCache(1 << 20, entry=128 << 10))):
        async with Cached(tmp_path / name, cache) as cached:
            await cached.ask(1)
            await cached.ask(*range(20_000))
            assert cached.counts("entries") == (1,)
            await cached.ask(*range(5_000))
            assert cached.counts("entries", "evictions") == (2, 0)


async def test_large_inputs_are_held_only_where_they_are_compared(tmp_path):
    """Else their digests stand for them; one that is a little different has another."""
    held = []
    for compare in (False, True):
        async with Cached(tmp_path / str(compare), LocalCache(1 << 20, compare=compare)) as cached:
            for _ in range(2):
                await cached.ask(*range(4000))
                await cached.ask(*range(3999), 0)
                await cached.ask(0, *range(1, 4000))
            assert (cached.model.requests, *cached.counts("hits", "entries")) == (2, 4, 2)
            held.append(cached.counts("bytes")[0])
    assert held[1] - held[0] >= 2 * 4000 * 8


async def test_a_parameter_is_kept_without_the_message_that_it_came_in(tmp_path):
    values = range(100_000)

    async def ask(value):
        message = request(x=row(*values))
        message.parameters["k"].string_param = value
        answer = await infer(cached.engine, message)
        assert answer.array().tolist() == [[2 * each for each in values]]

    async with Cached(tmp_path, LocalCache(8 << 20)) as cached:
        for value in ("one", "two", "one", "two", ""):
            await ask(value)
        assert (cached.model.requests, *cached.counts("hits", "entries")) == (3, 2, 3)
        assert cached.counts("bytes")[0] < 4 * 800_000  # the answers


@pytest.mark.skipif(not steps.can_count(), reason="instructions are counted on x86-64 only")
async def test_a_hit_reads_a_large_input_once(tmp_path):
    """Not a second time to compare it; counted in instructions of the loop's thread."""
    taken = []
    message = request(x=row(*range(16_000))).SerializeToString()
    for compare in (False, True):
        async with Cached(tmp_path / str(compare), LocalCache(1 << 21, compare=compare)) as cached:
            await cached.ask(*range(16_000))
            done = asyncio.Event()
            submit = partial(cached.engine.infer.submit, message, lambda *_, done=done: done.set())
            taken.append(steps.count(submit))
            await done.wait()
            assert cached.counts("hits") == (1,)
    assert taken[0] < taken[1]


async def test_a_small_answer_does_not_hold_the_memory_of_its_batch(tmp_path):
    config = CACHED.replace("dynamic_batching { }", "dynamic_batching { max_queue_delay_microseconds: 100000 }")
    config = config.replace("max_batch_size: 8", "max_batch_size: 64")
    async with Cached(tmp_path, LocalCache(64 << 20), m=config) as cached:
        wide = range(1000)
        await asyncio.gather(*(cached.ask(i, *wide) for i in range(64)))
        await asyncio.gather(*(cached.ask(i, *wide) for i in range(64)))
        assert cached.counts("hits", "entries") == (64, 64)
        assert cached.counts("bytes")[0] < 64 * 4 * 8 * 1001


async def test_a_kept_answer_does_not_keep_what_the_model_has_made(tmp_path):
    """The cache copies the response, because the model's array may be part of a larger one."""
    made = []

    def double(batch):
        array = batch.input("x").numpy() * 2
        made.append(weakref.ref(array))
        batch.set_output("y", array)

    async with Cached(tmp_path, LocalCache(1 << 20), double) as cached:
        for first in range(3):
            await cached.ask(*range(first, first + 1000))
        assert cached.counts("entries") == (3,)
        assert all(array() is None for array in made)


async def test_a_response_past_its_time_is_not_kept(tmp_path):
    async with Cached(tmp_path, LocalCache(1 << 20, ttl=1e-9)) as cached:
        await cached.ask(1)
        await cached.ask(1)
        assert cached.model.requests == 2
        assert cached.counts("hits", "entries") == (0, 1)


async def test_the_answers_of_a_version_leave_with_it(tmp_path):
    """More than are freed at a time; those of another model stay, and still leave by last use."""
    model = Counting()
    control = ModelControl(ControlMode.EXPLICIT, (ALL,))
    async with serving(tmp_path, model, cache=LocalCache(8 << 20), control=control, m=CACHED, n=CACHED) as engine:
        for _ in range(2):
            for name, count in (("n", 10), ("m", 2500)):
                await infer_all(engine, *(request(name, x=row(number)) for number in range(count)))
        assert model.requests == 2510
        assert engine.infer.reuse()["entries"] == 2510
        await engine.unload("m")
        await until(lambda: engine.infer.reuse()["entries"] == 10)
        await engine.load("m")
        await infer_all(engine, *(request(name, x=row(number)) for name in ("m", "n") for number in range(10)))
        assert model.requests == 2520
        await infer_all(engine, *(request(x=row(number)) for number in range(10_000)))
        assert engine.infer.reuse()["evictions"] > 0


async def test_errors_are_not_kept(tmp_path):
    async with Cached(tmp_path, LocalCache(1 << 20)) as cached:

        def fail(batch):
            raise ValueError("not now")

        puppets_of(cached.engine).models = {"m": fail}
        assert (await infer(cached.engine, request(x=row(1)))).text == "not now"
        puppets_of(cached.engine).models = {"m": cached.model}
        await cached.ask(1)


async def test_an_answer_that_lacks_an_output_is_not_kept(tmp_path):
    async with Cached(tmp_path, LocalCache(1 << 20), m=CACHED + Z, e=YZ) as cached:
        answer = await infer(cached.engine, request("e", x=row(1)))  # a step may lack one
        assert [output.name for output in answer.response.outputs] == ["y"]
        assert (await infer(cached.engine, request(x=row(1)))).text == "model 'm' did not produce output 'z'"
        assert cached.model.requests == 2
        assert cached.counts("hits", "entries") == (0, 0)


async def test_a_conditional_ensemble_whose_answers_are_kept_may_lack_an_output(tmp_path):
    """Outputs may be missing as they may without a cache; a response that lacks one is not kept."""
    async with Cached(tmp_path, LocalCache(1 << 20), m=CONFIG + Z, e=YZ + "response_cache { enable: true }") as cached:
        for _ in range(2):
            answer = await infer(cached.engine, request("e", x=row(1)))
            assert [output.name for output in answer.response.outputs] == ["y"]
        assert cached.model.requests == 2
        assert cached.counts("hits", "entries") == (0, 0)


async def test_without_a_cache_nothing_is_kept(tmp_path):
    async with Cached(tmp_path, None) as cached:
        await cached.ask(1)
        await cached.ask(1)
        assert cached.model.requests == 2
        assert cached.counts("misses", "entries") == (0, 0)
        assert cached.engine.model("m").statistics().inference_stats.cache_miss.count == 0


async def test_random_questions_under_pressure(tmp_path):
    rng = random.Random(5)
    async with Cached(tmp_path, LocalCache(20 * ENTRY)) as cached:
        for _ in range(100):
            await asyncio.gather(*(cached.ask(*[rng.randrange(8)] * rng.randrange(1, 40)) for _ in range(20)))
        assert cached.counts("bytes")[0] <= 20 * ENTRY
        assert cached.counts("hits")[0] > 100
        assert cached.counts("evictions")[0] > 100


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ((), None),
        (("local,size=0",), None),
        (("local,size=1000",), LocalCache(1000)),
        (("local,size=1000,ttl=1.5",), LocalCache(1000, 1.5)),
        (("local,size=1000", "local,ttl=2"), LocalCache(1000, 2)),
        (("local,size=1000,entry=10,compare=true",), LocalCache(1000, entry=10, compare=True)),
        (("local,size=1000,compare=false",), LocalCache(1000)),
        (("redis,host=h", "redis,port=6379"), RedisCache("h", 6379)),
        (
            ("redis,host=h,port=1,user=u,password=a,b=c,db=2,socket_timeout=20,pool_size=3,ttl=60,prefix=p",),
            RedisCache("h", 1, "u", "a,b=c", 2, socket_timeout=0.02, pool_size=3, ttl=60, prefix="p"),
        ),
        (("redis,host=/run/redis.sock",), RedisCache("/run/redis.sock")),
    ],
)
def test_configurations_are_understood(entries, expected):
    assert parse_cache_config(entries, {}) == expected


def test_user_and_password_come_from_the_environment_where_options_have_none():
    environment = {"TRITONCACHE_REDIS_USERNAME": "u", "TRITONCACHE_REDIS_PASSWORD": "p"}
    assert parse_cache_config(("redis,host=h,port=1",), environment) == RedisCache("h", 1, "u", "p")
    assert parse_cache_config(("redis,host=h,port=1,user=x",), environment) == RedisCache("h", 1, "x", "p")


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        (("local",), "needs size=BYTES"),
        (("memcached,size=1",), "got 'memcached,size=1'"),
        (("local,ttl=1",), "needs size=BYTES"),
        (("local,size=-1",), "size: expected a number"),
        (("local,size=x",), "got 'x'"),
        (("local,bytes=1",), "the local cache has size, ttl, entry, compare, got 'bytes'"),
        (("local,size=1,compare=1",), "compare: expected true or false, got '1'"),
        (("local,size=1", "redis,host=h,port=1"), "expected one cache"),
        (("redis,host=h",), "needs host=HOST and port=PORT"),
        (("redis,port=6379",), "needs host=HOST and port=PORT"),
        (("redis,host=h,port=70000",), "port: expected a number of 0 to 65535, got '70000'"),
        (("redis,host=h,port=1,socket_timeout=0",), "socket_timeout: expected 1 to 60000 milliseconds"),
        (("redis,host=h,port=1,pool_size=0",), "pool_size: expected at least 1"),
        (("redis,host=h,port=1,cert=/x",), "cert and key: expected both or none"),
        (("redis,host=h,port=1,cacert=/nowhere",), "cacert: there is no file '/nowhere'"),
        (("redis,host=h,port=1,sni=x",), "the redis cache has host, port"),
    ],
)
def test_wrong_configurations_are_refused(entries, text):
    with pytest.raises(CacheConfigError, match=text):
        parse_cache_config(entries)


def test_a_password_is_never_repeated():
    with pytest.raises(CacheConfigError) as error:
        parse_cache_config(("rediss,host=h,password=geheim",))
    assert "geheim" not in str(error.value)
    assert "geheim" not in repr(RedisCache("h", 1, password="geheim"))
