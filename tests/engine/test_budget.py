"""The decisions of the memory budget, against a world of models in which loads fail or hang and clients interfere."""

from __future__ import annotations

from collections.abc import Mapping

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inferd.server.engine.loading.budget import AHEAD, Budget, Decision, Resident, Stay

MODELS = ["a", "b", "c", "d", "e"]
STEPS = {"E": {"a", "b"}, "F": {"b", "c"}, "G": {"E", "d"}, "H": {"c"}}
NAMES = [*MODELS, *STEPS]


def closure(name: str) -> set[str]:
    return {name}.union(*(closure(step) for step in STEPS.get(name, ())))


class World(RuleBasedStateMachine):
    """Loads, ends and clients in any order: the budget holds, what fits is neither refused nor waits for ever."""

    @initialize(limit=st.integers(3, 12), sizes=st.lists(st.integers(0, 5), min_size=9, max_size=9), data=st.data())
    def begin(self, limit: int, sizes: list[int], data: st.DataObject) -> None:
        self.budget = Budget(limit)
        self.sizes = dict(zip(NAMES, sizes, strict=True))
        pinned = data.draw(st.sampled_from(["", *NAMES]))
        self.pinned = closure(pinned) if pinned else set()
        if self.total(self.pinned) > limit:
            self.pinned = set()
        self.pin = pinned if self.pinned else ""
        self.loaded: dict[str, int] = {name: self.sizes[name] for name in self.pinned}
        self.ending: dict[str, list[int]] = {}  # withdrawn by hand: not found any more, in memory
        self.live: set[str] = set()  # with sequences
        self.stamps: dict[str, int] = {}
        self.now = 0
        self.hands = 0  # keys of loads by hand
        self.refused: set[str] = set()
        self.beyond = False  # something was late

    def total(self, names: set[str]) -> int:
        return sum(self.sizes[name] for name in names)

    def residents(self) -> dict[str, Resident]:
        def stay(name: str) -> Stay:
            return Stay.PINNED if name == self.pin else Stay.FOR_NOW if name in self.live else Stay.MAY_LEAVE

        return {name: Resident(size, frozenset(STEPS.get(name, ())), stay(name)) for name, size in self.loaded.items()}

    def look(self) -> Decision:
        decision = self.budget.look(self.residents(), lambda name: (False, self.stamps.get(name, 0)))
        for key in decision.refuse:
            name = key if isinstance(key, str) else key[1]
            assert self.total(self.pinned | closure(name)) > self.budget.limit, "refused although it fits"
        for key in decision.ready:
            assert key in self.loaded
        for key in decision.begin:
            name = key if isinstance(key, str) else key[1]
            assert not any(each in self.budget.leaving and not self.budget.leaving[each].late for each in closure(name))
        return decision

    def key_of(self, name: str) -> object:
        return name

    # -- clients --

    @rule(name=st.sampled_from(NAMES))
    def ask(self, name: str) -> None:
        if name in self.loaded:
            if name not in self.budget.leaving:
                self.use(name)
            return
        if name not in self.budget.waiting and name not in self.budget.running:
            self.budget.claim(name, {each: self.sizes[each] for each in closure(name)}, asked=name)
        self.look()

    def use(self, name: str) -> None:
        self.now += 1
        for each in closure(name):
            self.stamps[each] = self.now

    @rule(name=st.sampled_from(NAMES))
    def load_by_hand(self, name: str) -> None:
        self.hands += 1
        self.budget.claim(
            (self.hands, name), {each: self.sizes[each] for each in closure(name)}, asked=name, reloads=True
        )
        self.look()

    @precondition(lambda self: self.loaded)
    @rule(data=st.data())
    def unload_by_hand(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.loaded)))
        group = [name, *(user for user in STEPS if name in closure(user))]
        if name in self.pinned or any(each in claim.sizes for claim in self.budget.running.values() for each in group):
            return  # a running load has the models' lock
        for each in group:
            if each in self.loaded:
                self.ending.setdefault(each, []).append(self.loaded[each])
                self.budget.leave(each, self.loaded.pop(each))
                self.live.discard(each)
        self.look()

    @precondition(lambda self: self.ending)
    @rule(data=st.data())
    def end_by_hand(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.ending)))
        self.ending[name].pop()
        if not self.ending[name]:
            del self.ending[name]
        self.budget.left(name)
        self.look()

    @precondition(lambda self: self.budget.waiting)
    @rule(data=st.data())
    def stop_waiting(self, data: st.DataObject) -> None:
        self.budget.end(data.draw(st.sampled_from(list(self.budget.waiting))))
        self.look()

    @rule(name=st.sampled_from(MODELS))
    def sequences(self, name: str) -> None:
        if name in self.live:
            self.live.remove(name)
            self.look()
        elif name in self.loaded:
            self.live.add(name)

    @rule(name=st.sampled_from(NAMES), size=st.integers(0, 5))
    def change(self, name: str, size: int) -> None:
        if name not in self.pinned and not any(name in claim.sizes for claim in self.claims()):
            self.sizes[name] = size

    def claims(self) -> list:
        return [*self.budget.waiting.values(), *self.budget.running.values()]

    # -- loads and ends --

    @precondition(lambda self: self.budget.running)
    @rule(data=st.data(), succeeds=st.booleans())
    def end_load(self, data: st.DataObject, succeeds: bool) -> None:
        self.finish(data.draw(st.sampled_from(list(self.budget.running))), succeeds=succeeds)

    def finish(self, key: object, *, succeeds: bool) -> None:
        name = key if isinstance(key, str) else key[1]
        if succeeds:
            for each in closure(name):
                self.loaded[each] = self.budget.running[key].sizes[each]
            self.use(name)
        self.budget.end(key)
        self.look()
        if succeeds:
            assert name not in self.budget.waiting, "it waits although its model is ready"

    def gone(self) -> list[str]:
        """The models that leave, except steps of a loaded ensemble that leaves."""
        return [
            name
            for name in self.budget.leaving
            if name not in self.ending
            and not any(name in STEPS.get(user, ()) and user in self.budget.leaving for user in self.loaded)
        ]

    @precondition(lambda self: self.gone())
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.see_out(data.draw(st.sampled_from(self.gone())))

    def see_out(self, name: str) -> None:
        if self.budget.may_leave(name, self.residents()):
            del self.loaded[name]
        self.budget.left(name)
        self.look()

    @precondition(lambda self: self.budget.leaving)
    @rule(data=st.data())
    def late(self, data: st.DataObject) -> None:
        self.beyond = True
        self.budget.late(data.draw(st.sampled_from(list(self.budget.leaving))))
        self.look()

    # -- what holds --

    @invariant()
    def the_budget_holds(self) -> None:
        if self.beyond:
            return
        found = dict(self.loaded)
        for claim in self.budget.running.values():
            for name, size in claim.sizes.items():
                found[name] = max(size, found.get(name, 0))
        ending = sum(size for sizes in self.ending.values() for size in sizes)
        assert sum(found.values()) + ending <= self.budget.limit

    @invariant()
    def what_loads_use_stays(self) -> None:
        for claim in self.budget.running.values():
            for name in claim.sizes:
                assert name not in self.budget.leaving or self.budget.leaving[name].late
        for name in self.loaded:
            assert closure(name) <= set(self.loaded), "an ensemble has lost a step"
        assert not self.pinned & set(self.budget.leaving)
        assert self.pinned <= set(self.loaded)

    def teardown(self) -> None:
        """When loads end, models leave and sequences end, everybody has been served who waits."""
        if not hasattr(self, "budget"):
            return
        self.live.clear()
        self.look()
        for _ in range(1000):
            if self.budget.running:
                self.finish(next(iter(self.budget.running)), succeeds=True)
            elif self.ending:
                name = next(iter(self.ending))
                self.ending[name].pop()
                if not self.ending[name]:
                    del self.ending[name]
                self.budget.left(name)
                self.look()
            elif gone := self.gone():
                self.see_out(gone[0])
            else:
                break
        assert not self.budget.waiting, "it waits although nothing goes on"
        assert not self.budget.running
        assert not self.budget.leaving


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


