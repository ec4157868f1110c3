"""Documents in tiers that are far too small, of two tenants, and after a restart."""

from __future__ import annotations

import random

import pytest

from support.chunk_client import ask, learn, on, prompt, report, state

TENANTS = ("ann", "bob")
ORDERS = [tuple(range(i, i + 4)) for i in range(0, 24, 4)]


def tiers(client) -> dict[str, dict]:
    return state(client)["store"]["tiers"]


@pytest.mark.long
def test_small_tiers_stay_bounded_answer_alike_and_are_found_after_a_restart(
    server, tiny_model, tmp_path
) -> None:
    flags = on(memory_mb=1, disk_mb=2, directory=str(tmp_path / "chunks"), tenant_share=0.5)
    draw = random.Random(3)
    with server(tiny_model, *flags, kv_tokens=8192) as client:
        for tenant in TENANTS:
            learn(client, ORDERS, extra_key=tenant)
        fused = 0
        for i in range(24):
            tenant, order = TENANTS[i % 2], draw.sample(draw.choice(ORDERS), 4)
            ids, bounds = prompt(order, i)
            fused += report(ask(client, ids, bounds, 4, extra_key=tenant))["fused"]
            whole = ask(client, ids, bounds, 4, extra_key=tenant, canopy_recompute_ratio=1.0)
            plain = ask(client, ids, "off", 4, extra_key=tenant)
            assert whole["output_ids"] == plain["output_ids"]
            assert all(t["used_bytes"] <= t["capacity_bytes"] for t in tiers(client).values())
        found = state(client)
        assert 0 < fused < 24  # some are stored, and not all
        assert found["store"]["dropped"] > 0
        assert found["fallbacks"] == 0
        last = prompt(order[::-1], 99)
        assert report(ask(client, *last, extra_key=tenant))["fused"]
    with server(tiny_model, *flags, kv_tokens=8192) as client:
        kept = tiers(client)["disk"]
        assert 0 < kept["used_bytes"] <= kept["capacity_bytes"]
        reused = 0
        for number, order in enumerate(ORDERS):
            ids, bounds = prompt(order[::-1], 200 + number)
            assert report(ask(client, ids, bounds, extra_key="carl"))["missing_chunks"] == 4
            for one in TENANTS:
                reused += report(ask(client, ids, bounds, extra_key=one)).get("reused_disk", 0)
        assert reused > 0
        assert state(client)["fallbacks"] == 0
