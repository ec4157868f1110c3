"""The time to think, from a trace's own times."""

import pytest

from canopy_lab.trace.record import TraceRequest
from canopy_lab.trace.sessions import turn_links


@pytest.mark.parametrize(
    ("think_s", "answer_s", "expected_s"), [(3.0, 6.0, 3.0), (None, 6.0, 4.0), (None, None, 10.0)]
)
def test_without_a_time_to_think_the_answers_own_time_is_no_part_of_the_gap(
    think_s: float | None, answer_s: float | None, expected_s: float
) -> None:
    first_turn = TraceRequest(0.0, 1, 1, (), 1, conversation="c", answer_s=answer_s)
    second_turn = TraceRequest(10.0, 1, 1, (), 1, conversation="c", think_s=think_s)
    assert turn_links([first_turn, second_turn]).think_s == [0.0, expected_s]


def test_an_answer_that_ran_into_the_next_turn_leaves_no_time_to_think() -> None:
    first_turn = TraceRequest(0.0, 1, 1, (), 1, conversation="c", answer_s=20.0)
    second_turn = TraceRequest(10.0, 1, 1, (), 1, conversation="c")
    assert turn_links([first_turn, second_turn]).think_s == [0.0, 0.0]
