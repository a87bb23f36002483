"""Trials of who may do what, and of which version a request finds, against models in Python."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from inferd._native.refusal import refusal_table
from inferd._native.scheduling.queue import QueueLane
from inferd._native.service.access import glob_matches
from inferd._native.service.authorizer import Authorizer
from inferd._native.service.table import ModelTable
from inferd._native.service.tokens import GROUPS, TokenTable
from inferd.backends.api import BatchingSpec, ModelSpec, TensorSpec
from tests.simulation.tried_texts import expect, result_of
from tests.simulation.wire import Violation

if TYPE_CHECKING:
    from collections.abc import Sequence

# -- patterns of names

LETTERS = "ab*?"


def try_patterns(random: Random) -> None:
    """A pattern matches the names that a regular expression does."""
    for _ in range(20):
        pattern = "".join(random.choices(LETTERS, k=random.randrange(7)))
        name = "".join(random.choices("abä", k=random.randrange(7)))
        expect(glob_matches(pattern, name), matches(pattern, name), f"whether {pattern!r} matches {name!r}")


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern with * and ? matches all of a name; ? is one byte."""
    parts = {"*": b".*", "?": b"."}
    expression = b"".join(parts.get(letter, re.escape(letter.encode())) for letter in pattern)
    return re.fullmatch(expression, name.encode(), re.DOTALL) is not None


# -- tokens

LONGEST = 256  # bytes of a token
MOST_FIELDS = 16  # headers of a call that are looked at
MOST_NOTES = 16
TRUSTED = 2  # the number of callers that need no token
MODELS = ("alpha", "beta", "a", "", "gamma-delta")
PATTERNS = ("*", "a*", "beta", "?", "*delta", "b??a")
NO_TOKEN = "{} calls need a token: expecting header 'authorization: Bearer <token>'"
UNKNOWN = "the token is not known: expecting one header 'authorization: Bearer <token>'"
WRONG_GROUP = "the token does not allow {} calls"
RESTRICTED = "This protocol is restricted, expecting header '{}'"
NEEDS = "{} a token: expecting header 'authorization: Bearer <token>'"


@dataclass(frozen=True)
class Right:
    """What a token allows."""

    groups: tuple[str, ...]
    models: tuple[str, ...] | None
    overrides: bool


