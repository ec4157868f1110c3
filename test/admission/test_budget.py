"""The session gate lets a little more in while nobody loses anything, and takes it back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_canopy.admission.budget import Budget
from sglang_canopy.admission.gate import SessionGate
from sglang_canopy.admission.settings import GateSettings
from sglang_canopy.records import Request


def turn(gate: SessionGate, name: str, number: int, time: float, found: float = 1.0) -> None:
    """A turn of ``number`` blocks, answered at once, that found this share of them."""
    path = tuple(hash((name, block)) for block in range(number))
    request = Request(time, path=path, block_tokens=10, prompt_tokens=10 * number, turn=number)
    request.conversation, request.stop = name, "tool"
    gate.arrive((name, number), request)
    assert not gate.holds((name, number))
    request.cached_tokens = round(found * 10 * number)
    gate.finish((name, number), request)


def waiting(gate: SessionGate) -> None:
    request = Request(1.0, path=(1, 2, 3), block_tokens=10, prompt_tokens=30, conversation="late")
    gate.arrive("late", request)


def full_gate() -> SessionGate:
    """Two sessions of 40 tokens under way in 100, and one of 30 that waits."""
    gate = SessionGate(GateSettings(share=1.0), 100)
    for name in "ab":
        for number in (1, 2, 3, 4):
            turn(gate, name, number, 0.0)
    waiting(gate)
    assert gate.holds("late")
    return gate


def test_a_session_that_hardly_does_not_fit_starts_once_nothing_was_lost() -> None:
    gate = full_gate()
    for number in range(8):
        assert gate.holds("late")
        turn(gate, "ab"[number % 2], 4, 2.0 + number)
        if not gate.holds("late"):
            break
    assert 100 < gate.budget_tokens <= 120
    assert not gate.holds("late")
    assert number >= 1


def test_it_keeps_waiting_where_those_under_way_lose_what_they_left() -> None:
    gate = full_gate()
    for number in range(8):
        turn(gate, "ab"[number % 2], 4, 2.0 + number, found=0.5)
    assert gate.budget_tokens == 100
    assert gate.holds("late")


def test_nothing_grows_while_nobody_waits() -> None:
    gate = SessionGate(GateSettings(share=1.0), 1000)
    for number in range(1, 20):
        turn(gate, "a", number, float(number))
    assert gate.budget_tokens == 1000


def test_a_session_that_was_not_charged_says_nothing() -> None:
    """One that was silent for so long that its memory was given away is no sign of need."""
    gate = full_gate()
    grown = gate.budget_tokens
    turn(gate, "a", 4, 2.0)
    assert gate.budget_tokens > grown
    grown = gate.budget_tokens
    for session in gate._active.values():
        session.charge = 0.0
    turn(gate, "b", 4, 3.0, found=0.0)
    assert gate.budget_tokens == grown


@given(
    st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 1000), st.booleans()), max_size=60),
    st.floats(1.0, 3.0),
)
def test_a_budget_stays_between_the_plan_and_its_bound(turns: list, most: float) -> None:
    budget = Budget(500.0, most)
    for cached, left, waited_for in turns:
        before = budget.tokens
        budget.found(cached, left, waited_for)
        assert 500.0 <= budget.tokens <= 500.0 * most + 1e-6
        if cached < left / 2:
            assert budget.tokens < before or before == 500.0
