"""The order of waiting sessions: tenants' shares, and the oldest session of each first."""

import itertools
from collections import Counter
from collections.abc import Hashable

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_canopy.admission.places import WaitingSessions
from sglang_canopy.admission.session import Session
from sglang_canopy.tenant import Vouched

TENANTS = (None, *map(Vouched, "abc"))


def session_of(number: int, tenant: Hashable) -> Session:
    return Session(number, None, None, 0.0, None, tenant)  # type: ignore[arg-type]


@settings(max_examples=80)
@given(st.integers(1, 60), st.randoms(use_true_random=False))
def test_any_sequence_of_calls_keeps_the_order(steps: int, draw) -> None:
    """Each round has the next session of every share, and no share that waits is two sessions behind."""
    waiting_sessions = WaitingSessions(())
    sessions = [session_of(number, draw.choice(TENANTS)) for number in range(60)]
    draw.shuffle(sessions)
    waiting: list[Session] = []
    admitted_meanwhile: dict[Hashable, Counter[Hashable]] = {}
    for _ in range(steps):
        if not waiting or draw.randrange(2):
            waiting.append(sessions.pop())
            waiting_sessions.add(waiting[-1])
            admitted_meanwhile.setdefault(waiting[-1].charged_to, Counter())
        else:
            admitted = next(waiting_sessions.in_order())
            waiting.remove(admitted)
            waiting_sessions.admit(admitted)
            if all(s.charged_to != admitted.charged_to for s in waiting):
                del admitted_meanwhile[admitted.charged_to]
            for tenant, counts in admitted_meanwhile.items():
                counts[admitted.charged_to] += 1
                ahead = counts.most_common(1)[0][1] - counts[tenant]
                assert ahead <= 2
        order = [*waiting_sessions.in_order()]
        assert {*order} == {*waiting}
        rounds: Counter[Hashable] = Counter()
        previous = 0
        for session in order:
            of_tenant = sorted(s.number for s in waiting if s.charged_to == session.charged_to)
            assert session.number == of_tenant[rounds[session.charged_to]]
            assert rounds[session.charged_to] >= previous
            previous = rounds[session.charged_to]
            rounds[session.charged_to] += 1


def test_a_tenant_that_is_served_is_not_overtaken_by_short_sessions_of_others() -> None:
    """Seen red: the turn of a tenant without an active session was forgotten, so it was first again."""
    waiting_sessions, numbers = WaitingSessions(()), itertools.count()
    steady, others = Vouched("steady"), [Vouched(f"v{number}") for number in range(40)]
    admitted = Counter[Hashable]()

    def wait(tenant: Hashable) -> None:
        waiting_sessions.add(session_of(next(numbers), tenant))

    for tenant in (steady, *others) * 2:
        wait(tenant)
    for _ in range(100 * 41):
        session = next(waiting_sessions.in_order())
        waiting_sessions.admit(session)
        admitted[session.charged_to] += 1
        wait(session.charged_to)
    assert set(admitted.values()) == {100}


def test_new_tenants_do_not_overtake_a_tenant_that_waits_again_and_again() -> None:
    waiting_sessions, steady, numbers = WaitingSessions(()), Vouched("steady"), itertools.count()
    admitted = Counter[bool]()

    def wait(tenant: Hashable) -> None:
        waiting_sessions.add(session_of(next(numbers), tenant))

    for _ in range(3):
        wait(steady)
    for number in range(200):
        wait(Vouched(f"v{number}"))
        session = next(waiting_sessions.in_order())
        waiting_sessions.admit(session)
        admitted[session.charged_to == steady] += 1
        if session.charged_to == steady:
            wait(steady)
    assert admitted[True] >= 60