@dataclass
class Rules:
    """Those of a server, as its operator has written them."""

    restrictions: list[tuple[tuple[str, ...], str, str]]
    overrides: bool
    rights: dict[str, Right] | None = None  # by token
    anybody: Right = Right((), None, False)
    numbers: dict[str, int] = field(default_factory=dict)  # of callers, by token

    def refused(self, name: str, text: str) -> tuple[int, str, int]:
        """The answer to who is refused for this reason."""
        table = refusal_table()
        number = next(number for number, row in enumerate(table, 1) if row[0] == name)
        return table[number - 1][1], text, number

    def head(self, group: str, metadata: Sequence[tuple[str, str]]) -> tuple[tuple[int, str, int], str]:
        """The answer to a call with these headers, and its token."""
        wanted = {header for groups, header, _ in self.restrictions if group in groups}
        wanted |= {"authorization"} if self.rights is not None else set()
        kept = [(name, value) for name, value in metadata if name in wanted]
        unknown = self.refused("UNKNOWN_CALLER", UNKNOWN)
        if len(kept) > MOST_FIELDS:
            return unknown, ""
        for groups, header, value in self.restrictions:
            if group in groups and [shown for name, shown in kept if name == header] != [value]:
                first = next(each[1] for each in self.restrictions if group in each[0])
                return self.refused("UNKNOWN_CALLER", RESTRICTED.format(first)), ""
        if self.rights is None:
            return (0, "", 0), ""
        shown = [value for name, value in kept if name == "authorization"]
        if not shown:
            allowed = group in self.anybody.groups
            return ((0, "", 0) if allowed else self.refused("UNKNOWN_CALLER", NO_TOKEN.format(group))), ""
        scheme, token = shown[0][:7], shown[0][7:]
        if len(shown) > 1 or scheme.lower() != "bearer " or token not in self.rights:
            return unknown, ""
        if group not in self.rights[token].groups:
            return self.refused("NOT_ALLOWED", WRONG_GROUP.format(group)), token
        return (0, "", 0), token

    def _right(self, token: str) -> Right | None:
        assert self.rights is not None
        return self.rights.get(token) if token else self.anybody

    def message(self, token: str, group: str, model: str) -> tuple[int, str, int]:
        """The answer to a message of a caller with this token, or with none."""
        if self.rights is None:
            return (0, "", 0)
        right = self._right(token)
        if right is None:
            return self.refused("UNKNOWN_CALLER", UNKNOWN)
        if group not in right.groups:
            name, text = ("NOT_ALLOWED", WRONG_GROUP) if token else ("UNKNOWN_CALLER", NO_TOKEN)
            return self.refused(name, text.format(group))
        if right.models is None or not model or any(matches(each, model) for each in right.models):
            return (0, "", 0)
        if token:
            return self.refused("NOT_ALLOWED", f"the token does not allow model '{model}'")
        return self.refused("UNKNOWN_CALLER", NEEDS.format(f"model '{model}' needs"))

    def every_model(self, token: str) -> tuple[int, str, int]:
        """The answer to what concerns all models."""
        if self.rights is None:
            return (0, "", 0)
        right = self._right(token)
        if right is None:
            return self.refused("UNKNOWN_CALLER", UNKNOWN)
        if right.models is None or "*" in right.models:
            return (0, "", 0)
        if token:
            text = "the token does not allow what concerns all models: expecting one without 'models='"
            return self.refused("NOT_ALLOWED", text)
        return self.refused("UNKNOWN_CALLER", NEEDS.format("what concerns all models needs"))

    def override(self, token: str) -> tuple[int, str, int]:
        """The answer to a load with a configuration of its own."""
        what = "loads with a configuration or files of their own"
        if self.rights is None:
            text = f"{what} are off: expecting --model-load-overrides"
            return (0, "", 0) if self.overrides else self.refused("NOT_ALLOWED", text)
        right = self._right(token)
        if right is not None and right.overrides:
            return (0, "", 0)
        if token:
            text = f"the token does not allow {what}: expecting the right 'overrides'"
            return self.refused("NOT_ALLOWED", text)
        text = f"{what} need a token with the right 'overrides': "
        return self.refused("UNKNOWN_CALLER", f"{text}expecting header 'authorization: Bearer <token>'")


def try_access(random: Random) -> None:
    """Callers may do what the rules say, and hear why they may not."""
    headers = ("x-key", "x-other")
    restrictions = [
        (tuple(random.sample(GROUPS, random.choice((1, 3)))), random.choice(headers), random.choice(("s", "secret")))
        for _ in range(random.choice((0, 0, 1, 2)))
    ]
    rules = Rules(restrictions, random.random() < 0.5)
    authorizer = Authorizer(restrictions, overrides=rules.overrides)
    for _ in range(random.choice((1, 2))):
        if random.random() < 0.8:
            _change(random, rules, authorizer)
        for _ in range(6):
            _ask(random, rules, authorizer)
    _note(random, authorizer)
    for wrong in ([((), "x", "")], [((), "x", "s" * (LONGEST + 1))]):
        expect(result_of(Authorizer, wrong), ValueError, f"restrictions {wrong}")


def _draw(random: Random) -> Right:
    models = random.choice((None, tuple(random.sample(PATTERNS, random.choice((0, 1, 2))))))
    return Right(tuple(random.sample(GROUPS, random.choice((1, 4, 10)))), models, random.random() < 0.5)


