"""Calls in every order that a client and an engine can think of: what the server holds is always the sum of what its
calls hold, each call has one outcome, and each byte of an answer is its own.

A long run: INFERD_STATEFUL_EXAMPLES=2000.
"""

from __future__ import annotations

import gzip
import os
import random
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from inferd._native.memory.resource import live_counters
from inferd._native.transport.call import EVENT_CLOSED, Call
from inferd._native.transport.client import ClientUse
from inferd._native.transport.connection import Connection
from inferd._native.transport.endpoint import Endpoint
from inferd._native.transport.thread_pool import PoolThreads
from tests.native.h2peer import INFER, Clock, Lanes, Peer, framed, output

KIB = 1 << 10
LIMIT = 512 * KIB
SIZES = st.sampled_from([0, 1, 100, 5 * KIB, 70 * KIB, 200 * KIB])


@dataclass
class Sent:
    """One call of a client."""

    peer: Peer
    stream: int
    data: bytes  # of its message, in the end
    left: bytes  # what is still to be sent
    native: bool
    reset: bool = False
    sent: list[bytes] = field(default_factory=list)  # responses that its owner has given

    @property
    def answer(self):
        return self.peer.answers[self.stream]


class Calls(RuleBasedStateMachine):
    """Two clients with two connections each, native calls to an identity model and calls whose owner is the test."""

    calls = Bundle("calls")

    def __init__(self) -> None:
        super().__init__()
        self.before = live_counters()
        self.pool_threads = PoolThreads(1)
        self.pool_threads.start()
        self.lanes = Lanes()
        self.taken: dict[str, Call] = {}  # by the number in their metadata
        self.closed: set[str] = set()
        self.endpoint = Endpoint(
            self._on_call,
            max_held_bytes=LIMIT,
            pool_threads=self.pool_threads,
            native_level=1,
            receive_timeout=30.0,
            send_timeout=30.0,
            max_streams=64,
        )
        self.endpoint.clock = Clock()
        self.lanes.service.install(self.endpoint)
        self.lanes.endpoint = self.endpoint
        self.uses = [ClientUse(f"client {number}", max_bytes=None) for number in range(2)]
        self.peers = [self._peer(self.uses[number % 2]) for number in range(4)]
        self.all: list[Sent] = []

    def _peer(self, use):
        peer = Peer(self.endpoint, window=16 * KIB, reading=False)
        peer.connection.close()
        peer.connection = Connection(self.endpoint, "test", use=use)
        peer.connection.flush = lambda: None
        peer.pump()
        return peer

    def _on_call(self, call: Call) -> None:
        number = dict(call.metadata)["number"]
        self.taken[number] = call

        def on_event(kind: str) -> None:
            if kind == EVENT_CLOSED:
                assert number not in self.closed, "a call is closed once"
                self.closed.add(number)

        call.on_event = on_event

    # ---- the client ----

    @rule(target=calls, peer=st.integers(0, 3), native=st.booleans(), packed=st.booleans(), size=SIZES)
    def open(self, peer, native, packed, size):
        peer = self.peers[peer]
        if len(peer.h2.streams) and peer.h2.open_outbound_streams >= 30:
            return multiple()
        number = len(self.all)
        data = random.Random(number).randbytes(size // 2) + bytes(size - size // 2)
        message = self.lanes.request(data, str(number)) if native else data
        body = framed(gzip.compress(message), 1) if packed else framed(message)
        encoding = (("grpc-encoding", "gzip"),) if packed else ()
        metadata = (("number", str(number)), ("grpc-timeout", "100S"), ("grpc-accept-encoding", "identity"), *encoding)
        sent = Sent(peer, peer.open(INFER if native else "/test/Stream", metadata), data, body, native)
        self.all.append(sent)
        peer.pump()
        return sent

    @rule(call=calls, share=st.sampled_from([1, 6, 1000, 40 * KIB, 1 << 30]))
    def send(self, call, share):
        """A part of the message, or the rest; with the last byte the client half-closes a native call."""
        if not call.left or call.reset or call.answer.ended or call.answer.reset is not None:
            return
        part = call.left[:share]
        size = call.peer.send(call.stream, part, end=call.native and len(part) == len(call.left))
        call.left = call.left[size:]
        call.peer.pump()

    @rule(call=consumes(calls))
    def reset(self, call):
        if not call.answer.ended and call.answer.reset is None:
            call.peer.h2.reset_stream(call.stream)
            call.reset = True
            call.peer.pump()

    @rule(call=calls, size=st.sampled_from([1, 1000, 30 * KIB]))
    def take(self, call, size):
        """Let the server send so much more of the answer."""
        if call.reset or call.answer.ended or call.answer.reset is not None:
            return
        call.peer.h2.increment_flow_control_window(size, call.stream)
        call.peer.h2.increment_flow_control_window(size)
        call.peer.pump()

    @rule(peer=st.integers(0, 3))
    def hang_up(self, peer):
        self.peers[peer].close()
        for sent in self.all:
            sent.reset = sent.reset or sent.peer is self.peers[peer]
        self.peers[peer] = self._peer(self.uses[peer % 2])

    # ---- the engine ----

    def _owned(self, call):
        owned = self.taken.get(str(self.all.index(call))) if not call.native else None
        return owned if owned is not None and owned.open else None

    @rule(call=calls, size=SIZES)
    def respond(self, call, size):
        owned = self._owned(call)
        if owned is not None:
            call.sent.append(random.Random(len(call.sent)).randbytes(size))
            owned.send_message(call.sent[-1])
            self._flush()

    @rule(call=calls)
    def take_request(self, call):
        owned = self._owned(call)
        message = owned.take_message() if owned is not None else None
        if message is not None:
            assert message == call.data
            owned.hold(len(message))

    @rule(call=calls, status=st.sampled_from([0, 13]))
    def end(self, call, status):
        owned = self._owned(call)
        if owned is not None:
            owned.end(status)
            assert not owned.open
            self._flush()

    @rule()
    def settle(self):
        """Let the running requests end, and deliver their responses."""
        self.lanes.settle()
        self._flush()

    @rule()
    def inflate(self):
        """What the thread pool has done comes back, if it has done it."""
        self.endpoint.collect_jobs()
        self._flush()

    @rule(seconds=st.sampled_from([1, 20, 60]))
    def wait(self, seconds):
        self.endpoint.clock.now += seconds
        self.endpoint.expire()
        self._flush()

    def _flush(self):
        self.endpoint.flush_dirty()
        for peer in self.peers:
            peer.pump()

    # ---- what holds ----

    @invariant()
    def the_sums_agree(self):
        assert self.endpoint.ledger_agrees()
        assert self.endpoint.held == sum(self.endpoint.ledger.values())
        assert self.endpoint.held - self.endpoint.departed == sum(use.bytes_held for use in self.uses)

    @invariant()
    def the_limit_holds(self):
        self.endpoint.flush_dirty()
        assert self.endpoint.held <= LIMIT

    @invariant()
    def every_answer_is_its_own(self):
        for number, sent in enumerate(self.all):
            if sent.reset or not sent.answer.ended:
                continue
            messages = sent.answer.messages if sent.answer.status == 0 or not sent.native else []
            if sent.native:
                assert [output(message) for message in messages] == (
                    [(str(number), sent.data)] if sent.answer.status == 0 else []
                )
            else:
                assert messages == sent.sent[: len(messages)]
                assert len(messages) == len(sent.sent) or sent.answer.status != 0

    def teardown(self):
        for peer in self.peers:
            peer.close()
        self.lanes.settle()
        self.pool_threads.close()
        assert self.endpoint.held == 0
        self.taken.clear()
        self.lanes.close()
        self.all.clear()


Calls.TestCase.settings = settings(
    max_examples=int(os.environ.get("INFERD_STATEFUL_EXAMPLES", "25")),
    stateful_step_count=40,
    deadline=None,
    derandomize="INFERD_STATEFUL_EXAMPLES" not in os.environ,
    suppress_health_check=list(HealthCheck),
)
TestCalls = Calls.TestCase
