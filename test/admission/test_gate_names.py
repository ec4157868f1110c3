"""A client with many tenant names at the session gate, against tenants that a gateway vouches for."""

import itertools
from collections import Counter
from typing import NamedTuple

import pytest

from sglang_canopy.admission.activation import GateSettings
from sglang_canopy.admission.gate import SessionGate
from sglang_canopy.records import CLIENT, GATEWAY, Request

MAX_SESSIONS, SESSION_TOKENS, WAITING_PER_TENANT = 20, 50, 3
STEP_COUNT, WARM_UP_STEPS = 900, 200


class Owner(NamedTuple):
    name: str
    source: str


def admission_shares(owners: dict[str, Owner]) -> dict[str, float]:
    """Return the share of the admissions by owner's name. Every tenant always has ``WAITING_PER_TENANT`` new
    sessions at the gate, and the oldest active session ends each second."""
    settings = GateSettings(always=True, age_s=1e9, overrun_interval_s=1e9)
    gate = SessionGate(settings, MAX_SESSIONS * SESSION_TOKENS)
    numbers, admissions = itertools.count(1), Counter[str]()

    def arrive(tenant: str, now: float) -> bool:
        """Let a session arrive; return whether it waits."""
        number = next(numbers)
        path = tuple(range(100 * number, 100 * number + SESSION_TOKENS // 10))
        request = Request(
            time=now, path=path, block_tokens=10, prompt_tokens=SESSION_TOKENS, tenant=tenant,
            conversation=f"c{number}", source=owners[tenant].source, stop="tool",
        )  # fmt: skip
        gate.arrive(number, request)
        return gate.holds(number)

    for now in range(STEP_COUNT):
        waiting = Counter(session.tenant for session in gate.waiting.sessions.values())
        for tenant in owners:
            while waiting[tenant] < WAITING_PER_TENANT:
                waiting[tenant] += arrive(tenant, float(now))
        oldest = next(iter(gate.places.active_sessions.values()))
        ticket = {session: ticket for ticket, (session, _) in gate.requests.items()}[oldest]
        _, request = gate.requests[ticket]
        request.over = True
        gate.finish(ticket, request)
        if now > WARM_UP_STEPS:
            admissions[owners[request.tenant].name] += 1
        gate.advance(float(now))
    return {owner: count / admissions.total() for owner, count in admissions.items()}


@pytest.mark.parametrize("name_count", [1, 60])
def test_names_that_no_gateway_vouches_for_have_one_share(name_count: int) -> None:
    unvouched = {f"x{i}": Owner("client", CLIENT) for i in range(name_count)}
    shares = admission_shares({"vouched": Owner("vouched", GATEWAY), **unvouched})
    assert shares["vouched"] == pytest.approx(0.5, abs=0.02)


def test_vouched_tenants_get_equal_shares() -> None:
    vouched = {name: Owner(name, GATEWAY) for name in ("a", "b", "c")}
    shares = admission_shares({**vouched, **{f"x{i}": Owner("client", CLIENT) for i in range(60)}})
    assert list(shares.values()) == pytest.approx([0.25] * 4, abs=0.02)


def test_a_vouched_tenants_name_has_no_effect_without_the_gateways_secret() -> None:
    gate = SessionGate(GateSettings(always=True), 1000)
    charged_tenants = [
        gate.arrive(
            number, Request(time=1.0, path=(), prompt_tokens=10, tenant="vouched", source=source)
        ).charged_to
        for number, source in enumerate((GATEWAY, CLIENT))
    ]
    assert charged_tenants[0] != charged_tenants[1]


def test_without_a_gateway_each_tenant_is_charged_by_its_name() -> None:
    shares = admission_shares({name: Owner(name, CLIENT) for name in "ab"})
    assert shares["a"] == pytest.approx(0.5, abs=0.02)