def _change(random: Random, rules: Rules, authorizer: Authorizer) -> None:
    """Others may do something else."""
    table = TokenTable(authorizer.key)
    rules.rights, rules.anybody = {}, Right((), None, False)
    if random.random() < 0.4:
        rules.anybody = _draw(random)
        table.allow_anybody(rules.anybody.groups, rules.anybody.models, overrides=rules.anybody.overrides)
    kinds = [_draw(random) for _ in range(random.choice((1, 5)))]
    numbers = [table.add_rights(each.groups, each.models, overrides=each.overrides) for each in kinds]
    tokens = [*(f"token {number}" for number in range(random.choice((1, 6, 150)))), "t" * random.choice((1, LONGEST))]
    for token in random.sample(tokens, random.randint(1, len(tokens))):
        which = random.randrange(len(kinds))
        expect(table.add(token, numbers[which]), True, f"whether '{token}' is new")
        rules.rights[token] = kinds[which]
    known = random.choice(list(rules.rights))
    expect(table.add(known, numbers[0]), False, f"whether '{known}' is new once more")
    expect(len(table), len(rules.rights), "the tokens of a table")
    for wrong, right in (("", 0), ("w" * (LONGEST + 1), 0), ("new", len(kinds))):
        expect(result_of(table.add, wrong, right), ValueError, f"a token of {len(wrong)} bytes with rights {right}")
    expect(result_of(TokenTable, b"short"), ValueError, "a key of five bytes")
    authorizer.set_tokens(table)


def _ask(random: Random, rules: Rules, authorizer: Authorizer) -> None:
    """One call with its messages."""
    group = random.choice(GROUPS)
    tokens = list(rules.rights or {"token 0": None})
    metadata = [("x-key", random.choice(("s", "secret", ""))), ("x-other", "secret"), ("beside", "x")]
    metadata = random.sample(metadata, random.randrange(4))
    for _ in range(random.choice((0, 1, 1, 1, 1, 2))):
        scheme = random.choice(("Bearer ", "bearer ", "BEARER ", "Bearer", "Basic  "))
        metadata.append(("authorization", scheme + random.choice((random.choice(tokens), "another", "", "t" * 300))))
    if random.random() < 0.05:
        metadata += [("authorization", "Bearer x")] * (MOST_FIELDS + 1)
    random.shuffle(metadata)
    expected, token = rules.head(group, metadata)
    status, text, refusal, caller = authorizer.authorize(group, metadata)
    expect((status, text, refusal), expected, f"a call of {group} with {metadata[:4]}")
    if (caller != 0) != bool(token) or rules.numbers.setdefault(token, caller) != caller:
        raise Violation(f"'{token}' is caller {caller}, and was {rules.numbers[token]}")
    if len(set(rules.numbers.values())) != len(rules.numbers):
        raise Violation(f"several callers have one number: {rules.numbers}")
    # callers of earlier tables have messages, too
    token = random.choice(list(rules.numbers))
    caller, model = rules.numbers[token], random.choice(MODELS)
    told = f"of '{token}'"
    expect(
        authorizer.authorize_message(caller, group, model),
        rules.message(token, group, model),
        f"{group} '{model}' {told}",
    )
    expect(authorizer.authorize_every_model(caller), rules.every_model(token), f"all models, {told}")
    expect(authorizer.authorize_override(caller), rules.override(token), f"an override {told}")
    trusted = {
        authorizer.authorize_message(TRUSTED, group, model),
        authorizer.authorize_every_model(TRUSTED),
        authorizer.authorize_override(TRUSTED),
    }
    expect(trusted, {(0, "", 0)}, "what a trusted caller may do")


def _note(random: Random, authorizer: Authorizer) -> None:
    """Refusals are noted, each kind with its number, and the kinds beyond some only counted."""
    authorizer.take_notes()
    heard = []
    authorizer.on_note = partial(heard.append, None)
    told: Counter[tuple[str, str, str]] = Counter()
    left_out, count = 0, random.choice((0, 3, 60))
    for _ in range(count):
        peer, user = f"peer {random.randrange(1 + count // 2)}", random.choice((-1, 0))
        authorizer.note(peer, "method", "text", user)
        key = (peer if user < 0 else f"{peer} user {user}", "method", "text")
        if key in told or len(told) < MOST_NOTES:
            told[key] += 1
        else:
            left_out += 1
    expect(len(heard), count, "notes that were heard of")
    expect(authorizer.take_notes(), (dict(told), left_out), "notes")
    expect(authorizer.take_notes(), ({}, 0), "notes after they were taken")
    authorizer.on_note = None


