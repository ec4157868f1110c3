"""The order of waiting sessions equals its definition under random arrivals and departures."""

import itertools
from collections import Counter
from collections.abc import Hashable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_canopy.admission.places import _NEWCOMERS, WaitingSessions
from sglang_canopy.admission.session import Session
from sglang_canopy.tenant import Vouched

TENANTS = (None, "a", "b", "c")


def session_of(number: int, tenant: Any) -> Session:
    return Session(number, tenant, None, 0.0, None, tenant)  # type: ignore[arg-type]


def defined_order(share_of: dict[int, Hashable], last_served: dict[Hashable, int]) -> list[int]:
    """Return the sessions' numbers, one of each share in turn, the oldest first. A session's share is its tenant
    if that had an active session when the wait began; otherwise it is the share of all newcomers."""
    numbers: dict[Hashable, list[int]] = {}
    for number in sorted(share_of):
        numbers.setdefault(share_of[number], []).append(number)
    order = sorted(numbers, key=lambda share: (last_served.get(share, 0), numbers[share][0]))
    max_sessions = max(map(len, numbers.values()), default=0)
    return [
        numbers[share][position]
        for position in range(max_sessions)
        for share in order
        if position < len(numbers[share])
    ]


@settings(max_examples=80)
@given(st.integers(1, 60), st.randoms(use_true_random=False))
def test_any_sequence_of_calls_gives_the_defined_order(call_count: int, rng) -> None:
    active_counts = Counter[Hashable]()
    waiting_sessions = WaitingSessions(active_counts)
    sessions = [session_of(number, rng.choice(TENANTS)) for number in range(40)]
    rng.shuffle(sessions)
    waiting: list[Session] = []
    share_by_number: dict[int, Hashable] = {}
    for _ in range(call_count):
        call_number = rng.randrange(4)
        if call_number < 2 and sessions:
            waiting.append(sessions.pop())
            waiting_sessions.add(waiting[-1])
            tenant = waiting[-1].tenant
            share_by_number[waiting[-1].number] = tenant if active_counts[tenant] else _NEWCOMERS
        elif call_number == 2 and waiting:
            admitted = waiting.pop(rng.randrange(len(waiting)))
            del share_by_number[admitted.number]
            waiting_sessions.admit(admitted)
            active_counts[admitted.tenant] += 1
        else:
            tenant = rng.choice(TENANTS)
            if active_counts[tenant]:
                active_counts[tenant] -= 1
                if not active_counts[tenant]:
                    del active_counts[tenant]
        order = [session.number for session in waiting_sessions.in_turn()]
        assert order == defined_order(share_by_number, waiting_sessions._last_admission)


def test_a_tenant_with_active_sessions_is_not_overtaken_by_short_sessions_of_others() -> None:
    """A tenant without an active session keeps its turn; otherwise it would be first again each time."""
    steady, short_tenants = Vouched("steady"), [Vouched(f"v{number}") for number in range(40)]
    waiting_sessions = WaitingSessions(Counter({steady: 1}))
    numbers, admissions = itertools.count(), Counter[Hashable]()

    for tenant in (steady, *short_tenants) * 2:
        waiting_sessions.add(session_of(next(numbers), tenant))
    for _ in range(100 * 41):
        session = next(waiting_sessions.in_turn())
        waiting_sessions.admit(session)
        admissions[session.charged_to] += 1
        waiting_sessions.add(session_of(next(numbers), session.charged_to))
    assert set(admissions.values()) == {100}


def test_new_tenants_do_not_starve_a_tenant_that_waits_repeatedly() -> None:
    steady, numbers, admissions = Vouched("steady"), itertools.count(), Counter[bool]()
    waiting_sessions = WaitingSessions(Counter({steady: 1}))

    for _ in range(3):
        waiting_sessions.add(session_of(next(numbers), steady))
    for number in range(200):
        waiting_sessions.add(session_of(next(numbers), Vouched(f"v{number}")))
        session = next(waiting_sessions.in_turn())
        waiting_sessions.admit(session)
        admissions[session.charged_to == steady] += 1
        if session.charged_to == steady:
            waiting_sessions.add(session_of(next(numbers), steady))
    assert admissions[True] >= 2
