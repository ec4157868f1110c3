"""A client with many tenant names at the session gate, against tenants that a gateway vouches for."""

import itertools
from collections import Counter

import pytest

from sglang_canopy.admission.activation import GateSettings
from sglang_canopy.admission.gate import SessionGate
from sglang_canopy.records import CLIENT, GATEWAY, Request

MAX_SESSIONS, TOKENS, WAITING_PER_TENANT = 20, 50, 3
STEPS, WARM_UP_STEPS = 900, 200


def admission_shares(owners: dict[str, tuple[str, str]]) -> dict[str, float]:
    """Share of admissions by owner. ``owners``: tenant -> (owner, source). Every tenant always has
    ``WAITING_PER_TENANT`` new sessions at the gate; the oldest active session ends each second."""
    gate = SessionGate(
        GateSettings(always=True, age_s=1e9, overrun_interval_s=1e9), MAX_SESSIONS * TOKENS
    )
    numbers, admitted = itertools.count(1), Counter[str]()

    def arrive(tenant: str, now: float) -> bool:
        """Let a session arrive; return whether it waits."""
        number = next(numbers)
        path = tuple(range(100 * number, 100 * number + TOKENS // 10))
        request = Request(
            time=now, path=path, block_tokens=10, prompt_tokens=TOKENS, tenant=tenant,
            conversation=f"c{number}", source=owners[tenant][1], stop="tool",
        )  # fmt: skip
        gate.arrive(number, request)
        return gate.holds(number)

    for now in range(STEPS):
        waiting = Counter(session.tenant for session in gate.waiting.sessions.values())
        for tenant in owners:
            while waiting[tenant] < WAITING_PER_TENANT:
                waiting[tenant] += arrive(tenant, float(now))
        oldest = next(iter(gate.places.active_sessions.values()))
        ticket, request = next((t, r) for t, (s, r) in gate.by_ticket.items() if s is oldest)
        request.over = True
        gate.finish(ticket, request)
        if now > WARM_UP_STEPS:
            admitted[owners[request.tenant][0]] += 1
        gate.advance(float(now))
    return {owner: count / admitted.total() for owner, count in admitted.items()}


@pytest.mark.parametrize("names", [1, 60])
def test_names_that_no_gateway_vouches_for_share_one_turn(names: int) -> None:
    liars = {f"x{i}": ("liar", CLIENT) for i in range(names)}
    shares = admission_shares({"honest": ("honest", GATEWAY), **liars})
    assert shares["honest"] == pytest.approx(0.5, abs=0.02)


def test_vouched_tenants_get_equal_shares() -> None:
    honest = {name: (name, GATEWAY) for name in ("a", "b", "c")}
    shares = admission_shares({**honest, **{f"x{i}": ("liar", CLIENT) for i in range(60)}})
    assert list(shares.values()) == pytest.approx([0.25] * 4, abs=0.02)


def test_a_vouched_tenants_name_has_no_effect_without_the_gateways_secret() -> None:
    gate = SessionGate(GateSettings(always=True), 1000)
    charged = [
        gate.arrive(
            number, Request(time=1.0, path=(), prompt_tokens=10, tenant="honest", source=source)
        ).charged_to
        for number, source in enumerate((GATEWAY, CLIENT))
    ]
    assert charged[0] != charged[1]


def test_without_a_gateway_each_tenant_is_charged_by_its_name() -> None:
    shares = admission_shares({"a": ("a", CLIENT), "b": ("b", CLIENT)})
    assert shares["a"] == pytest.approx(0.5, abs=0.02)
