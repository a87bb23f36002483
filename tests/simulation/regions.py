"""Shared memory of clients: tensors that lie in it, and what a client may do to it while the server uses it."""

from __future__ import annotations

import os
from random import Random
from typing import TYPE_CHECKING

from inferd._native.memory.shm import CUDA, SHARED, SYSTEM
from inferd_client.pb import grpc_service_pb2 as pb
from tests.simulation.gpus import MOST_OPENED
from tests.simulation.kind import SCALE
from tests.simulation.wire import Violation

if TYPE_CHECKING:
    from tests.simulation.clients import Call, Client

SLOT = 4096  # bytes for a tensor
SHIFTS = (0, 0, 0, 64, 256)  # of tensors in their slots: a GPU works in place on what is aligned
SLOTS = 32  # of a region; each is used once, so that nobody writes to what an abandoned request may read
REGIONS = 256  # of a client, one after the other, that have places of their own under the same name: what was to use
# one that is gone may come to the next
SIZE = SLOT * SLOTS * REGIONS


class Region:
    """A region of one client, under a name that its next one takes over.

    Args:
        client: whose it is.
        trusted: the server uses its contents in place.
    """

    def __init__(self, client: Client, *, trusted: bool) -> None:
        self.client = client
        self.name = f"region of {client.number}"
        self.fd = os.memfd_create(self.name)
        self.calls: list[Call] = []
        self._inputs: dict[int, int] = {}  # where they lie, by number of their requests
        self.sound = self.registered = True
        self._used = first = SLOTS * (client.regions % REGIONS)
        self._end = first + SLOTS
        client.regions += 1
        os.ftruncate(self.fd, SIZE)
        self.device = self._draw_device()
        simulation = client.simulation
        if self.device >= 0 and not simulation.graphics.open(
            simulation.regions, self.name, self.fd, SIZE, self.device, trusted=trusted
        ):
            self.device = -1
        if self.device < 0:
            simulation.regions.add_system(
                SHARED, self.name, "/" + self.name, self.fd, 0, SIZE, trusted=trusted, writable=True
            )
        place = f"on device {self.device}, " if self.device >= 0 else ""
        client.tell(f"registers {self.name}, {place}which is {'' if trusted else 'not '}trusted")

    def _draw_device(self) -> int:
        """The device on which it lies; negative: in memory of the system."""
        client, simulation = self.client, self.client.simulation
        random = Random(f"{simulation.outcome.seed} client {client.number} region {client.regions}")
        graphics = simulation.graphics
        if not simulation.on_devices or graphics.opened >= MOST_OPENED or random.random() < 0.4:
            return -1
        device = random.choice((0, 0, 1))
        if random.random() < 0.1:
            graphics.fail_to_open(simulation.regions, self.fd, SIZE, device, random)
        return device

    @property
    def has_room(self) -> bool:
        return self.sound and self._used + 2 <= self._end

    def put(self, call: Call, message: pb.ModelInferRequest, *, output: bool) -> None:
        """Have the input of a request lie here, and its output, too, if that is wanted."""
        self.calls.append(call)
        random = Random(f"{self.client.simulation.outcome.seed} call {call.number} placed")
        at = self._inputs[call.number] = self._place(random, call)
        os.pwrite(self.fd, call.x.tobytes(), at)
        del message.raw_input_contents[0]
        self._refer(message.inputs[0].parameters, at, call.x.nbytes)
        if output:
            # a model on a GPU may have its output where its input is
            is_same = call.kind.style == "gpu" and not (call.kind.reuses or call.kind.splits) and random.random() < 0.2
            call.answer_at = at if is_same else self._place(random, call)
            size = call.x.nbytes if is_same or random.random() < 0.3 else SLOT - call.answer_at % SLOT
            self._refer(message.outputs.add(name="y").parameters, call.answer_at, size)
        call.region = self

    def _place(self, random: Random, call: Call) -> int:
        """Where a tensor of a call may lie: in a slot of its own, mostly at its beginning."""
        self._used += 1
        shift = random.choice(SHIFTS)
        return SLOT * (self._used - 1) + (shift if call.x.nbytes + shift <= SLOT else 0)

    def _refer(self, parameters: object, at: int, size: int) -> None:
        parameters["shared_memory_region"].string_param = self.name  # type: ignore
        parameters["shared_memory_byte_size"].int64_param = size  # type: ignore
        parameters["shared_memory_offset"].int64_param = at  # type: ignore

    def read(self, call: Call) -> bytes:
        """The output of a request."""
        return os.pread(self.fd, call.x.nbytes, call.answer_at)

    def altered(self, call: Call) -> str:
        """A change in this region that nobody may make, now that a request is over; empty: none."""
        given = call.x.tobytes()
        at = self._inputs[call.number]
        if at != call.answer_at and os.pread(self.fd, len(given), at) != given:
            return "its input has changed"
        if self._is_written_beside(at, len(given)):
            return "something is written beside its input"
        if call.answer_at >= 0 and self._is_written_beside(call.answer_at, len(given)):
            return "something is written beside its output"
        return ""

    def _is_written_beside(self, at: int, size: int) -> bool:
        """Whether anything but this tensor is in its slot."""
        before = at % SLOT
        slot = os.pread(self.fd, SLOT, at - before)
        return bool((slot[:before] + slot[before + size :]).strip(b"\0"))

    def spoil(self, *, truncate: bool) -> None:
        """Take it away, or make it shorter, whoever uses it; memory of a device has a size that stays."""
        truncate = truncate and self.device < 0
        self.client.tell(f"{'truncates' if truncate else 'unregisters'} {self.name}")
        self.sound = False
        for call in self.calls:
            call.lost = True
            self.client.simulation.executions.excused.add(abs(int(call.x[0, 0])) // SCALE)
        if truncate:
            os.ftruncate(self.fd, 0)
        else:
            self._remove()

    def close(self) -> None:
        """The client has no use for it any more."""
        self._remove()
        os.close(self.fd)

    def _remove(self) -> None:
        simulation = self.client.simulation
        kind = SYSTEM if self.device < 0 else CUDA
        if simulation.regions.remove(SHARED, kind, self.name) != self.registered:
            raise Violation(f"{self.name} is registered: {self.registered}, and the server says something else")
        if self.registered and self.device >= 0:
            simulation.graphics.opened -= 1
        self.registered = False
