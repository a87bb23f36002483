"""Headers that become parameters of requests, and what models are told of them."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from inferd._native.service.forwarding import Forwarder
from tests.simulation.wording import said_of

if TYPE_CHECKING:
    from inferd_client.pb import grpc_service_pb2 as pb
    from tests.simulation.clients import Call
    from tests.simulation.instances import Value
    from tests.simulation.simulation import Simulation

SHARE = 0.12  # of simulations that pass headers on
PATTERN = "^x-|^sequence_"
WITHHELD = "x-secret"
NAMES = ("x-colour", "x-size", WITHHELD, "y-other", "x-data-bin", "X-Colour")
VALUES = ("blue", "", "a, b", 'say "no"', "back\\slash", "v" * 100)
RESERVED = "is reserved for Triton usage"
INVALID = 3


class Forwarding:
    """What a simulation passes on.

    Attributes:
        forwarder: what does it; None: nothing is passed on.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.forwarder: Forwarder | None = None
        self._simulation = simulation
        if simulation.has("forwarding", SHARE, when=simulation.scale.forwarding):
            self.forwarder = Forwarder(PATTERN, (WITHHELD,))
            simulation.service.forward(self.forwarder)

    def install(self) -> None:
        """Pass on headers of native calls."""
        if self.forwarder is not None:
            self.forwarder.install(self._simulation.endpoint)

    def headers(self, random: Random) -> tuple[tuple[str, str], ...]:
        """What a client says beside its call."""
        if self.forwarder is None or random.random() < 0.5:
            return ()
        said = [(random.choice(NAMES[:5]), random.choice(VALUES)) for _ in range(random.randint(1, 3))]
        said = [(name, "AAAA" if name.endswith("-bin") else value) for name, value in said]
        if random.random() < 0.03:
            said.append(("sequence_id", "7"))
        return tuple(said)

    def forge(self, random: Random, message: pb.ModelInferRequest) -> None:
        """Write parameters that only headers may become, and some that resemble them."""
        if self.forwarder is not None and random.random() < 0.2:
            message.parameters[random.choice(NAMES)].string_param = "forged"

    def may_refuse(self, headers: tuple[tuple[str, str], ...], status: int, text: str) -> bool:
        """Whether a call with such headers may be refused so."""
        is_told = RESERVED in text or self._simulation.has_no_text(text)
        return status == INVALID and is_told and self.must_refuse(headers)

    def must_refuse(self, headers: tuple[tuple[str, str], ...]) -> bool:
        """Whether one of them may not be passed on."""
        return self.forwarder is not None and any(name == "sequence_id" for name, _ in headers)

    def said(self, call: Call) -> dict[str, Value]:
        """The parameters that a model is told: those of the request, and under the names of headers those alone."""
        assert call.message is not None
        own = said_of(call.message.parameters)
        if self.forwarder is None:
            return own
        own = {name: value for name, value in own.items() if not name.lower().startswith("x-")}
        passed = {
            name: value
            for name, value in call.headers
            if name.startswith("x-") and name != WITHHELD and not name.endswith("-bin")
        }
        return {**own, **passed}
