"""Guards the response cache as clients see it: two servers behind one Redis, which then goes away."""

import contextlib

import numpy as np
import pytest
import redis
import tritonclient.grpc as triton

from tests.conformance import doors
from tests.redis_servers import redis_server
from tests.waiting import look_until

CONFIG = """
backend: "identity"
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
response_cache { enable: true }
"""


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "models" / "cached" / "1").mkdir(parents=True)
    (tmp_path / "models" / "cached" / "config.pbtxt").write_text(CONFIG)
    return tmp_path / "models"


def ask(client, value):
    given = triton.InferInput("INPUT0", [1, 3], "FP32").set_data_from_numpy(np.full((1, 3), value, np.float32))
    np.testing.assert_array_equal(client.infer("cached", [given]).as_numpy("OUTPUT0"), np.full((1, 3), value))


def counts(client):
    [model] = client.get_inference_statistics("cached").model_stats
    return model.inference_stats.cache_hit.count, model.inference_stats.cache_miss.count, model.execution_count


def wait_for_entries(path, count):
    with redis.Redis(unix_socket_path=str(path)) as client:
        look_until(client.dbsize, lambda size: size >= count)


def test_servers_share_answers_and_need_no_redis(repository, tmp_path):
    with contextlib.ExitStack() as stack:
        with redis_server(tmp_path) as path:
            option = f"--cache-config=redis,host={path},socket_timeout=10000,wait_timeout=10000"
            first, second = (
                stack.enter_context(
                    triton.InferenceServerClient(
                        stack.enter_context(doors.running_server("native", repository, option)).address
                    )
                )
                for _ in range(2)
            )
            for value in range(5):
                ask(first, value)
            wait_for_entries(path, 5)
            for value in range(5):
                ask(first, value)
                ask(second, value)
            assert counts(first) == (5, 5, 5)
            assert counts(second) == (5, 0, 0)
        for value in range(5):
            ask(second, value)
        assert counts(second)[2] == 5