def residents(**sizes: int) -> Mapping[str, Resident]:
    return {name: Resident(size) for name, size in sizes.items()}


def test_a_later_load_goes_ahead_only_if_it_delays_none() -> None:
    """`big` waits for the load of `a`. `small` fits beside both, `wide` only until `a` has ended."""
    budget = Budget(10)
    for name, size in {"a": 5, "big": 8, "wide": 4, "small": 2}.items():
        budget.claim(name, {name: size}, asked=name)
    assert budget.look({}).begin == ["a", "small"]
    budget.end("a")
    decision = budget.look(residents(a=5))
    assert (decision.leave, decision.begin) == (["a"], [])
    budget.left("a")
    assert budget.look({}).begin == ["big"]
    budget.end("small")
    budget.end("big")
    decision = budget.look(residents(big=8, small=2), lambda name: (name == "small", 0))
    assert decision.leave == ["big"]


def test_what_is_refused_does_not_fit_beside_what_stays() -> None:
    budget = Budget(10)
    there = {"p": Resident(6, frozenset(), Stay.PINNED), "q": Resident(4)}
    budget.claim("x", {"x": 5}, asked="x")
    budget.claim("y", {"y": 4}, asked="y")
    decision = budget.look(there)
    assert decision.refuse == {"x": 1}
    assert decision.leave == ["q"]


