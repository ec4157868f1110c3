"""The order of waiting sessions equals its definition under random arrivals and departures."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_canopy.admission.places import WaitingSessions
from sglang_canopy.admission.session import Session

TENANTS = (None, "a", "b", "c")


def by_definition(
    waiting: list[Session], active: Counter[str | None], turns: dict[str | None, int]
) -> list[int]:
    """Tenants in turn, the oldest session of each first; tenants without active sessions are one."""
    tenants: dict[str | None, list[Session]] = {}
    for session in sorted(waiting, key=lambda one: one.number):
        tenant = session.tenant if active[session.tenant] else ""
        tenants.setdefault(tenant, []).append(session)
    order = sorted(tenants, key=lambda p: (turns.get(p, 0), tenants[p][0].number))
    rounds = max(map(len, tenants.values()), default=0)
    return [
        tenants[p][place].number
        for place in range(rounds)
        for p in order
        if place < len(tenants[p])
    ]


@settings(max_examples=80)
@given(st.integers(1, 60), st.randoms(use_true_random=False))
def test_any_sequence_of_calls_gives_the_defined_order(steps: int, draw) -> None:
    waiting_sessions, active = WaitingSessions(), Counter[str | None]()
    sessions = [
        Session(number, tenant := draw.choice(TENANTS), None, 0.0, None, tenant)  # type: ignore[arg-type]
        for number in range(40)
    ]
    draw.shuffle(sessions)
    waiting: list[Session] = []
    for _ in range(steps):
        what = draw.randrange(4)
        if what < 2 and sessions:
            waiting.append(sessions.pop())
            waiting_sessions.add(waiting[-1])
        elif what == 2 and waiting:
            admitted = waiting.pop(draw.randrange(len(waiting)))
            waiting_sessions.discard(admitted)
            waiting_sessions.served(admitted, active)
            active[admitted.tenant] += 1
            if active[admitted.tenant] == 1:
                waiting_sessions.set_active(admitted.tenant, True)
        else:
            tenant = draw.choice(TENANTS)
            if active[tenant]:
                active[tenant] -= 1
                if not active[tenant]:
                    waiting_sessions.set_active(tenant, False)
        found = [session.number for session in waiting_sessions.in_order()]
        assert found == by_definition(waiting, active, waiting_sessions._last_served)
