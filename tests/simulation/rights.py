"""Tokens and what they allow: who may ask which model, judged by what was drawn here; and callers kept apart."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from random import Random
from typing import TYPE_CHECKING

from inferd._native.service.tokens import GROUPS, TokenTable
from inferd.server.front.access import Access
from tests.simulation.kinds import KINDS, STEPS
from tests.simulation.questions import group_of
from tests.simulation.wire import Violation

if TYPE_CHECKING:
    from tests.simulation.clients import Call
    from tests.simulation.crowd import Refused
    from tests.simulation.questions import Question
    from tests.simulation.simulation import Simulation
    from tests.simulation.talks import Talk

SHARE = 0.12  # of simulations in which tokens are asked for
ADDRESSES = 0.12  # of simulations whose address has rules of its own
NOT_SERVED = "{} calls are not served at this address"
PERMISSION_DENIED, UNIMPLEMENTED, UNAUTHENTICATED = 7, 12, 16
PATTERNS = ("*", "*", "*a*", "p*", "*e*", "?a*", "*s", "nobody")
TEXTS = (
    "This protocol is restricted, expecting header 'triton-key'",
    "calls need a token",
    "needs a token",
    "the token is not known",
    "the token does not allow",
)
HEADER = "authorization"
KEY, SECRET = "triton-key", "open sesame"  # of Triton's restricted protocols
WRONG = ("Bearer nothing", "Basic token 1", "Bearer ", "token 1", "bearer token 1x")


@dataclass(frozen=True)
class Right:
    """The rights that a token gives."""

    groups: tuple[str, ...]
    models: tuple[str, ...] | None  # patterns; None: all

    def allows(self, model: str) -> bool:
        """Whether this model may be asked."""
        return self.may("inference", model)

    def may(self, group: str, model: str) -> bool:
        """Whether a call of this group is allowed that is about this model, or about none."""
        return group in self.groups and (
            self.models is None or not model or any(fnmatchcase(model, pattern) for pattern in self.models)
        )


class Rights:
    """The rules of a simulation.

    Attributes:
        on: there are any.
        access: what applies them; None: nothing does.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._random = random = Random(f"{simulation.outcome.seed} rights")
        # crowds have no tokens
        self.on = simulation.has("rights", SHARE, when=simulation.scale.rights and not simulation.scale.crowd)
        self.access: Access | None = None
        self._changed_ns = 0
        self._served, self._is_trusted = self._draw_address(Random(f"{simulation.outcome.seed} address"))
        self._restricted: tuple[str, ...] = ()
        self._rights: dict[str, Right] = {}  # by token; "" for what anybody may do
        self._answered: dict[tuple[str, int], set[str]] = {}  # who has answers of models that reuse them
        if not self.on:
            return
        groups = random.choice(((), ("inference",), ("statistics", "health"), GROUPS[:6]))
        self._restricted = groups if random.random() < 0.4 else ()
        self.access = Access([(self._restricted, KEY, SECRET)] if self._restricted else ())
        self._set()
        simulation.service.guard(self.access.authorizer)
        self._is_apart = random.random() < 0.5
        simulation.service.set_callers_apart(sequences=random.random() < 0.5, responses=self._is_apart)

    def _draw_address(self, random: Random) -> tuple[tuple[str, ...], bool]:
        """The groups that the server's address serves, and whether its callers need no token."""
        simulation = self._simulation
        if not simulation.has("address", ADDRESSES, when=simulation.scale.rights and not simulation.scale.crowd):
            return GROUPS, False
        served = random.sample(GROUPS, random.randint(2, len(GROUPS)))
        if random.random() < 0.9:
            served.append("inference")
        return tuple(group for group in GROUPS if group in served), random.random() < 0.4

    @property
    def refuses_overrides(self) -> bool:
        """Whether nobody may load a model with a configuration."""
        return self.on and not self._is_trusted

    @property
    def address_rules(self) -> str:
        """What the server is told of its address."""
        groups = f",groups={'+'.join(self._served)}" if self._served != GROUPS else ""
        return groups + ",tokens=off" * self._is_trusted

    def install(self) -> None:
        """Check the native calls."""
        if self.access is not None:
            self.access.authorizer.install(self._simulation.endpoint)

    def _set(self) -> None:
        """Draw who may do what, from now on."""
        assert self.access is not None
        random, table = self._random, TokenTable(self.access.authorizer.key)
        self._rights = {"": Right((), None)}
        if random.random() < 0.3:
            self._rights[""] = self._draw_right()
            table.allow_anybody(self._rights[""].groups, self._rights[""].models)
        for number in range(6):
            right = Right(GROUPS if number < 2 else ("inference", "health"), None) if number < 3 else self._draw_right()
            self._rights[f"token {number}"] = right
            table.add(f"token {number}", table.add_rights(right.groups, right.models))
        self.access.authorizer.set_tokens(table)
        self._changed_ns = self._simulation.world.now()

    def _draw_right(self) -> Right:
        random = self._random
        groups = random.choice((("inference",), ("inference", "metadata"), GROUPS, tuple(random.sample(GROUPS, 5))))
        return Right(groups, random.choice((None, tuple(random.sample(PATTERNS, 2)))))

    def change(self) -> None:
        """Others may do something else, now and then."""
        if self.on and self._random.random() < 0.1:
            self._simulation.tell("operator", "changes the tokens")
            self._set()

    # -- clients

    def headers(self, number: int, random: Random, *, steady: bool) -> tuple[tuple[str, str], ...]:
        """The credentials that client `number` shows; always the same if `steady`, as callers of sequences are."""
        if not self.on:
            return ()
        mine: tuple[tuple[str, str], ...] = ((HEADER, f"Bearer token {number % 6}"),)
        if self._restricted:
            key = ((KEY, SECRET),)
            mine += key if steady or random.random() < 0.9 else random.choice(((), key * 2, ((KEY, "other"),)))
        draw = random.random()
        if steady or draw > 0.15:
            return mine
        if draw < 0.03:
            return ()
        if draw < 0.06:
            return ((HEADER, random.choice(WRONG)),)
        return mine[:1] + mine if draw < 0.08 else ((HEADER, f"Bearer token {random.randrange(6)}"),)

    @staticmethod
    def _token(headers: tuple[tuple[str, str], ...]) -> str | None:
        """The token in these headers; None: there is none that could be one."""
        shown = [value for name, value in headers if name == HEADER]
        if not shown:
            return ""
        scheme, _, token = shown[0].partition(" ")
        return token if len(shown) == 1 and scheme.lower() == "bearer" and token else None

    def _right(self, headers: tuple[tuple[str, str], ...]) -> Right:
        token = self._token(headers)
        return self._rights.get(token, Right((), None)) if token is not None else Right((), None)

    # -- judging

    def _lacks_key(self, headers: tuple[tuple[str, str], ...], group: str) -> bool:
        """Whether calls of this group need another key than these headers have."""
        return group in self._restricted and [value for name, value in headers if name == KEY] != [SECRET]

    def may_refuse(self, call: Call | Refused | Talk, status: int, text: str, model: str | None) -> bool:
        """Whether a call may be refused so; of a stream the model is None.

        What the rules were when it was made is known; after a change it may be either.
        """
        is_told = any(part in text for part in TEXTS) or self._simulation.has_no_text(text)
        if "inference" not in self._served:
            return status == UNIMPLEMENTED and (NOT_SERVED.format("inference") in text or is_told)
        if not self.on or not is_told or self._is_trusted:
            return False
        if status not in (PERMISSION_DENIED, UNAUTHENTICATED):
            return False
        right = self._right(call.headers)
        allows = "inference" in right.groups if model is None else right.allows(model) and not call.wrong
        return not allows or self._lacks_key(call.headers, "inference") or self._changed_ns >= call.opened_ns

    def may_know(self, question: Question, model: str) -> bool | None:
        """Whether who asks this may be told of a model; None: it has changed meanwhile."""
        group = group_of(question)
        if group and group not in self._served:
            return False
        if not self.on or self._is_trusted:
            return True
        if self._changed_ns >= question.opened_ns:
            return None
        return self._right(question.headers).may(group, model) and not self._lacks_key(question.headers, group)

    def may_refuse_question(self, question: Question, status: int, text: str) -> bool:
        """Whether a question may be refused so."""
        group = group_of(question)
        if group and group not in self._served and not question.asked.head_is_wrong:
            return status == UNIMPLEMENTED and NOT_SERVED.format(group) in text
        is_denied = status in (PERMISSION_DENIED, UNAUTHENTICATED)
        if not self.on or question.asked.head_is_wrong or not is_denied or (self._is_trusted and group):
            return False
        if not group:
            return status == PERMISSION_DENIED and "this method belongs to no group" in text
        right = self._right(question.headers)
        lacks = self._lacks_key(question.headers, group)
        return lacks or not right.may(group, question.asked.model) or self._changed_ns >= question.opened_ns

    def check_question(self, question: Question) -> None:
        """A question has an answer.

        Raises:
            Violation: it was not allowed.
        """
        if self.may_know(question, question.asked.model) is False:
            raise Violation(f"{question}: '{self._token(question.headers)}' may not ask this, and has an answer")

    def check(self, call: Call) -> None:
        """A request has an answer: it was allowed to ask; and what others had asked was executed for it again.

        Raises:
            Violation: it was not.
        """
        if "inference" not in self._served:
            raise Violation(f"{call}: inference is not served at this address, and it has an answer")
        if not self.on or self._is_trusted:
            return
        if not self._right(call.headers).allows(call.kind.name) and self._changed_ns < call.opened_ns:
            raise Violation(f"{call}: '{self._token(call.headers)}' may not ask this model, and has an answer")
        if self._lacks_key(call.headers, "inference"):
            raise Violation(f"{call}: it has not the key that such calls need, and has an answer")
        token = self._token(call.headers)
        if not self._is_apart or not token or call.lost or self._simulation.is_faulty:
            return
        if list(call.wanted) != call.kind.outputs(call.question):
            return  # a step that nobody needs is not executed
        for name in STEPS[call.kind.name]:
            if KINDS[name].reuses and KINDS[name].is_seen and not (KINDS[name].text or KINDS[name].ragged):
                callers = self._answered.setdefault((name, call.question), set())
                callers.add(token)
                executed = self._simulation.executions.questions.get((name, call.question), 0)
                if executed < len(callers):
                    who = f"{len(callers)} callers, each kept apart"
                    raise Violation(f"{call}: {who}, have answers of '{name}', which it has given {executed} times")
