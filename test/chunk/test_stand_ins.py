"""Which documents of a tenant stand in, and when: the rule by hand, without a model."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st

from canopy_chunks import stand_ins as module
from canopy_chunks.documents import document_name
from canopy_chunks.stand_ins import (
    CANDIDATE_PROMPTS,
    LOOKS,
    MAX_PAIRS,
    MAX_TENANTS,
    REFRESH_PROMPTS,
    Prompt,
    StandIns,
)

GAP, SEPARATOR, HEAD = (7,), (8, 9), 3


def document(number: int, length: int = 20) -> tuple[int, ...]:
    return tuple(1000 * number + i for i in range(length))


def prompt(numbers, tenant=None, ratio=0.15, question=0, separator=SEPARATOR) -> Prompt:
    ids, bounds = list(range(HEAD)), []
    for number in numbers:
        part = document(number)
        bounds.append((len(ids), len(ids) + len(part)))
        ids += [*part, *separator]
    return Prompt(tenant, (*ids, 5000 + question), tuple(bounds), HEAD, ratio, "asked")


def on_trial(stand_ins: StandIns, tenant=None, first: int = 0) -> None:
    """A tenant brings as many prompts as a choice takes, two documents in all of them."""
    for i in range(CANDIDATE_PROMPTS):
        stand_ins.seen(prompt((first + 1, first + 2, first + 10 + i), tenant, question=i))


def measure(stand_ins: StandIns, figures, tenant=None, first: int = 0) -> None:
    """Prompts come and are measured: (KL behind neutral ones, behind the tenant's own) of each."""
    for i, (neutral, own) in enumerate(figures):
        stand_ins.seen(prompt((first + 50 + i, first + 51 + i), tenant, question=100 + i))
        taken = stand_ins.take()
        assert taken is not None
        stand_ins.measured(*taken, neutral, own)


WINS = [(1.0, 0.5 + 0.01 * (i % 3)) for i in range(LOOKS[0])]


def test_the_neighbours_that_come_most_often_are_tried_with_their_separator() -> None:
    stand_ins = StandIns(GAP)
    on_trial(stand_ins)
    measured, own = (stand_ins.seen(prompt((5, 6))), stand_ins.take())[1]
    assert measured == prompt((5, 6))
    assert own.tokens == document(1) + SEPARATOR + document(2) + SEPARATOR
    assert own.names == {document_name(document(i), None) for i in (1, 2)}
    assert stand_ins.in_force(None) is None


def test_documents_between_which_there_is_no_separator_end_as_neutral_ones_do() -> None:
    ids = (*range(HEAD), *document(1), 77, *document(2), 78, 79, *document(3), 80)
    bounds = ((3, 23), (24, 44), (46, 66))
    (first, second) = module.neighbours(Prompt(None, ids, bounds, HEAD, 0.15, "asked"), GAP)
    assert first.tokens == document(1) + GAP + document(2) + GAP
    assert second.tokens == document(2) + GAP + document(3) + GAP


def test_text_between_documents_that_is_no_separator_never_stands_in() -> None:
    said = tuple(range(9000, 9000 + module.MAX_GAP + 1))
    for pair in module.neighbours(prompt((1, 2, 3), separator=said), GAP):
        assert not set(said) & set(pair.tokens)
    only = module.neighbours(prompt((1, 2), separator=(9001,)), GAP)  # once is no separator
    assert 9001 not in only[0].tokens


def test_a_long_document_is_cut_and_a_document_twice_is_no_pair() -> None:
    long = document(1, 1000)
    ids = (*range(HEAD), *long, *document(2), *document(2), 1)
    at = HEAD + len(long)
    bounds = ((HEAD, at), (at, at + 20), (at + 20, at + 40))
    (pair,) = module.neighbours(Prompt(None, ids, bounds, HEAD, 0.15, "asked"), GAP)
    assert pair.tokens == long[: module.DOCUMENT_TOKENS] + GAP + document(2)


def test_they_stand_in_only_after_a_trial_that_is_surely_won() -> None:
    stand_ins = StandIns(GAP)
    on_trial(stand_ins)
    measure(stand_ins, WINS[:-1])
    assert stand_ins.in_force(None) is None
    measure(stand_ins, WINS[-1:], first=500)
    assert stand_ins.in_force(None).tokens[:20] == document(1)
    (state,) = stand_ins.stats()["tenants"]
    assert state["stand_in"] == "own"
    assert state["measured"] == LOOKS[0]
    assert state["difference"] == pytest.approx(state["kl_own"] - state["kl_neutral"], abs=2e-6)


@pytest.mark.parametrize(
    ("figures", "prompts"),
    [
        ([(0.5, 1.0 + 0.01 * (i % 3)) for i in range(99)], LOOKS[0]),  # surely worse: at once
        ([(0.5, 0.5)] * 99, LOOKS[-1]),  # no difference
        ([(1.0, 0.9 if i % 2 else 1.08) for i in range(99)], LOOKS[-1]),  # a little, not surely
    ],
)
def test_a_trial_that_is_not_won_is_lost_and_others_are_tried_much_later(figures, prompts) -> None:
    ended = []
    stand_ins = StandIns(GAP, lambda tenant, keys: ended.append(tenant))
    on_trial(stand_ins)
    measure(stand_ins, figures[:prompts])
    assert stand_ins.stats()["lost"] == 1
    assert stand_ins.in_force(None) is None
    assert ended == [None]
    for i in range(REFRESH_PROMPTS - 1):
        stand_ins.seen(prompt((1, 2, 3), question=i))
    stand_ins.seen(prompt((1, 2, 3)))  # enough of them
    stand_ins.seen(prompt((50, 60)))
    _, own = stand_ins.take()
    assert own.tokens[:20] == document(2), "the pair that lost is not tried again at once"


def test_what_won_is_measured_again_and_goes_when_it_wins_no_more() -> None:
    ended = []
    stand_ins = StandIns(GAP, lambda tenant, keys: ended.append(keys))
    on_trial(stand_ins)
    measure(stand_ins, WINS)
    own = stand_ins.in_force(None)
    assert stand_ins.stored("a+own", None, lambda key: True)
    for i in range(REFRESH_PROMPTS):
        stand_ins.seen(prompt((1, 2, 3), question=i))
    assert stand_ins.in_force(None) == own, "in force while it is measured again"
    measure(stand_ins, [(0.5, 1.0)] * LOOKS[0])
    assert stand_ins.in_force(None) is None
    assert ended == [{"a+own"}]
    assert not stand_ins.stored("b+own", None, lambda key: True)


def test_a_prompt_is_measured_once_and_one_waits_at_a_time() -> None:
    stand_ins = StandIns(GAP)
    on_trial(stand_ins)
    stand_ins.seen(prompt((5, 6)))
    stand_ins.seen(prompt((7, 8)))
    assert stand_ins.take()[0] == prompt((5, 6))
    stand_ins.seen(prompt((5, 6)))
    assert not stand_ins.waiting()
    stand_ins.seen(prompt((7, 8)))
    assert stand_ins.take()[0] == prompt((7, 8))


@pytest.mark.parametrize("ratio", [1.0, 1.5])
def test_a_prompt_that_is_computed_whole_or_is_too_long_is_not_measured(ratio, monkeypatch) -> None:
    stand_ins = StandIns(GAP)
    on_trial(stand_ins)
    stand_ins.seen(prompt((5, 6), ratio=ratio))
    monkeypatch.setattr(module, "TRIAL_TOKENS", 40)
    stand_ins.seen(prompt((5, 6)))
    assert not stand_ins.waiting()


def test_of_a_deleted_document_nothing_is_left() -> None:
    ended = []
    name = document_name(document(1), None)
    for when in ("remembered", "on trial", "in force"):
        stand_ins = StandIns(GAP, lambda tenant, keys: ended.append(tenant))
        if when == "remembered":
            stand_ins.seen(prompt((1, 2, 3)))
        else:
            on_trial(stand_ins)
        if when == "in force":
            measure(stand_ins, WINS)
        stand_ins.seen(prompt((1, 40), question=9))
        stand_ins.deleted(name, None)
        held = repr(stand_ins.tenants)
        assert str(document(1)[5]) not in held, when
        assert name not in held
        assert stand_ins.in_force(None) is None
        assert not stand_ins.waiting()
    assert ended == [None, None]  # on trial, in force


def test_a_measurement_of_what_was_withdrawn_is_not_counted() -> None:
    stand_ins = StandIns(GAP)
    on_trial(stand_ins)
    stand_ins.seen(prompt((5, 6)))
    taken = stand_ins.take()
    stand_ins.deleted(document_name(document(2), None), None)
    stand_ins.measured(*taken, 1.0, 0.1)
    assert stand_ins.measured_prompts == 0


def test_what_is_remembered_is_bounded_and_who_has_won_stays() -> None:
    ended = []
    stand_ins = StandIns(GAP, lambda tenant, keys: ended.append(tenant))
    on_trial(stand_ins, "winner")
    measure(stand_ins, WINS, "winner")
    for i in range(MAX_TENANTS + 10):
        stand_ins.seen(prompt((1, 2, 3), f"tenant {i}"))
    assert len(stand_ins.tenants) == MAX_TENANTS
    assert stand_ins.in_force("winner") is not None
    assert ended == [f"tenant {i}" for i in range(11)]
    for i in range(CANDIDATE_PROMPTS - 2):
        stand_ins.seen(prompt(range(10 * i, 10 * i + 9), "many"))
    assert len(stand_ins.tenants["many"].pairs) <= MAX_PAIRS


def test_nothing_happens_where_it_is_off_or_documents_come_alone() -> None:
    off, on = StandIns(GAP, on=False), StandIns(GAP)
    on_trial(off)
    for i in range(50):
        on.seen(prompt((i,)))
    assert not off.tenants
    assert not on.waiting()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([None, "a", "b"]),
            st.lists(st.integers(0, 6), min_size=1, max_size=4),
            st.sampled_from(["seen", "measured", "deleted"]),
            st.floats(0, 1),
        ),
        max_size=120,
    )
)
def test_of_one_tenants_text_nothing_is_with_another(steps) -> None:
    """Whatever comes: documents of a tenant are numbered apart, and only those are held for it."""
    offset = {None: 0, "a": 100, "b": 200}
    stand_ins = StandIns(GAP)
    for i, (tenant, numbers, what, kl) in enumerate(steps):
        mine = [offset[tenant] + n for n in numbers]
        if what == "seen":
            stand_ins.seen(prompt(mine, tenant, question=i))
        elif what == "deleted":
            stand_ins.deleted(document_name(document(mine[0]), tenant), tenant)
        elif (taken := stand_ins.take()) is not None:
            stand_ins.measured(*taken, 1.0, kl)
        for tenant_held, one in stand_ins.tenants.items():
            pairs = [*one.pairs, *([one.own] if one.own else [])]
            texts = [t for pair in pairs for t in pair.tokens]
            texts += [t for d in one.waiting.documents() for t in d] if one.waiting else []
            numbers_held = {t // 1000 for t in texts if t not in (*GAP, *SEPARATOR)}
            first = offset[tenant_held]
            assert numbers_held <= set(range(first, first + 7))
            if one.own is not None:
                assert one.in_force or one.on_trial
            assert len(one.kl) <= LOOKS[-1]


def test_two_ranks_that_see_the_same_decide_the_same() -> None:
    """Nothing depends on addresses, hashes or clocks."""
    found = []
    for ballast in (0, 5000):
        kept = [object() for _ in range(ballast)]
        stand_ins = StandIns(GAP)
        for tenant in ("a", "b"):
            on_trial(stand_ins, tenant)
            measure(stand_ins, WINS if tenant == "a" else [(1.0, 2.0)] * LOOKS[0], tenant)
        state = [(t, one.own, one.in_force, one.prompts) for t, one in stand_ins.tenants.items()]
        found.append(state)
        del kept
    assert found[0] == found[1]
