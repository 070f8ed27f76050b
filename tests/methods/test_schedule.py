"""Schedules are public and piecewise constant."""

from hypothesis import given
from hypothesis import strategies as st

from fodp.options import schedule


@given(st.lists(st.integers(1, 50), min_size=1, max_size=5, unique=True), st.integers(1, 60))
def test_pieces_and_values_agree(starts, steps):
    pairs = tuple((start, 1.0 + i) for i, start in enumerate([0, *sorted(starts)]))
    spread = [value for value, count in schedule.pieces(pairs, steps) for _ in range(count)]
    assert spread == [schedule.value_at(pairs, step) for step in range(steps)]


def test_a_plain_number_holds_throughout():
    assert schedule.pieces(0.9, 7) == [(0.9, 7)]
    assert schedule.value_at(0.9, 3) == 0.9
