"""Documents of two tenants in host and disk tiers that are far too small, in a crowd, and after a
restart with another ratio. A prompt of one document behind its own system text is exact with reuse."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.chunk_client import ask, learn, on, prompt, report, state

DOCUMENTS = 8
TENANTS = ("a", "b")
SIZES = {"memory_mb": 16, "disk_mb": 40, "encode": "prefix"}
"""Three and nine of the sixteen documents, each exact behind the system text alone."""


def alone(client, tenant: str, document: int, question: int) -> tuple[list[int], dict]:
    """The ids of a prompt of one document, and the answer with reuse."""
    ids, bounds = prompt((document,), question)
    return ids, ask(client, ids, bounds, 8, extra_key=tenant)


def tiers(client) -> dict[str, dict]:
    found = state(client)["store"]["tiers"]
    assert set(found) == {"host", "disk"}
    for tier in found.values():
        assert 0 < tier["used_bytes"] <= tier["capacity_bytes"]
    return found


def plain(client, ids: list[int]) -> list[int]:
    return client.generate(ids, 8)["output_ids"]


@pytest.mark.long
def test_tenants_keep_their_documents_in_full_tiers_and_over_a_restart(
    server, smollm2, tmp_path
) -> None:
    folder, draw = tmp_path / "chunks", random.Random(7)
    keys = {**SIZES, "directory": str(folder)}
    with server(smollm2, *on(**keys), kv_tokens=8192) as client:
        for tenant in TENANTS:
            learn(client, [(0, 1, 2, 3), (4, 5, 6, 7)], extra_key=tenant)

        def one(turn: int) -> tuple[list[int], dict]:
            tenant = TENANTS[turn % 2]
            if turn % 4 < 2:
                return alone(client, tenant, turn % DOCUMENTS, 100 + turn)
            ids, bounds = prompt(orders[turn], 100 + turn)
            return ids, ask(client, ids, bounds, 8, extra_key=tenant)

        orders = [draw.sample(range(DOCUMENTS), 4) for _ in range(32)]
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(one, range(32)))
        told = [report(answer) for _, answer in answers]
        for tier in ("reused_host", "reused_disk"):
            assert sum(one.get(tier, 0) for one in told) > 0, tier
        assert {one["ratio"] for one in told if one["fused"]} == {0.15}
        single = [answers[i] for i in range(32) if i % 4 < 2]
        assert sum(report(answer)["fused"] for _, answer in single) > 4
        for ids, answer in single:
            assert answer["output_ids"] == plain(client, ids)
        _, foreign = alone(client, "c", 0, 200)
        assert not report(foreign)["fused"]
        assert state(client)["fallbacks"] == 0
        tiers(client)
        assert "Traceback" not in client.server.log_text()

    with server(smollm2, *on(**keys, ratio=0.3), kv_tokens=8192) as client:
        _, foreign = alone(client, "c", 0, 300)
        assert not report(foreign)["fused"]
        before = state(client)
        found = [alone(client, t, d, 310) for t in TENANTS for d in range(DOCUMENTS)]
        fused = [answer for _, answer in found if report(answer)["fused"]]
        assert fused
        assert all(report(answer)["ratio"] == 0.3 for answer in fused)
        assert sum(report(answer)["reused_disk"] for answer in fused) > 0
        for ids, answer in found:
            assert answer["output_ids"] == plain(client, ids)
        assert state(client)["fallbacks"] == before["fallbacks"] == 0
        tiers(client)
        assert "Traceback" not in client.server.log_text()
