"""The order of waiting sessions equals its definition under random arrivals and departures."""

import itertools
from collections import Counter
from collections.abc import Hashable

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_canopy.admission.places import _NEWCOMERS, WaitingSessions
from sglang_canopy.admission.session import Session
from sglang_canopy.tenant import Vouched

TENANTS = (None, "a", "b", "c")


def by_definition(waiting: dict[int, Hashable], turns: dict[Hashable, int]) -> list[int]:
    """Shares in turn, the oldest session of each first. ``waiting``: the share of each session: its
    tenant if that had an active session as the wait began, else that of all newcomers."""
    shares: dict[Hashable, list[int]] = {}
    for number in sorted(waiting):
        shares.setdefault(waiting[number], []).append(number)
    order = sorted(shares, key=lambda share: (turns.get(share, 0), shares[share][0]))
    rounds = max(map(len, shares.values()), default=0)
    return [
        shares[share][place]
        for place in range(rounds)
        for share in order
        if place < len(shares[share])
    ]


@settings(max_examples=80)
@given(st.integers(1, 60), st.randoms(use_true_random=False))
def test_any_sequence_of_calls_gives_the_defined_order(steps: int, draw) -> None:
    active = Counter[Hashable]()
    waiting_sessions = WaitingSessions(active)
    sessions = [
        Session(number, tenant := draw.choice(TENANTS), None, 0.0, None, tenant)  # type: ignore[arg-type]
        for number in range(40)
    ]
    draw.shuffle(sessions)
    waiting: list[Session] = []
    shares: dict[int, Hashable] = {}
    for _ in range(steps):
        what = draw.randrange(4)
        if what < 2 and sessions:
            waiting.append(sessions.pop())
            waiting_sessions.add(waiting[-1])
            tenant = waiting[-1].tenant
            shares[waiting[-1].number] = tenant if active[tenant] else _NEWCOMERS
        elif what == 2 and waiting:
            admitted = waiting.pop(draw.randrange(len(waiting)))
            del shares[admitted.number]
            waiting_sessions.admit(admitted)
            active[admitted.tenant] += 1
        else:
            tenant = draw.choice(TENANTS)
            if active[tenant]:
                active[tenant] -= 1
                if not active[tenant]:
                    del active[tenant]
        found = [session.number for session in waiting_sessions.in_order()]
        assert found == by_definition(shares, waiting_sessions._last_served)


def test_a_tenant_with_active_sessions_is_not_overtaken_by_short_sessions_of_others() -> None:
    """Seen red: the turn of a tenant without an active session was forgotten, so it was first again."""
    steady, others = Vouched("steady"), [Vouched(f"v{number}") for number in range(40)]
    waiting_sessions = WaitingSessions(Counter({steady: 1}))
    numbers, admitted = itertools.count(), Counter[Hashable]()

    def wait(tenant: Hashable) -> None:
        waiting_sessions.add(Session(next(numbers), None, None, 0.0, None, tenant))  # type: ignore[arg-type]

    for tenant in (steady, *others) * 2:
        wait(tenant)
    for _ in range(100 * 41):
        session = next(waiting_sessions.in_order())
        waiting_sessions.admit(session)
        admitted[session.charged_to] += 1
        wait(session.charged_to)
    assert set(admitted.values()) == {100}


def test_new_tenants_do_not_overtake_a_tenant_that_waits_again_and_again() -> None:
    steady, numbers, admitted = Vouched("steady"), itertools.count(), Counter[bool]()
    waiting_sessions = WaitingSessions(Counter({steady: 1}))

    def wait(tenant: Hashable) -> None:
        waiting_sessions.add(Session(next(numbers), None, None, 0.0, None, tenant))  # type: ignore[arg-type]

    for _ in range(3):
        wait(steady)
    for number in range(200):
        wait(Vouched(f"v{number}"))
        session = next(waiting_sessions.in_order())
        waiting_sessions.admit(session)
        admitted[session.charged_to == steady] += 1
        if session.charged_to == steady:
            wait(steady)
    assert admitted[True] >= 2
