"""Metrics of models' own against a plain model of them: who shares, what is counted, what goes when."""

import math

from hypothesis import given
from hypothesis import strategies as st

from inferd.server.engine.models.measures import MOST, Measures

USERS = st.sampled_from(["u", "v"])
LABELS = st.sampled_from([{}, {"a": "1"}])
STEPS = st.one_of(
    st.tuples(st.just("make"), USERS, LABELS),
    st.tuples(st.just("increment"), USERS, LABELS, st.integers(0, 9)),
    st.tuples(st.just("drop"), USERS, LABELS),
    st.tuples(st.just("release"), USERS),
)


def make(measures, user, labels, kind="counter", name="f", buckets=()):
    measures.change(user, {"op": "family", "family": name, "description": "", "kind": kind})
    measures.change(user, {"op": "metric", "family": name, "kind": kind, "labels": labels, "buckets": buckets})


def drop(measures, user, labels, kind="counter", name="f"):
    measures.change(user, {"op": "delete_metric", "family": name, "kind": kind, "labels": labels})
    measures.change(user, {"op": "delete_family", "family": name, "kind": kind})


@given(st.lists(STEPS, max_size=30))
def test_counters_of_several_users(steps):
    measures = Measures()
    made: dict[tuple, dict[str, int]] = {}
    values: dict[tuple, int] = {}
    for what, user, *more in steps:
        key = tuple(sorted(more[0].items())) if more else ()
        held = made.get(key, {}).get(user, 0)
        if what == "make":
            make(measures, user, more[0])
            made.setdefault(key, {})[user] = held + 1
            values.setdefault(key, 0)
        elif what == "increment" and any(each.get(user) for each in made.values()) and key in values:
            measures.change(
                user, {"op": "increment", "family": "f", "kind": "counter", "labels": more[0], "value": more[1]}
            )
            values[key] += more[1]
        elif what == "drop" and held:
            drop(measures, user, more[0])
            made[key][user] -= 1
        elif what == "release":
            measures.release(user)
            for users in made.values():
                users.pop(user, None)
        for gone in [key for key, users in made.items() if not any(users.values())]:
            made.pop(gone)
            values.pop(gone)
        families = measures.snapshot()
        assert [family.name for family in families] == (["f"] if values else [])
        for family in families:
            assert {tuple(sorted(each.labels.items())): each.value for each in family.samples} == values


def test_a_histogram_counts_the_values_up_to_each_bound():
    measures = Measures()
    make(measures, "u", {}, "histogram", buckets=[1, 10])
    for value in (0.5, 1, 5, 10, 11):
        measures.change("u", {"op": "observe", "family": "f", "kind": "histogram", "labels": {}, "value": value})
    [family] = measures.snapshot()
    [sample] = family.samples
    assert sample.value == 27.5
    assert sample.buckets == ((1.0, 2), (10.0, 4), (math.inf, 5))


def test_what_cannot_be_is_logged_and_not_counted(caplog):
    measures = Measures()
    make(measures, "u", {})
    make(measures, "v", {}, "gauge")
    assert "family 'f' is a counter already" in caplog.text
    measures.change("v", {"op": "set", "family": "f", "kind": "gauge", "labels": {}, "value": 5})
    measures.change("u", {"op": "increment", "family": "f", "kind": "counter", "labels": {}, "value": "much"})
    measures.change("u", {"op": "increment"})
    measures.change("u", {"op": "increment", "family": "f", "kind": "counter", "labels": [], "value": 1})
    for bounds in ([10**400], ["x"], 1):
        make(measures, "u", {}, "histogram", "h", bounds)
    measures.change("u", {"op": "increment", "family": "nothing", "kind": "counter", "labels": {}, "value": 1})
    assert measures.value("f", {}) == 0.0


def test_a_family_that_is_refused_changes_nothing_of_the_good_one():
    """The model that makes both goes on counting, whatever it does with the refused one, and when that goes."""
    measures = Measures()
    make(measures, "u", {})
    make(measures, "u", {}, "gauge")
    measures.change("u", {"op": "set", "family": "f", "kind": "gauge", "labels": {}, "value": 5})
    drop(measures, "u", {}, "gauge")
    measures.change("u", {"op": "increment", "family": "f", "kind": "counter", "labels": {}, "value": 2})
    assert measures.value("f", {}) == 2


def test_there_is_an_end_to_them(caplog):
    measures = Measures()
    for number in range(MOST + 1):
        make(measures, "u", {"n": str(number)})
    [family] = measures.snapshot()
    assert len(family.samples) == MOST - 1, "beside the family"
    assert "is more than" in caplog.text


def test_families_without_metrics_and_buckets_are_counted_too(caplog):
    measures = Measures()
    for number in range(MOST + 1):
        measures.change("u", {"op": "family", "family": f"f{number}", "description": "", "kind": "counter"})
    assert len(measures.snapshot()) == MOST
    assert "is one more than" in caplog.text
    measures.release("u")
    bounds = list(range(MOST - 3))  # beside the family, the metric, and the bucket without a bound
    for name, buckets, kept in (("h", [*bounds, MOST], 0), ("i", bounds, 1)):
        measures.change("u", {"op": "family", "family": name, "description": "", "kind": "histogram"})
        measures.change("u", {"op": "metric", "family": name, "kind": "histogram", "labels": {}, "buckets": buckets})
        assert sum(len(each.samples) for each in measures.snapshot()) == kept
        measures.change("u", {"op": "delete_family", "family": name, "kind": "histogram"})
    make(measures, "u", {})
    assert len(measures.snapshot()) == 1, "the room that is full has none for another family"
    measures.release("u")
    make(measures, "u", {})
    assert [each.name for each in measures.snapshot()] == ["f"]
