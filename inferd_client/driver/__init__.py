"""A gRPC load driver: N connections, M calls in flight on each, one thread, no Python in the loop.

    with Driver("127.0.0.1:8001", connections=4) as driver:
        report = driver.run(Fixed([request], [response]), in_flight=8, seconds=2)

The modules, in the order of a call's way:

    schedule    the calls, when they are due, which get a deadline or are reset
    loop        waits in epoll, starts calls on free slots, counts them when they have ended
    connection  one HTTP/2 connection: its socket, its session, the slots of its calls
    tally       outcomes; histogram: times
    workload    makes requests and verifies responses; `Fixed` sends given messages in turn
    sequences   makes requests of sequences: `Sequences`
    driver      all of it for Python

Everything that varies between calls derives from (seed, index), so a run can be repeated.
"""

from inferd_client._native.session import NGHTTP2
from inferd_client.driver.driver import INFER_PATH, Driver
from inferd_client.driver.sequences import Sequences
from inferd_client.driver.tally import VERDICTS
from inferd_client.driver.workload import Fixed, Workload

__all__ = ["Driver", "Fixed", "Sequences", "Workload", "INFER_PATH", "NGHTTP2", "VERDICTS"]
