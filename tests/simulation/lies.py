"""What workers say against the protocol, and for what they are ended then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from inferd.backends.python.worker import protocol as p

if TYPE_CHECKING:
    from random import Random

    from tests.simulation.process import Order

WORK, SIDE, CALLS = range(3)  # sockets
FAR = 1 << 40  # where no arena reaches, and a number that no request has
CREDIT = 64  # responses that a request may have on their way
ENDED_FOR = "its worker was ended because it "
OVERDUE = "an execution took longer than"
NO_HEAD = "sent a packet without a head"
UNFIT = "sent a packet that does not fit its head"
ELSEWHERE = "sent a packet that lies where it may not"
NOT_DONE = "sent neither DONE of its batch nor ALLOCATE"
NO_RESPONSE = "sent a response that cannot be read"
NO_CALL = "sent a call that cannot be read"
NOT_ITS = "released memory that it does not have"
NO_STATISTICS = "sent statistics that cannot be read"
UNREADABLE = "sent a packet that cannot be read"
OVERFLOWS = "gave back more responses of a call than it had got"
Said = tuple[int, list[bytes], str]  # a socket, the packets for it, and what is said of them


@dataclass(frozen=True)
class Lie:
    """Packets, and what is said of them.

    Attributes:
        packets: each with its socket.
        told: one of these.
        certain: the worker is ended for them; else that depends on what the server reads first.
        flooded: the number of the request that they give more than one response; 0: there is none.
    """

    packets: tuple[tuple[int, bytes], ...]
    told: frozenset[str]
    certain: bool = True
    flooded: int = 0


def packet(
    kind: int, record: bytes = b"", *, flags: int = 0, code: int = 0, number: int = 0, offset: int = 0, more: int = 0
) -> bytes:
    """A packet whose head says so many bytes more than there are."""
    return p.HEAD.pack(kind, flags, code, len(record) + more, number, offset) + record


def draw_lie(random: Random, order: Order, *, answers: bool) -> Lie:
    """One of all.

    Args:
        random: says which.
        order: what the worker has been told to execute, and has not answered.
        answers: DONE has the answers, where the worker goes on.
    """
    if random.random() < 0.2:
        return _doubtful(random, order, answers=answers)
    [[socket, packets, told]] = random.choices([*_of_work(random, order), *_of_side(random, order), *_of_calls(random)])
    return Lie(tuple((socket, each) for each in packets), frozenset({told}))


def _of_work(random: Random, order: Order) -> list[Said]:
    number = order.number
    return [
        (WORK, [packet(p.DONE, number=number)[: random.choice((1, p.HEAD.size - 1))]], NOT_DONE),
        (WORK, [packet(p.DONE, number=number + random.choice((1, -1)))], NOT_DONE),
        (WORK, [packet(p.DONE, number=number, more=random.choice((1, 1 << 20)))], NOT_DONE),
        (WORK, [packet(random.choice((99, p.READY, p.FINALIZED, p.RESPONSE)), number=number)], NOT_DONE),
        (WORK, [packet(p.DONE, flags=p.IN_ARENA, number=number, offset=FAR, more=8)], ELSEWHERE),
        (WORK, [packet(p.DONE, bytes(random.randrange(p.RESPONSE_HEAD.size)), number=number)], NO_RESPONSE),
    ]


def _of_side(random: Random, order: Order) -> list[Said]:
    wire = random.choice(order.requests).wire
    final = packet(p.RESPONSE, flags=p.FINAL | p.EMPTY, number=wire)
    no_request = random.choice((0, FAR, FAR + 1))
    statistics = p.STATISTICS_RECORD.pack(0, 0, 1, 2)
    wrong_code = packet(p.STATISTICS, statistics, number=wire, code=9)
    size = p.RESPONSE_HEAD.size
    unreadable = random.choice(
        (
            bytes(random.randrange(size)),
            p.RESPONSE_HEAD.pack(random.choice((p.STATUS_RESCHEDULE + 1, 255)), 0, 0, 0, 0, size),
            p.RESPONSE_HEAD.pack(p.STATUS_OK, 0, 0, 0, 0, random.choice((0, size - 8, size + 8, 1 << 31))),
            p.RESPONSE_HEAD.pack(p.STATUS_OK, 0, random.choice((1, 9)), 0, 0, size),
            p.RESPONSE_HEAD.pack(p.STATUS_ERROR, 0, 0, random.choice((1, 1 << 31)), 0, size),
            p.RESPONSE_HEAD.pack(p.STATUS_OK, 0, 0, 0, random.choice((1, 8)), size + 8) + bytes(8),
        )
    )
    return [
        (SIDE, [packet(p.RESPONSE)[: random.choice((1, p.HEAD.size - 1))]], NO_HEAD),
        (SIDE, [packet(random.choice((p.LOG, p.RESPONSE)), more=random.choice((1, 1 << 20)))], UNFIT),
        (SIDE, [packet(random.choice((99, p.DONE, 0)))], "sent a packet of an unknown kind"),
        (SIDE, [packet(p.RESPONSE, number=no_request)], "answered a request that it was never given"),
        (SIDE, [packet(p.RESPONSE, flags=p.EMPTY, number=wire)], "sent an empty response that is not final"),
        (SIDE, [final, final], "ended a request twice"),
        (SIDE, [packet(p.RESPONSE, flags=p.IN_ARENA, number=wire, offset=FAR, more=64)], ELSEWHERE),
        (SIDE, [packet(p.LOG, flags=p.IN_ARENA, offset=FAR, more=64)], ELSEWHERE),
        (SIDE, [packet(p.RESPONSE, unreadable, number=wire)], NO_RESPONSE),
        (SIDE, [packet(p.RELEASE, offset=FAR)], NOT_ITS),
        (SIDE, [packet(p.RELEASE, number=order.number + random.choice((1, 64)))], NOT_ITS),
        (SIDE, [packet(p.FREE, offset=FAR)], "gave back memory that it does not have"),
        (SIDE, [packet(p.STATISTICS, statistics[:-1], number=wire)], NO_STATISTICS),
        (SIDE, [wrong_code], NO_STATISTICS),
        (SIDE, [packet(p.METRIC, random.choice((b"", b"{", b"[]", b"\xff")))], UNREADABLE),
        (SIDE, [packet(p.CALL, bytes(random.randrange(p.CALL_HEAD.size)))], UNREADABLE),
        (SIDE, [packet(p.BLS_REQUEST, bytes(p.BLS_HEAD.size - 1), number=1)], NO_CALL),
        (SIDE, [packet(p.BLS_REQUEST, bytes(p.BLS_HEAD.size))], NO_CALL),
        (SIDE, [packet(p.BLS_REQUEST, flags=p.IN_ARENA, number=1, offset=FAR, more=64)], ELSEWHERE),
    ]


def _of_calls(random: Random) -> list[Said]:
    unknown = packet(random.choice((99, p.RESPONSE)))
    return [
        (CALLS, [packet(p.BLS_CANCEL)[: random.choice((1, p.HEAD.size - 1))]], NO_HEAD),
        (CALLS, [packet(p.BLS_REQUEST, number=1, more=1)], UNFIT),
        (CALLS, [packet(p.BLS_REQUEST, flags=p.IN_ARENA, number=1)], UNFIT),
        (CALLS, [unknown], "sent a packet of an unknown kind on the socket of calls"),
        (CALLS, [packet(p.BLS_REQUEST, bytes(p.BLS_HEAD.size - 1), number=1)], NO_CALL),
        (CALLS, [packet(p.BLS_REQUEST, bytes(p.BLS_HEAD.size))], NO_CALL),
    ]


def _doubtful(random: Random, order: Order, *, answers: bool) -> Lie:
    """One that depends on what the server reads first."""
    asked = random.choice(order.requests)
    what = random.choice(("ended", "answered", "released", "flood")) if answers else "released"
    ok = p.RESPONSE_HEAD.pack(p.STATUS_OK, 0, 0, 0, 0, p.RESPONSE_HEAD.size)
    if what == "flood":
        responses = ((SIDE, packet(p.RESPONSE, ok, number=asked.wire)),) * (CREDIT + 1)
        return Lie(responses, frozenset({"sent more responses than it had credit for"}), flooded=asked.number)
    if what == "released":
        texts = {NOT_ITS, "released the memory of a batch that it had not kept"}
        return Lie(((SIDE, packet(p.RELEASE, number=order.number)),), frozenset(texts), certain=False)
    ends = what == "ended"
    response = packet(p.RESPONSE, b"" if ends else ok, flags=p.FINAL | p.EMPTY if ends else 0, number=asked.wire)
    texts = {"answered a request that its sender had ended", "answered a request that its sender had answered"}
    return Lie(((SIDE, response),), frozenset(texts), certain=False)
