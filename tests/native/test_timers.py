"""Guards the heap of timers against a dict: what is due comes out once, in the order of times, then as it was set."""

from hypothesis import given
from hypothesis import strategies as st

from tests.native.probe import TimersProbe

COUNT = 100

steps = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.integers(0, COUNT - 1), st.integers(0, 30)),
        st.tuples(st.just("clear"), st.integers(0, COUNT - 1)),
        st.tuples(st.just("due"), st.integers(0, 30)),
    ),
    max_size=300,
)


@given(steps)
def test_timers_are_due_in_order(history):
    probe = TimersProbe(COUNT)
    model: dict[int, tuple[int, int]] = {}  # number -> (due, when it was set)
    for moment, (what, *arguments) in enumerate(history):
        if what == "set":
            number, due = arguments
            probe.set(number, due)
            model[number] = (due, moment)
        elif what == "clear":
            probe.clear(arguments[0])
            model.pop(arguments[0], None)
        else:
            expected = sorted((n for n, (due, _) in model.items() if due <= arguments[0]), key=lambda n: model[n])
            assert probe.due(arguments[0]) == expected
            for number in expected:
                del model[number]
    assert probe.due(31) == sorted(model, key=lambda n: model[n])