# -- versions

SPEC = ModelSpec(
    "m",
    "identity",
    max_batch_size=8,
    inputs=(TensorSpec("INPUT", "UINT8", (-1,)),),
    outputs=(TensorSpec("OUTPUT", "UINT8", (-1,)),),
    batching=BatchingSpec(),
)
INVALID, NOT_FOUND, UNAVAILABLE = 3, 5, 14
VERSIONS = ("", "1", "2", "3", "9", "-1", "-", "0", "-5", "01", "new", "old", "x1", "1x", "1" * 18, "1" * 19)
UNFIT = "invalid model version specified: '{}', version should be an integral value > 0"
NO_NUMBER = "failed to get model version from specified version string '{}' (details: stol), version should be an "
LEAVES = "is unloading: only requests of sequences that have begun on it are served"


@dataclass
class Entry:
    """What there is of a model."""

    versions: dict[int, bool]  # which are ready
    departing: list[int]
    labels: dict[str, int]

    @property
    def is_served(self) -> bool:
        return any(self.versions.values())


def try_versions(random: Random) -> None:
    """Requests find the version that they name by a number or a label, or the latest that is ready."""
    table, model = ModelTable(), dict[str, Entry]()
    lanes = [QueueLane(SPEC, 1) for _ in range(2)]
    names = [f"model {number}" for number in range(random.choice((2, 40)))]
    for _ in range(random.choice((4, 4, 60))):
        name = random.choice(names)
        if random.random() < 0.2:
            table.remove(name)
            model.pop(name, None)
        else:
            numbers = random.sample((1, 2, 3), random.randrange(4))
            entry = Entry({number: random.random() < 0.7 for number in numbers}, [], {})
            if random.random() < 0.3:
                entry.departing = random.sample((1, 2, 3), random.choice((1, 2)))
            if random.random() < 0.4:
                entry.labels = {label: random.choice((1, 2)) for label in random.sample(("new", "old"), 1)}
            ready = {number: random.choice(lanes) if good else None for number, good in entry.versions.items()}
            departing = [(number, random.choice(lanes)) for number in entry.departing]
            table.set(name, ready, departing, list(entry.labels.items()))
            model[name] = entry
        for _ in range(3):
            name, version = random.choice((*names, "nowhere")), random.choice(VERSIONS)
            expect(table.find(name, version), found_of(model.get(name), name, version), f"'{name}' version '{version}'")
    expect([lane.in_flight for lane in lanes], [0, 0], "requests under way")
    for lane in lanes:
        lane.close()


def found_of(entry: Entry | None, name: str, version: str) -> tuple[int, str]:
    """How a request for this version ends."""
    number = -1
    if re.fullmatch(r"-?[0-9]{1,18}", version):
        number = int(version)
        if number <= 0 and number != -1:
            return INVALID, UNFIT.format(version)
    elif version and entry is not None and version in entry.labels:
        number = entry.labels[version]
    elif version and entry is not None and entry.is_served:
        more = ", or a version label of the model" * bool(entry.labels)
        return INVALID, f"{NO_NUMBER.format(version)}integral value > 0{more}"
    known = entry.versions if entry is not None else {}
    if entry is not None and (entry.is_served if number == -1 else known.get(number)):
        return 0, ""
    if entry is not None and entry.departing and (number == -1 or number in entry.departing):
        return UNAVAILABLE, f"Request for unknown model: '{name}' {LEAVES}"
    if entry is None:
        return NOT_FOUND, f"Request for unknown model: '{name}' is not found"
    if number == -1:
        return NOT_FOUND, f"Request for unknown model: '{name}' has no available versions"
    is_known = number in known
    what = "at ready state" if is_known else "found"
    return (
        UNAVAILABLE if is_known else NOT_FOUND,
        f"Request for unknown model: '{name}' version {number} is not {what}",
    )
