"""Does the simulation find faults? Plants known ones, one at a time, in a copy of the tree, and counts what is found.

    python -m tests.simulation.mutate [--seeds 600] [--only TEXT ...] [--report FILE] [--crowd CALLS]

The tree must be freshly built: only the extension that a fault is in is built anew, without optimization and with its
assertions; the others are copied as they are.
The copy lies in a temporary folder and goes at the end.

A fault is found when the simulation reports that a rule is broken or that a process has crashed. The sound tree is
tried first, by as many seeds: where it is said to break a rule, nothing can be told of faults. What cannot be planted,
compiled or run is neither found nor missed, and fails.

Some changes look like faults and are none, since nothing can tell: `why` says why not. They are left out, but for
`--all`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.copies import EACH_TAKE, USUAL, Copy
from tests.mutants.packages import module_of
from tests.simulation.workers import jobs

INSTANCES = "server/engine/instances/instances.py"


@dataclass(frozen=True)
class Fault:
    """A change of one place, where `old` stands once.

    Attributes:
        why: why nothing can be seen of it, if so.
        area: what it is a fault of.
        users: the sources that are built, where `file` is a header.
    """

    name: str
    file: str
    old: str
    new: str
    why: str = ""
    area: str = ""
    users: tuple[str, ...] = ()

    @property
    def sources(self) -> tuple[str, ...]:
        """The files that are built with the fault."""
        return self.users or (self.file,)


def fault(name: str, file: str, old: str, new: str, why: str = "") -> Fault:
    return Fault(name, f"_native/{file}.pyx", old, new, why)


def shared(name: str, file: str, old: str, new: str, why: str = "", users: tuple[str, ...] = ()) -> Fault:
    """A fault in what several I/O threads, the event loop and the thread pool share."""
    path = f"_native/{file}" if "." in file else f"_native/{file}.pyx"
    return Fault(name, path, old, new, why, "several I/O threads", tuple(f"_native/{user}.pyx" for user in users))


FAULTS = (
    # pairs of features, limits and counters
    fault(
        "what an I/O thread has executed itself is not delivered at the end of its round",
        "request/bridge",
        "    if bridge.promised:\n        bridge.promised = False\n        deliver_all(bridge)\n",
        "    bridge.promised = False\n",
    ),
    fault(
        "a rejection leaves the order of answers, and is not delivered",
        "request/bridge",
        "    if request.order_entry != NULL:\n        leave_order(request)\n    request_expired(request)\n",
        "    if request.order_entry != NULL:\n        leave_order(request)\n        return\n"
        "    request_expired(request)\n",
    ),
    fault(
        "a sequence waits for a slot as long as it takes",
        "sequences/entry",
        "    cdef int64_t longest = slots.timeout_ns\n",
        "    cdef int64_t longest = 0\n",
    ),
    fault(
        "one request more than may be is under way in a step",
        "ensembles/run",
        "(limit.running < ensemble.max_inflight and limit.first == NULL)",
        "(limit.running <= ensemble.max_inflight and limit.first == NULL)",
    ),
    fault(
        "a backlog is full with one sequence less",
        "sequences/entry",
        "slots.max_backlog and slots.backlog.count >= slots.max_backlog:",
        "slots.max_backlog and slots.backlog.count + 1 >= slots.max_backlog:",
    ),
    fault(
        "the client with least makes room",
        "shares",
        "        return share.count > other.count\n",
        "        return share.count < other.count\n",
    ),
    fault(
        "rows that leave a queue are still counted",
        "scheduling/levels",
        "    self.count -= 1\n    self.rows -= request.rows\n",
        "    self.count -= 1\n",
    ),
    fault(
        "a short wait that a request asks for is not kept to",
        "tensors/parameters",
        "        request.terms.timeout_us = max(p.integer, 0)\n",
        "        request.terms.timeout_us = 0\n",
    ),
    Fault(
        "a missing response of a decoupled model is the fault of its inputs",
        "backends/identity/_identity.pyx",
        "            request_fail(request, STATUS_RESOURCE_EXHAUSTED, NULL)\n            if response != NULL:\n",
        '            request_fail(request, STATUS_INTERNAL, format_text("the inputs are wrong"))\n'
        "            if response != NULL:\n",
    ),
    fault(
        "an answer for which there is no memory is forgotten",
        "transport/stream",
        "    if result != 0:\n        stream_cut(",
        "    if False:\n        stream_cut(",
    ),
    # several I/O threads
    shared(
        "a thread is not woken for its connections",
        "transport/io_thread",
        "        if other.waits and other.dirty.first != NULL:",
        "        if False:",
    ),
    shared(
        "a thread that is busy is taken to wait, and one that waits to be busy",
        "transport/io_thread",
        "        io.waits = False\n",
        "        io.waits = True\n",
        why="a thread that is woken once too often finds nothing to do",
    ),
    shared(
        "a connection is left while its thread is in a system call",
        "transport/sockets",
        "    if conn.in_syscall:\n        socket.dropped = True\n        return\n",
        "",
    ),
    shared(
        "a connection that was dropped in a system call stays",
        "transport/sockets",
        "    if socket.dropped or conn.stalled",
        "    if conn.stalled",
    ),
    shared(
        "the memory of a read goes while it is read to",
        "transport/direct_read",
        "cdef inline void hold(const ReadTarget *target) noexcept nogil:\n"
        "    # others may end the call to which the target belongs\n"
        "    if target.block != NULL:\n        block_share(target.block)\n",
        "cdef inline void hold(ReadTarget *target) noexcept nogil:\n    target.block = NULL\n",
    ),
    shared(
        "a connection's output is left to the first thread",
        "transport/io_thread",
        "        conn.writer = socket.io.dirty\n",
        "",
    ),
    shared(
        "others have the front no more during system calls",
        "front",
        "    if depth != 1 or load32(&threads) < 2:",
        "    if True:",
        why="it takes longer, and nothing else",
    ),
    shared(
        "a thread that waits is taken to be busy",
        "transport/io_thread",
        "        io.waits = True\n        if io.stopping",
        "        if io.stopping",
    ),
    shared(
        "threads share one list of connections with output",
        "transport/io_thread",
        "            self.more[i].dirty = &self.more[i].own\n",
        "            self.more[i].dirty = &endpoint.host.dirty\n",
    ),
    shared(
        "two threads read to one buffer",
        "transport/sockets",
        "conn_read(conn, socket.source.fd, socket.io.buffer, turn_of(",
        "conn_read(conn, socket.source.fd, (socket.io if <size_t>socket.io < <size_t>socket.io.others\n"
        "                                                    else socket.io.others).buffer, turn_of(",
    ),
    shared(
        "one thread of several is told to end",
        "transport/io_thread",
        "            io_wake(io)\n            io = io.others\n            if io == &self.io:\n                break\n",
        "            io_wake(io)\n            break\n",
    ),
    shared(
        "after a system call a thread goes on without the front",
        "front",
        "    if paused:\n        front_enter_nogil()\n",
        "    pass\n",
    ),
    shared(
        "a connection is taken to be in a system call for ever",
        "transport/stream.pxd",
        "    front_resume(paused)\n    conn.in_syscall = False\n",
        "    front_resume(paused)\n",
        users=("transport/sockets", "transport/direct_read"),
    ),
    shared(
        "a system call is over for others before its thread is back in the front",
        "transport/stream.pxd",
        "    front_resume(paused)\n    conn.in_syscall = False\n",
        "    conn.in_syscall = False\n    front_resume(paused)\n",
        users=("transport/sockets", "transport/direct_read"),
    ),
    shared(
        "a connection that goes while others are written stays among those",
        "transport/stream.pxd",
        "        if not leave_dirty(conn, &conn.writer.first):\n            leave_dirty(conn, &conn.writer.now)\n",
        "        leave_dirty(conn, &conn.writer.first)\n",
        users=("transport/io_thread", "transport/http2"),
    ),
    shared(
        "a connection that is gone still has output",
        "transport/http2",
        "    unmark_dirty(conn)\n    while",
        "    while",
    ),
    shared(
        "a connection keeps its place in the list of the first thread",
        "transport/io_thread",
        "        unmark_dirty(conn)\n        conn.writer",
        "        conn.writer",
    ),
    shared(
        "the next connection to write is read from one that has been written",
        "transport/io_thread",
        "        io.dirty.now = conn.next_dirty\n        conn.dirty = False\n        if conn.socket != NULL:\n"
        "            socket_flush(<Socket *>conn.socket)\n        conn_collected(conn)\n",
        "        conn.dirty = False\n        if conn.socket != NULL:\n"
        "            socket_flush(<Socket *>conn.socket)\n        conn_collected(conn)\n"
        "        io.dirty.now = conn.next_dirty\n",
    ),
    shared(
        "threads are woken before what their connections get meanwhile",
        "transport/io_thread",
        "    end_round(host)  # of calls that waited until their peer took output\n    wake_others(io)\n",
        "    end_round(host)  # of calls that waited until their peer took output\n",
    ),
    shared(
        "what is written is still the connection's output",
        "transport/sockets",
        "    memset(&conn.output, 0, sizeof(Output))\n    conn.output.taken = socket.writing.taken\n"
        "    paused = conn_begin_syscall(conn)\n    whole = write_out(socket, &good)\n"
        "    conn_end_syscall(conn, paused)\n"
        "    output_clear(&conn.output)  # nobody else prepares output: "
        "a head at most, whose connection has been evicted\n",
        "    paused = conn_begin_syscall(conn)\n    whole = write_out(socket, &good)\n"
        "    conn_end_syscall(conn, paused)\n",
    ),
    shared(
        "what a thread writes is not counted as unwritten",
        "transport/io_thread",
        "            size += socket.writing.size + socket.last.size",
        "            size += socket.last.size",
    ),
    shared(
        "a connection that parts during a read takes what was read",
        "transport/http2",
        "    if conn.session == NULL or conn.state >= CONN_PARTING:\n        return\n    conn.received_ns",
        "    if conn.session == NULL:\n        return\n    conn.received_ns",
    ),
    shared(
        "the thread of a connection does not hear that it was evicted",
        "transport/eviction",
        "    conn.waits_ns = 0\n    mark_dirty(conn)\n",
        "    conn.waits_ns = 0\n",
    ),
    shared(
        "objects of Python that were written are let go of by nobody",
        "transport/io_thread",
        "    if owned_waits():\n        python_post(&io.host.timers.python, &io.drained)\n",
        "    pass\n",
    ),
    shared(
        "the timer of a thread that has ended is still set",
        "transport/io_thread",
        "            timers_clear(io.host.timers, &io.objects)\n",
        "",
    ),
    # the thread pool beside them
    shared(
        "a job that runs is charged to a call that is over",
        "transport/message_compression",
        "    charge_release(task.charge)\n"
        "    charge_make(task.charge, &thread_pool.departed, task.charge.stage, task.charge.bytes)\n",
        "",
    ),
    shared(
        "a job tells a call that is over",
        "transport/message_compression",
        "    task.owner.call = NULL\n    job[0] = NULL\n",
        "    job[0] = NULL\n",
    ),
    shared(
        "a job is taken back while it runs",
        "transport/thread_pool",
        "        if job != NULL:\n            job.waits = False\n            break\n",
        "        if job != NULL:\n            break\n",
    ),
    shared(
        "no thread of the pool is woken for a job",
        "transport/thread_pool",
        "    if taken:\n        notify_one(&thread_pool.work)\n",
        "",
    ),
    shared(
        "the signal of the pool is read when its jobs have been taken",
        "transport/thread_pool",
        "    unlock(&thread_pool.guard)\n    while job != NULL:  # in the order of completion\n",
        "    unlock(&thread_pool.guard)\n    read(thread_pool.event_fd, &count, sizeof(count))\n"
        "    while job != NULL:  # in the order of completion\n",
    ),
    # versions that end while other threads have their requests
    shared(
        "a request that is led to a version does not hold it",
        "service/table",
        "    if lane != NULL:\n        fetch_add32(&lane.in_flight, 1)\n    unlock",
        "    unlock",
    ),
    shared(
        "a version goes while answers wait for their order",
        "request/bridge",
        "        fetch_add32(&(<Lane *>order.lane).in_flight, 1)\n        bridge_post(bridge, &order.callback)\n"
        "    return over\n\n\n"
        "cdef void order_callback(PostedCallback *callback) noexcept nogil:\n"
        "    cdef ResponseOrder *order = <ResponseOrder *>callback\n"
        "    cdef Lane *lane = <Lane *>order.lane\n"
        "    order.posted = False\n    deliver_due(<Bridge *>order.bridge, order)\n"
        "    fetch_add32(&lane.in_flight, -1)\n",
        "        bridge_post(bridge, &order.callback)\n"
        "    return over\n\n\n"
        "cdef void order_callback(PostedCallback *callback) noexcept nogil:\n"
        "    cdef ResponseOrder *order = <ResponseOrder *>callback\n"
        "    order.posted = False\n    deliver_due(<Bridge *>order.bridge, order)\n",
    ),
    Fault(
        "a version is freed while its answers are on their way",
        "server/engine/engine.py",
        "        await self._deliveries.until(lambda: not version.lane.in_flight)\n",
        "",
        area="several I/O threads",
    ),
    # the I/O thread, the event loop beside it, and sockets
    fault(
        "the I/O thread cannot be woken a second time",
        "transport/io_thread",
        "    read(source.fd, &count, sizeof(count))\n    io.woken = False\n",
        "    read(source.fd, &count, sizeof(count))\n",
    ),
    fault(
        "the I/O thread is not woken",
        "transport/io_thread",
        "        write(io.wakeup.fd, &one, sizeof(one))\n",
        "        pass\n",
    ),
    fault(
        "output has no room any more, although the peer reads",
        "transport/sockets",
        "        ask_for_room(socket, False)\n        mark_dirty(socket.conn)\n",
        "        ask_for_room(socket, False)\n",
    ),
    fault(
        "nobody waits until a socket has room",
        "transport/sockets",
        "        socket.full = full\n        socket_watch(socket)\n",
        "        socket.full = full\n",
    ),
    fault(
        "who has had its turn to write never has another",
        "transport/sockets",
        "            mark_dirty(conn)\n            return\n        turn -=",
        "            return\n        turn -=",
    ),
    fault(
        "a round waits although a connection has more to write",
        "transport/io_thread",
        "    io.again = io.dirty.first != NULL",
        "    io.again = False",
    ),
    fault(
        "a connection still has a socket that is left",
        "transport/sockets",
        "    conn.socket = NULL\n    socket.conn = NULL\n",
        "    socket.conn = NULL\n",
    ),
    fault(
        "a socket is freed while the round still has its events",
        "transport/sockets",
        "    socket.next = io.left\n    io.left = socket\n",
        "    free(socket)\n",
    ),
    fault(
        "a socket that is left is still watched",
        "transport/sockets",
        "    poll_remove(io.poll_fd, socket.source.fd)\n    tls_free",
        "    tls_free",
    ),
    fault(
        "the loop does not hear that a connection is lost",
        "transport/sockets",
        "    conn.news.lost = True\n    python_post(&conn.host.timers.python, &conn.news.event)\n",
        "    conn.news.lost = True\n",
    ),
    fault(
        "the end of a peer that does not read is not seen",
        "transport/sockets",
        "        conn_end_calls(socket.conn)\n",
        "        pass\n",
    ),
    fault(
        "a socket is shut before its last bytes are written",
        "transport/sockets",
        "    if socket.last.size and not output_write(&socket.last, socket.source.fd):\n"
        "        ask_for_room(socket, True)\n        return\n",
        "    output_write(&socket.last, socket.source.fd)\n",
    ),
    fault(
        "a connection is dirty for ever",
        "transport/io_thread",
        "        conn.dirty = False\n        if conn.socket",
        "        if conn.socket",
    ),
    fault(
        "connections that become dirty while others are written are lost",
        "transport/io_thread",
        "    end_round(host)  # of calls",
        "    io.dirty.first = NULL\n    end_round(host)  # of calls",
    ),
    fault(
        "a socket is never shut for writing",
        "transport/sockets",
        "    shut_writing(socket.source.fd)\n    conn_linger",
        "    conn_linger",
    ),
    fault(
        "a connection that lingers is not read",
        "transport/sockets",
        "        goes_on = discard(socket)\n",
        "        goes_on = True\n",
    ),
    fault(
        "deadlines count from the beginning of a round",
        "transport/io_thread",
        "            if i:\n                host_look(io.host)",
        "            if False:\n                host_look(io.host)",
    ),
    fault(
        "a read that a signal breaks off is the end",
        "transport/direct_read",
        "size < 0 and (errno == EAGAIN or errno == EINTR)",
        "size < 0 and errno == EAGAIN",
    ),
    fault(
        "what a socket took in part is written again",
        "transport/outgoing",
        "        if written > 0:\n            output_drop",
        "        if written == <ssize_t>offered:\n            output_drop",
    ),
    fault(
        "a piece for which there is no memory is lost",
        "transport/outgoing",
        "output.used - start):\n        return False\n    output.start = output.used\n    return True\n",
        "output.used - start):\n        output.start = output.used\n        return False\n"
        "    output.start = output.used\n    return True\n",
    ),
    fault(
        "the round of deliveries ends, and nobody is told",
        "transport/io_thread",
        "        if io.host.after != NULL:\n            io.host.after(io.host.bridge)\n",
        "",
    ),
    fault(
        "responses wake the I/O thread once",
        "request/bridge",
        "    store32(&bridge.signalled, 0)  # before the lists are read, so that later responses signal again\n",
        "",
    ),
    fault(
        "a response that comes between two looks is waited for",
        "request/bridge",
        "    store32(&bridge.signalled, 0)  # before the lists are read, so that later responses signal again\n"
        "    lock(&bridge.guard)\n"
        "    response = bridge.head\n"
        "    callback = bridge.first_callback\n"
        "    bridge.head = NULL\n"
        "    bridge.tail = NULL\n"
        "    bridge.first_callback = NULL\n"
        "    bridge.last_callback = NULL\n"
        "    unlock(&bridge.guard)\n",
        "    lock(&bridge.guard)\n"
        "    response = bridge.head\n"
        "    callback = bridge.first_callback\n"
        "    bridge.head = NULL\n"
        "    bridge.tail = NULL\n"
        "    bridge.first_callback = NULL\n"
        "    bridge.last_callback = NULL\n"
        "    unlock(&bridge.guard)\n"
        "    store32(&bridge.signalled, 0)\n",
    ),
    fault(
        "the loop is not woken by what is posted",
        "front",
        "    if fetch_add32(&events.waiting, 1) == 0 and events.fd >= 0:\n",
        "    if fetch_add32(&events.waiting, 1) == 1 and events.fd >= 0:\n",
    ),
    fault(
        "events that are posted while others run are forgotten",
        "front",
        "        if load32(&events.waiting) and events.fd >= 0:\n            write",
        "        if False:\n            write",
    ),
    fault(
        "an event is posted twice",
        "front",
        "    if event.posted:\n        return\n",
        "",
    ),
    fault(
        "an event is withdrawn, and still waited for",
        "front",
        "        list_remove(events, event)\n        fetch_add32(&events.waiting, -1)\n",
        "        list_remove(events, event)\n",
    ),
    fault(
        "an event is withdrawn, and still in its list",
        "front",
        "        event.posted = False\n        list_remove(events, event)\n",
        "        event.posted = False\n",
    ),
    fault(
        "the front is left by whoever holds it twice",
        "front",
        "    depth -= 1\n    if depth == 0:\n        leave()\n",
        "    depth -= 1\n    leave()\n",
    ),
    fault(
        "whoever gives way goes on without the front",
        "front",
        "        release()\n        wait_for_lock()\n",
        "        release()\n",
    ),
    fault(
        "a connection that is gone is told of its news",
        "transport/connection",
        "            python_withdraw(&self.endpoint.timers.timers.python, &self.conn.news.event)\n",
        "            pass\n",
    ),
    fault(
        "output that Python makes waits for other output",
        "transport/connection",
        "        if output and self.endpoint.host.wake != NULL:\n",
        "        if False:\n",
    ),
    fault(
        "an earlier timer does not move the time at which the thread looks",
        "timers",
        "    if timers.armed_ns == 0 or earliest < timers.armed_ns:\n",
        "    if timers.armed_ns == 0:\n",
    ),
    fault(
        "timers fire once",
        "timers",
        "    timers.armed_ns = 0\n    arm(timers)\n",
        "    timers.armed_ns = 0\n",
    ),
    fault(
        "an alarm rings on the I/O thread",
        "timers",
        "    python_post(alarm.python, &alarm.rung)\n",
        "    with gil:\n        (<Alarm>alarm.rung.owner).call()\n",
    ),
    fault(
        "an alarm that was set anew rings for the former time, too",
        "timers",
        "        timers_clear(&self.timers.timers, &self.state.timer)\n        python_withdraw",
        "        python_withdraw",
    ),
    fault(
        "of several messages that are compressed, one is heard of",
        "transport/thread_pool",
        "    cdef bint alone = not is_signalled(thread_pool)\n    job.following",
        "    cdef bint alone = is_signalled(thread_pool)\n    job.following",
    ),
    fault(
        "a call of which Python has not heard is closed, and told of",
        "transport/call",
        "        python_withdraw(&stream.conn.host.timers.python, &link.event)\n        free(link)\n",
        "        free(link)\n",
    ),
    fault(
        "a call is freed while Python looks at it",
        "transport/call",
        "    if link.news & NEWS_CALL:  # Python has never heard of it\n",
        "    if True:\n",
    ),
    fault(
        "a call keeps what was freed when it was closed",
        "transport/call",
        "            call.link = NULL\n            Py_DECREF(call)\n",
        "            Py_DECREF(call)\n",
    ),
    fault(
        "the end of a call is not told",
        "transport/call",
        "    note(stream, NEWS_CLOSED)\n",
        "",
    ),
    fault(
        "a charge is given back twice",
        "transport/incoming",
        "            charge_hand(&message.charge, &stream.with_handler)\n",
        "            stream.with_handler = message.charge\n            charge_release(&message.charge)\n",
    ),
    # limits, order, and what models say of themselves
    fault(
        "one request more is in flight than may be",
        "service/submission",
        "self.bridge.admitted_count >= self.max_inflight",
        "self.bridge.admitted_count > self.max_inflight",
    ),
    fault(
        "those who have shared an execution are not counted",
        "caching/coalescer",
        "        if request.response.status == STATUS_OK:\n            account_answered(request, now)\n",
        "        if request.response.status == STATUS_OK:\n            account_answered(request, now)\n"
        "            account_answered(request, now)\n",
    ),
    fault(
        "an answer that is kept never becomes too old",
        "caching/coalescer",
        "    memo.expires_ns = begin + self.ttl_ns if self.ttl_ns else 0\n",
        "    memo.expires_ns = 0\n",
    ),
    fault(
        "a batch counts twice",
        "request/statistics",
        "    counters.execution_count += 1\n",
        "    counters.execution_count += 2\n",
    ),
    fault(
        "a request that nobody waits for stays in the queue",
        "request/bridge",
        "    elif lane != NULL and lane.scheduler.remove(lane, request):\n",
        "    elif False:\n",
    ),
    fault(
        "the priority of a request is not read",
        "scheduling/queue",
        "    level[0] = level_of(&queue.levels, request.terms.priority)\n",
        "    level[0] = level_of(&queue.levels, 0)\n",
    ),
    fault(
        "the last request of a queue is served first",
        "scheduling/queue",
        "    batch = levels_cut(&queue.levels, plan.count)\n",
        "    if plan.count == 1 and queue.levels.count > 1:\n"
        "        batch = queue.levels.first\n"
        "        while batch.next != NULL:\n"
        "            batch = batch.next\n"
        "        levels_remove(&queue.levels, batch)\n"
        "    else:\n"
        "        batch = levels_cut(&queue.levels, plan.count)\n",
    ),
    # wake-ups
    fault(
        "a thread that is given a batch is not woken",
        "scheduling/waking",
        "            else:\n                ring_later(ringing, woken)\n        woken = following",
        "            else:\n                pass\n        woken = following",
    ),
    fault(
        "what a thread leaves behind is not offered to others",
        "scheduling/waking",
        "    if line.idle_count:\n"
        "        line_touch(line)  # the remaining requests may be a batch for another consumer\n",
        "",
        "beside an idle instance nothing waits but what makes no batch yet, for which there is a watcher already, or "
        "what has just been pushed, after which the loop looks in any case",
    ),
    fault(
        "nobody watches the clock for a batch that waits",
        "scheduling/dispatcher",
        "    return watch(line, wake_ns, asking, by_front, woken)\n",
        "    return woken\n",
    ),
    fault(
        "the time that a line is watched for is left behind",
        "scheduling/dispatcher",
        "        consumer.line.watcher = NULL\n        consumer.line.watched_ns = NEVER\n",
        "        consumer.line.watcher = NULL\n",
    ),
    fault(
        "who watched and got a batch is still the watcher",
        "scheduling/dispatcher",
        "        line.watcher = NULL\n        line.watched_ns = NEVER\n    consumer.watch_ns = NEVER\n",
        "        line.watcher = NULL\n    consumer.watch_ns = NEVER\n",
        "while others are idle requests come by the loop, and its timer then looks at the time that is left behind",
    ),
    fault(
        "a queue that closes wakes nobody",
        "scheduling/queue",
        "    queue.closed = True\n    line_look(&queue.line, False)\n",
        "    queue.closed = True\n    unlock(&queue.dispatcher.guard)\n",
    ),
    fault(
        "the threshold of a queue is left behind when a batch is cut",
        "scheduling/queue",
        "    queue.enough_rows = ANY_ROWS\n    queue.end_ns = NEVER\n    batch = levels_cut",
        "    queue.end_ns = NEVER\n    batch = levels_cut",
        "it counts only while an instance is idle, and whoever becomes idle plans before, which sets it",
    ),
    fault(
        "the loop is not woken when it is asleep",
        "request/bridge",
        "    if exchange32(&bridge.signalled, 1) == 0:",
        "    if exchange32(&bridge.signalled, 1) == 1:",
    ),
    fault(
        "a wake-up of the loop is used up: it looks before it says so",
        "request/bridge",
        "    store32(&bridge.signalled, 0)  # before the lists are read, so that later responses signal again\n",
        "",
    ),
    # batches
    fault(
        "a batch has one request more than planned",
        "scheduling/queue",
        "    batch = levels_cut(&queue.levels, plan.count)",
        "    batch = levels_cut(&queue.levels, plan.count + (queue.levels.count > plan.count))",
    ),
    fault(
        "a batch has one row more than the model takes",
        "scheduling/policy",
        "        if rows + request.rows > policy.max_rows:",
        "        if rows + request.rows > policy.max_rows + 1:",
    ),
    fault(
        "requests of other shapes share a batch",
        "scheduling/policy",
        "        elif not policy.uniform and not request_alike(first, request):\n            plan.why = MISFIT",
        "        elif False:\n            plan.why = MISFIT",
    ),
    fault(
        "a delay is never over",
        "scheduling/policy",
        "    if policy.delay_ns and now - self.oldest_ns >= policy.delay_ns:",
        "    if policy.delay_ns and now - self.oldest_ns >= 1000 * policy.delay_ns:",
    ),
    fault(
        "requests of a batch are gathered over each other",
        "execution/gather",
        "            memcpy(at, data.data, data.size)\n        at += data.size",
        "            memcpy(at, data.data, data.size)\n        at += data.size - (batch.count > 1)",
    ),
    fault(
        "each request of a batch gets the first one's part",
        "execution/scatter",
        "        data += part\n        size -= part\n",
        "        size -= part\n",
    ),
    # the way back
    fault(
        "the sink of a request whose deadline has passed is asked again",
        "request/bridge",
        "    request.sink = NULL\n    request_abandon(request)",
        "    request_abandon(request)",
    ),
    fault(
        "a timer is not cancelled when its request is answered",
        "request/bridge",
        "    if final:\n        timers_clear(bridge.timers, &request.timer)\n",
        "    if final:\n",
    ),
    fault(
        "the timer of a deadline is not set",
        "service/submission",
        "    if request.terms.deadline_ns or request.expires_ns:\n"
        "        bridge_watch(self.bridge, request)\n    touch",
        "    touch",
    ),
    fault(
        "answers in order come as they are ready",
        "request/bridge",
        "    if entry == NULL:\n        pass_on(bridge, response)",
        "    if True:\n        pass_on(bridge, response)",
    ),
    fault(
        "only the first of those who wait for one execution is answered",
        "caching/coalescer",
        "        bridge_deliver(bridge, &request.response)\n    memo.delivering = False",
        "        bridge_deliver(bridge, &request.response)\n        break\n    memo.delivering = False",
    ),
    fault(
        "a block that several answers share is counted once",
        "caching/coalescer",
        "        if out.block != NULL:\n            block_share(out.block)\n        if lacks",
        "        if lacks",
    ),
    fault(
        "parts of a split request are joined over each other",
        "scheduling/split",
        "            memcpy(at, part.data, part.size)\n        at += part.size",
        "            memcpy(at, part.data, part.size)\n        at += part.size // 2",
    ),
    fault(
        "a split request is answered before its last part",
        "scheduling/split",
        "    if whole.response.status == STATUS_OK and split.pending:\n        return",
        "    if whole.response.status == STATUS_OK and split.pending > 1:\n        return",
    ),
    # charges
    fault(
        "the charge of an executed request is not released",
        "transport/stream",
        "    stream.sender.status = status\n    charge_release(&stream.with_handler)",
        "    stream.sender.status = status",
    ),
    fault(
        "the charge of a request is released before it moves on",
        "transport/incoming",
        "    charge_hand(&receiver.charge, &message.charge)\n",
        "    message.charge = receiver.charge\n",
    ),
    fault(
        "a request that has ended is still counted",
        "request/bridge",
        "    if request_end(request, &(<Bridge *>request.bridge).admitted_count):\n",
        "    if request.terms.deadline_ns:\n        request.admitted = False\n"
        "    if request_end(request, &(<Bridge *>request.bridge).admitted_count):\n",
    ),
    # resources
    fault(
        "resources are granted that are not free",
        "scheduling/dispatcher",
        "        if claim.needs[i].pool.free < claim.needs[i].count:",
        "        if claim.needs[i].pool.free + 1 < claim.needs[i].count:",
    ),
    fault(
        "resources are not given back",
        "scheduling/dispatcher",
        "    if claim.held:\n        move(claim, -1)",
        "    if claim.held and claim.virtual_time % 8:\n        move(claim, -1)",
    ),
    # bytes
    fault(
        "a message that comes in pieces loses where it was",
        "transport/incoming",
        "        receiver.received += part\n        data += part",
        "        receiver.received += part\n        data += part - (receiver.received > 64 and part > 8)",
    ),
    fault(
        "what had come is not copied when the room grows",
        "transport/incoming",
        "        memcpy(<uint8_t *>more, receiver.data, receiver.received)\n",
        "        pass\n",
    ),
    fault(
        "the client is given no window for the stream",
        "transport/incoming",
        "            nghttp2_session_consume_stream(stream.conn.session, stream.id, size)\n        else:",
        "            pass\n        else:",
    ),
    fault(
        "what was written is dropped a byte too late",
        "transport/outgoing",
        "        message.offset += part\n        size -= part",
        "        message.offset += part - (part > 300)\n        size -= part",
    ),
    fault(
        "calls that are parked are never resumed",
        "transport/unary",
        "    while conn.parked.first != NULL and conn_blocked(conn) <= UNSENT_LIMIT:",
        "    while False:",
    ),
    # sequences
    fault(
        "two requests of a sequence run at the same time",
        "sequences/batch",
        "    slots_unlist(slots, sequence)\n    request = sequence_pop(sequence)",
        "    request = sequence_pop(sequence)",
    ),
    fault(
        "a sequence is never free again",
        "sequences/batch",
        "    slots_set_of(slots, sequence).running += 1",
        "    slots_set_of(slots, sequence).running += 2",
    ),
    # levels
    fault(
        "a request that is taken out still counts",
        "scheduling/levels",
        "    request_move(request, REQUEST_QUEUED, REQUEST_TAKEN)\n    self.count -= 1\n",
        "    request_move(request, REQUEST_QUEUED, REQUEST_TAKEN)\n",
    ),
    fault(
        "the last of a level is not the last any more",
        "scheduling/levels",
        "    if segment.last == request:\n        segment.last = request.previous",
        "    if False:\n        segment.last = request.previous",
    ),
    # streams
    fault(
        "a stream that may be written to again is not told",
        "transport/stream",
        "    tell_writable(stream, before)\n    return 0 if",
        "    return 0 if",
    ),
    fault(
        "what was asked on a stream that has ended stays",
        "service/ticket",
        "            bridge_abandon(request)\n        front_leave()\n",
        "        front_leave()\n",
    ),
    Fault(
        "a response that a client has taken makes no room for others",
        "backends/identity/_identity.pyx",
        "    window.out -= 1\n",
        "    pass\n",
    ),
    # sequences over reloads
    fault(
        "a sequence goes on on the version that has replaced its own",
        "service/table",
        "    if before != NULL and not begins:\n",
        "    if before != NULL and False:\n",
    ),
    fault(
        "a version that drains begins sequences",
        "service/table",
        "    if before != NULL and not begins:\n",
        "    if before != NULL:\n",
    ),
    # ensembles
    fault(
        "a model writes to memory that others read",
        "execution/gather",
        "    return data.exclusive or not (",
        "    return True or not (",
    ),
    fault(
        "the last response of a run overtakes those before it",
        "ensembles/run",
        "    cdef bint at_once = run.delivering and run.needs.sends[0]",
        "    cdef bint at_once = run.delivering",
    ),
    fault(
        "a gate is not inverted",
        "ensembles/step",
        "        if not any_is(gate, not step.inverted):",
        "        if not any_is(gate, True):",
    ),
    # states that the server keeps of sequences, and ends that it tells
    fault(
        "the state that a model gives is forgotten",
        "sequences/sequence",
        "        if sequence.states[sequence.state_count + i].present:\n            good",
        "        if False:\n            good",
    ),
    fault(
        "a sequence begins with the state that was there",
        "sequences/batch",
        "    if not request.sequence_start or states_begin(sequence, slots.plans, request.rows):",
        "    if not request.sequence_start or sequence.begun or states_begin(sequence, slots.plans, request.rows):",
    ),
    fault(
        "sequences share a batch whose states have other shapes",
        "sequences/batch",
        "    return slots.steady or states_alike(slots, a, b)",
        "    return True",
    ),
    fault(
        "a state grows beyond its memory",
        "sequences/sequence",
        "    if own == NULL or own.size < size or load32",
        "    if own == NULL or load32",
    ),
    fault(
        "a model is told twice of the end of a sequence that a cancelled START has replaced",
        "sequences/slots",
        "(sequence.begun or sequence.queue.first != NULL) and not ends_itself(sequence):",
        "(sequence.begun or sequence.queue.first != NULL):",
    ),
    fault(
        "no model is told that a sequence has become idle",
        "sequences/slots",
        "    slots_notify(slots, sequence, reason, now)\n    if sequence.running",
        "    if sequence.running",
    ),
    # rows of different lengths
    fault(
        "elements are counted for the request in front",
        "execution/supply",
        "        put_number(out, first + i, real, sum)",
        "        put_number(out, i, real, sum)",
    ),
    fault(
        "what a model gives for ragged rows is split by their number",
        "execution/scatter",
        "    if tensor.like_input:\n        model = &request.inputs[tensor.like_input - 1]\n        own =",
        "    if False:\n        model = &request.inputs[tensor.like_input - 1]\n        own =",
    ),
    fault(
        "padding is cut off where it is not",
        "execution/scatter",
        "        data += <size_t>padded * inner",
        "        data += <size_t>length * inner",
    ),
    # regions
    fault(
        "an output is not written to its region",
        "tensors/placement",
        "        memmove(to, out.data, out.size)",
        "        memmove(to, to, out.size)",
    ),
    fault(
        "an answer is made of a region that has been shortened",
        "tensors/placement",
        "        if not region_intact(placement.region):\n            response_fail",
        "        if False:\n            response_fail",
        "what a client reads after it has taken its own memory away is nobody's affair: any answer will do",
    ),
    # GPUs
    fault(
        "a model computes before its inputs are there",
        "gpu/transfer",
        "cuda.stream_wait_event(self.compute.stream, set.uploaded, 0)",
        "CUDA_OK",
    ),
    fault(
        "outputs are fetched before they are computed",
        "gpu/transfer",
        "cuda.stream_wait_event(self.copy_out.stream, set.computed, 0)",
        "CUDA_OK",
    ),
    # traces
    fault(
        "a trace tells of inputs that a refused request has not sent",
        "tensors/binding",
        "            request.inputs[index].present = False  # some of its fields are not set\n",
        "",
    ),
    fault(
        "one request too many passes before the next is traced",
        "request/record",
        "    if sampling.seen < sampling.rate:",
        "    if sampling.seen <= sampling.rate:",
    ),
    fault(
        "a request that is answered before its batch ends has no batch in its trace",
        "execution/batchlog",
        "    if batch.recorded:\n",
        "    if False:\n",
    ),
    # models that are loaded when somebody asks for them
    fault(
        "a request that has waited for its model is forgotten",
        "service/submission",
        "                submit_request(self, request)\n            else:\n",
        "                pass\n            else:\n",
    ),
    fault(
        "only the first of those who wait for a model is told that it is there",
        "service/submission",
        "        following = request.next\n        if waits_for(request, name):",
        "        following = NULL\n        if waits_for(request, name):",
    ),
    # rights, and headers that become parameters
    fault(
        "callers who are kept apart share answers",
        "service/submission",
        "    request.origin.audience = who if self.responses_apart else 0\n",
        "    request.origin.audience = 0\n",
    ),
    fault(
        "a token that allows some models allows all",
        "service/access",
        "data, model.size):\n            return ALLOWED\n    return MODEL_DENIED if",
        "data, model.size):\n            return ALLOWED\n    return ALLOWED if",
    ),
    fault(
        "a client writes parameters that models take for headers",
        "service/submission",
        "        drop_headers(self, &request.message)\n",
        "        pass\n",
    ),
    fault(
        "headers that are withheld are passed on",
        "service/forwarding",
        " and name not in self.withheld and self.finds(name)",
        " and self.finds(name)",
    ),
    # what the operator reads
    fault(
        "a bucket leaves out what is below it",
        "service/exposition",
        "        count += histogram.counts[i]\n",
        "        count = histogram.counts[i]\n",
    ),
    # worker processes
    fault(
        "a batch that the loop cannot go on with is forgotten",
        "execution/remote",
        "        self.begun = True\n        consumer_recall",
        "        consumer_recall",
    ),
    Fault(
        "a batch whose worker has ended is answered as if it had been executed",
        "backends/python/_execute.pyx",
        "        if not batch.failed:\n            fail_with_worker(channel, batch)\n",
        "        pass\n",
    ),
    Fault(
        "a response that waits for the worker to take others is forgotten",
        "backends/python/_bls_responses.pyx",
        "    while call.first_held != NULL and call.credit:\n        held = call.first_held\n",
        "    while False:\n        held = call.first_held\n",
    ),
    Fault(
        "a worker gets more responses than it has asked for",
        "backends/python/_bls_responses.pyx",
        "    if call.first_held == NULL and call.credit:\n        call.credit -= 1\n",
        "    if call.first_held == NULL:\n        call.credit -= 1 if call.credit else 0\n",
    ),
    Fault(
        "texts go to a worker as they are",
        "backends/python/_parameters.pyx",
        """        if c >= 0x20 and c != c'"' and c != c"\\\\":""",
        "        if c >= 0x20:",
    ),
    Fault(
        "a number of a worker is taken for another sort of number",
        "backends/python/_responses.pyx",
        "        if record.kind == PARAMETER_DOUBLE:",
        "        if record.kind != PARAMETER_DOUBLE:",
    ),
    Fault(
        "what a worker had promised to answer later is forgotten when it ends",
        "backends/python/_channel.pyx",
        "        finish_detached(channel, slot.request, slot.taken_ns)\n        lock(&channel.guard)\n    unlock",
        "        lock(&channel.guard)\n    unlock",
    ),
    # what attendants do, and senders of decoupled models
    Fault(
        "nobody is told of the responses that an attendant has read",
        "backends/python/_side.pyx",
        "        bridge_signal(<Bridge *>channel.unsignalled)\n",
        "",
    ),
    Fault(
        "what a worker has said before its end is not read",
        "backends/python/_attend.pyx",
        "    while poll_until(fds, PLACES, 0) > 0:\n",
        "    while False:\n",
    ),
    Fault(
        "a sender that waits for credit gets none",
        "backends/python/_slots.pyx",
        "    slot.asked = True\n",
        "    pass\n",
    ),
    Fault(
        "a sender gets credit twice for one response",
        "backends/python/_slots.pyx",
        "    slot.asked = False\n    slot.returned = 0\n    slot.credit += credit\n",
        "    slot.asked = False\n    slot.credit += credit\n",
    ),
    fault(
        "a batch leaves one behind that fits",
        "scheduling/policy",
        "        if rows + request.rows > policy.max_rows:",
        "        if rows + request.rows >= policy.max_rows:",
    ),
    fault(
        "what a compressed message had is still counted when it is inflated",
        "transport/incoming",
        "    stream.queued -= message.charge.bytes\n    if result",
        "    if result",
    ),
    # the thread pool, which compresses and inflates
    fault(
        "the pool tells nobody of messages that it has finished",
        "transport/thread_pool",
        "        alone = finish(thread_pool, job)\n",
        "        finish(thread_pool, job)\n",
    ),
    fault(
        "a message that the pool has inflated is taken for the compressed one",
        "transport/message_compression",
        "    if inflation.result == RESULT_OK:\n        take_inflated(inflation.message, &inflation.out)\n",
        "    if False:\n        take_inflated(inflation.message, &inflation.out)\n",
    ),
    # models that come and go
    Fault(
        "what an ensemble has answered stays when a step of it is replaced",
        "server/engine/models/registry.py",
        "            self._forget(ensemble.lane)  # the responses of its steps may differ now\n",
        "            pass\n",
    ),
    Fault(
        "a version that is replaced never ends",
        "server/engine/loading/load.py",
        "            endings.replaced(name, old.values(), cleanup)\n",
        "            endings.replaced(name, (), cleanup)\n",
    ),
    Fault(
        "who waits for a model whose load fails waits for ever",
        "server/engine/loading/demand.py",
        "            self._infer.resume(name, int(error.status), str(error))\n",
        "            pass\n",
    ),
    Fault(
        "a poll that finds a changed model does not load it",
        "server/engine/loading/control.py",
        "                self._try_again(await self._lifecycle.load(names))\n",
        "                pass\n",
    ),
    Fault(
        "a version that departs is not told to",
        "server/engine/loading/endings.py",
        "            version.drain()  # its successor has been published: new sequences begin there\n",
        "",
    ),
    # a request keeps its time when it becomes another
    fault(
        "what is executed in place of a request has no deadline",
        "request/request",
        "    request.terms = outer.terms\n    request.inner = True\n",
        "    request.terms = outer.terms\n    request.terms.deadline_ns = request.terms.due_ns = 0\n"
        "    request.inner = True\n",
    ),
    fault(
        "who joins a request that waits must wait as long as that may",
        "caching/coalescer",
        "    if other.due_ns and (terms.due_ns == 0 or other.due_ns < terms.due_ns):\n",
        "    if False:\n",
    ),
    fault(
        "who joins a request that was just dropped as late misses its time with it",
        "caching/coalescer",
        "    if status != STATUS_OK and is_overdue(memo.work, response, status, now):\n",
        "    if False:\n",
    ),
    # requests that are executed more than once
    fault(
        "an execution that answers nobody does not count",
        "execution/batch",
        "    execution.some = batch.handed_back > 0\n",
        "    execution.some = False\n",
    ),
    fault(
        "of a request that is executed again the last execution alone takes time",
        "execution/batch",
        "                add_phases(batch, request)\n                request.queued_ns = batch.end_ns\n",
        "                request.queued_ns = batch.end_ns\n",
    ),
    # threads that come with the first request
    Fault(
        "instances without requests have threads",
        INSTANCES,
        "        late = self._may_be_late(specs)\n",
        "        late = False\n",
    ),
    Fault(
        "the first request starts no threads",
        INSTANCES,
        "            self._lane.await_first(self._begin)\n",
        "            self._lane.await_first(lambda: None)\n",
    ),
    Fault(
        "a thread that was refused is not asked for again",
        INSTANCES,
        "        asyncio.get_running_loop().call_later(RETRY_SECONDS, self._begin)\n",
        "",
    ),
    Fault(
        "the first request starts one thread of several",
        INSTANCES,
        "                runner.thread, runner.is_late = thread, False\n",
        "                runner.thread, runner.is_late = thread, False\n                return\n",
        "requests are executed, only by fewer instances at a time",
    ),
    Fault(
        "requests of a version that closes without threads are forgotten",
        INSTANCES,
        "        if is_late:\n            self._serve(runner)\n",
        "        if is_late:\n",
    ),
)


ALONE = '{"clients": 0, "hostile": false}'


class Simulations:
    """Simulations that look for faults in a copy of the tree.

    Args:
        copy: where.
        seeds, jobs: how many, and at a time.
        crowd: calls of the crowds that look at it alone; 0: the usual clients do.
    """

    def __init__(self, copy: Copy, seeds: int, jobs: int, crowd: int) -> None:
        self.copy = copy
        usual = (*USUAL, "--seeds", str(seeds), "--jobs", str(jobs))
        self.attempts: tuple[tuple[str, ...], ...] = (usual, *EACH_TAKE)
        if crowd:
            self.attempts = ((*usual, "--crowd", str(crowd), "--scale", ALONE),)

    def run(self) -> str:
        """Run them; return what they find, empty for nothing.

        Raises:
            RuntimeError: the simulation itself does not run, so that it tells nothing.
        """
        return self.copy.simulate(*self.attempts)[0]


def trial(simulations: Simulations, fault: Fault) -> str:
    """Plant the fault; return what is found of it, empty for nothing.

    Raises:
        RuntimeError: the fault cannot be planted, or the simulation does not run with it.
    """
    copy = simulations.copy
    path = copy.root / fault.file
    sound = path.read_text()
    if sound.count(fault.old) != 1:
        raise RuntimeError(f"there are {sound.count(fault.old)} places for it in {fault.file}")
    built = [source for source in fault.sources if source.endswith(".pyx")]  # the others are Python as it is
    kept = {extension: extension.read_bytes() for source in built if (extension := copy.extension(source))}
    path.write_text(sound.replace(fault.old, fault.new))
    try:
        if built:
            copy.build_modules([module_of(source, copy.root) for source in built], INFERD_BUILD="quick")
        return simulations.run()
    finally:
        path.write_text(sound)
        for extension, content in kept.items():
            extension.unlink(missing_ok=True)
            extension.write_bytes(content)


def main() -> int:
    """0 if every fault was found."""
    parser = argparse.ArgumentParser(prog="tests.simulation.mutate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=600, help="for each fault")
    parser.add_argument("--only", default=[""], nargs="+", help="faults with one of these in their area, name or file")
    parser.add_argument("--jobs", type=int, default=jobs(), help="simulations at a time")
    parser.add_argument("--all", action="store_true", help="also what nothing can tell")
    parser.add_argument("--crowd", type=int, default=0, help="by crowds of so many calls alone, without other clients")
    parser.add_argument("--first", type=int, default=0, help="begin with this one")
    parser.add_argument("--trust", action="store_true", help="the sound tree was tried by these seeds before")
    parser.add_argument("--report", type=Path, help="write a table there")
    arguments = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="inferd-mutants-") as folder:
        simulations = Simulations(Copy(Path(folder)), arguments.seeds, arguments.jobs, arguments.crowd)
        if not arguments.trust and (found := simulations.run()):
            print(f"the sound tree breaks a rule, so that nothing can be told of faults: {found}")
            return 2
        for fault in FAULTS[arguments.first :]:
            asked = any(text in f"{fault.area} {fault.name} {fault.file}" for text in arguments.only)
            if not asked or (fault.why and not arguments.all):
                continue
            began = time.monotonic()
            found = void = ""
            try:
                found = trial(simulations, fault)
            except RuntimeError as error:
                void = str(error)
            rows.append(Row(fault, found, void, time.monotonic() - began))
            print(rows[-1], flush=True)
            if arguments.report:
                arguments.report.write_text(table(rows))
    print(verdict(rows))
    return not all(row.found or row.fault.why for row in rows)


@dataclass(frozen=True)
class Row:
    """The outcome of a fault; `void`: why its trial says nothing."""

    fault: Fault
    found: str
    void: str
    seconds: float

    @property
    def outcome(self) -> str:
        if self.void:
            return f"NOT TRIED: {self.void[-160:]}"
        if self.found:
            return self.found[:160]
        return "not found, and cannot be" if self.fault.why else "NOT FOUND"

    def __str__(self) -> str:
        return f"{self.fault.name} ({self.fault.file}): {self.outcome}, {self.seconds:.0f} s"


def verdict(rows: list[Row]) -> str:
    """How many, of those that can be told from the sound code."""
    real = [row for row in rows if not row.fault.why]
    return f"{sum(bool(row.found) for row in real)} of {len(real)} found"


def table(rows: list[Row]) -> str:
    """For people, in Markdown."""
    lines = ["| fault | in | found as |", "|---|---|---|"]
    for row in rows:
        outcome = row.outcome.replace("|", "/").replace("\n", " ")
        lines.append(f"| {row.fault.name} | `{row.fault.file}` | {outcome} |")
    return "\n".join([*lines, "", f"{verdict(rows)}.", ""])


if __name__ == "__main__":
    sys.exit(main())
