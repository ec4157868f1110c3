"""The order of waiting sessions equals its definition under random arrivals and departures."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_canopy.admission.places import Line
from sglang_canopy.admission.session import Session

TENANTS = (None, "a", "b", "c")


def by_definition(
    waiting: list[Session], active: Counter[str | None], turns: dict[str | None, int]
) -> list[int]:
    """Parties in turn, the oldest session of each first; tenants without active sessions are one."""
    parties: dict[str | None, list[Session]] = {}
    for session in sorted(waiting, key=lambda one: one.number):
        party = session.tenant if active[session.tenant] else ""
        parties.setdefault(party, []).append(session)
    order = sorted(parties, key=lambda p: (turns.get(p, 0), parties[p][0].number))
    rounds = max(map(len, parties.values()), default=0)
    return [
        parties[p][place].number
        for place in range(rounds)
        for p in order
        if place < len(parties[p])
    ]


@settings(max_examples=80)
@given(st.integers(1, 60), st.randoms(use_true_random=False))
def test_any_sequence_of_calls_gives_the_defined_order(steps: int, draw) -> None:
    line, active = Line(), Counter[str | None]()
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
            line.add(waiting[-1])
        elif what == 2 and waiting:
            admitted = waiting.pop(draw.randrange(len(waiting)))
            line.discard(admitted)
            line.took_turn(admitted, active)
            active[admitted.tenant] += 1
            if active[admitted.tenant] == 1:
                line.set_active(admitted.tenant, True)
        else:
            tenant = draw.choice(TENANTS)
            if active[tenant]:
                active[tenant] -= 1
                if not active[tenant]:
                    line.set_active(tenant, False)
        found = [session.number for session in line.in_turn()]
        assert found == by_definition(waiting, active, line._turns)
