"""A gRPC load driver: N connections, M calls in flight on each, one thread, no Python in the loop.

    with Driver("127.0.0.1:8001", connections=4) as driver:
        report = driver.run(Fixed([request], [answer]), in_flight=8, seconds=2)

The modules, in the order in which a call meets them:

    schedule    which calls there are, when they are due, which get a deadline or are reset
    loop        waits in epoll, starts calls on free slots, counts them when they have ended
    connection  one HTTP/2 connection: nghttp2 and its callbacks, the slots of its calls
    output      what a connection has to write, gathered for writev
    tally       what happened; histogram: how long it took
    workload    makes requests and judges answers; `Fixed` sends given messages in turn
    driver      all of it for Python

Everything that varies between calls derives from (seed, index), so a run can be repeated.
"""

from bench.driver.connection import NGHTTP2
from bench.driver.driver import INFER_PATH, Driver
from bench.driver.tally import VERDICTS
from bench.driver.workload import Fixed, Workload

__all__ = ["Driver", "Fixed", "Workload", "INFER_PATH", "NGHTTP2", "VERDICTS"]