def test_a_load_that_waits_is_told_who_has_its_room_without_its_own_models() -> None:
    budget = Budget(10)
    residents = {
        "a": Resident(4, stay=Stay.FOR_NOW),
        "b": Resident(5, stay=Stay.FOR_NOW),
        "c": Resident(1, stay=Stay.MAY_LEAVE),
    }
    budget.claim("E", {"E": 2, "a": 4}, asked="E")
    assert not budget.look(residents).begin
    assert budget.holders("E", residents) == ["b"]


def test_a_load_that_waits_for_another_is_refused_at_once_if_they_do_not_fit_together() -> None:
    """The load could not begin before the other one has ended, which waits for it."""
    budget = Budget(10)
    budget.claim("a", {"a": 6}, asked="a")
    assert budget.look({}).begin == ["a"]
    budget.claim("b", {"b": 6}, asked="b")
    assert budget.look({}, waiters={"b": ["a"]}).refuse == {"b": 2}


def test_a_load_whose_own_models_leave_no_room_is_refused_and_holds_up_no_others() -> None:
    """Guards that a loaded step counts that could not be read: the ensemble, and all after it, waited 5 minutes."""
    budget = Budget(2)
    budget.claim("E", {"E": 0, "a": 2, "b": 0}, asked="E")
    budget.claim("c", {"c": 1}, asked="c")
    decision = budget.look(residents(b=1))
    assert (decision.refuse, decision.begin) == ({"E": 1}, ["c"])


def test_a_load_for_which_a_running_one_waits_goes_ahead_of_those_that_wait_for_that_one() -> None:
    """Guards that the three do not wait in a circle, where many came before, nor does another take its room."""
    budget = Budget(4)
    budget.claim("a", {"a": 1}, asked="a")
    budget.claim("x", {"x": 1}, asked="x")
    assert budget.look({}).begin == ["a", "x"]
    for number in range(2 * AHEAD):
        budget.claim(number, {str(number): 4}, asked=str(number))
    budget.claim("b", {"b": 3}, asked="b")
    budget.claim("c", {"c": 1}, asked="c")
    assert budget.look({}, waiters={"b": ["a"]}).begin == []
    budget.end("x")
    assert budget.look({}, waiters={"b": ["a"]}).begin == ["b"]


def test_thousands_of_waiting_loads_do_not_make_a_decision_long() -> None:
    budget = Budget(1)
    for number in range(5000):
        budget.claim(number, {str(number): 1}, asked=str(number))
    assert budget.look({}).begin == [0]
    assert budget.waiting[AHEAD + 1].elders is None
