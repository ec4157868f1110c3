"""A plan's part that can change: in force from one request on, refused whole, undone in full."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_canopy.config.live_plan import CHANGEABLE, message, part_of, unpacked
from sglang_canopy.config.plan_file import ServerPlan
from sglang_canopy.config.policy_change import change_of
from sglang_canopy.config.tiers import PolicyChoice, TierOptions
from sglang_canopy.errors import CanopyError
from sglang_canopy.radix.live_plan import change, in_force
from sglang_canopy.ttl.table import Group, TTLTable
from support.disk_tree import DiskTree
from support.live_tree import LiveTree, check

ONE_TOKEN = {"quantum_tokens": 1}
TABLES = (
    {"residual_ttl_s": 60.0},
    {"residual_ttl_s": None, "categories": {"chat": 5.0, "api|end": 0.0}},
    {"groups": [{"root": "0x1f", "ttl_s": 9.0, "name": "g"}], "residual_ttl_s": 3.0},
)


@pytest.fixture
def tree(tmp_path: Path):
    found = DiskTree(tmp_path / "disk", policy="wa", config=ONE_TOKEN)
    yield found
    found.close()


def to(tree: Any, **body: Any) -> None:
    change(tree.core, part_of(body))


def test_each_key_is_in_force_afterwards(tree: DiskTree) -> None:
    tree.serve(list(range(8)), 1.0, category="chat")
    to(
        tree,
        radix_eviction="canopy-slru",
        radix_eviction_config={"protected_share": 0.5},
        host_eviction="s3fifo",
        disk_bytes=4096,
        ttl=TABLES[1],
        host_ttl=TABLES[0],
    )
    assert tree.core.live.device_policy.name == "slru"
    assert tree.core.live.device_policy.config.protected_share == 0.5
    assert tree.core.live.host_policy.name == "s3fifo"
    assert tree.store.capacity_bytes == tree.core.disk.capacity()[0] == 4096
    assert tree.store.ttl == tree.core.groups.disk == TTLTable.from_json(TABLES[1])
    assert tree.core.evictable_host_leaves.expiry.table == TTLTable(residual_ttl_s=60.0)
    assert tree.core.live.tiers.host_ttl == TTLTable(residual_ttl_s=60.0)  # also after a reset
    check(tree)
    assert tree.kv(list(range(8))) == list(range(8))


def test_pages_on_disk_follow_new_ttls_and_the_host_does(tree: DiskTree) -> None:
    tree.epoch = 0.0
    tree.store.state.clock = lambda: 100.0
    tree.serve(list(range(8)), 100.0, category="chat")
    tree.settle()
    keys = _keys(tree)
    assert tree.store.leading(keys, 1e9) == len(keys)
    to(tree, ttl={"categories": {"chat": 5.0}}, host_ttl={"residual_ttl_s": 7.0})
    assert tree.store.leading(keys, 104.0) == len(keys)
    assert tree.store.leading(keys, 106.0) == 0
    tree.evict(8)
    (node,) = tree.core.evictable_host_leaves
    expiry = tree.core.evictable_host_leaves.expiry
    assert expiry.expires_at(node.canopy) == 107.0


def _keys(tree: DiskTree) -> list[str]:
    return [key for node in tree.core._node_arena.values() for key in node.hash_value or ()]


def plans() -> st.SearchStrategy[dict[str, Any]]:
    table = st.sampled_from(TABLES)
    policies = st.sampled_from(
        (
            {"radix_eviction": "canopy-lru"},
            {"radix_eviction": "wa", "host_eviction": "canopy-lru"},
            {"radix_eviction": "s3fifo", "radix_eviction_config": {}},
            {"radix_eviction": "canopy-slru", "radix_eviction_config": {"protected_share": 0.3}},
        )
    )
    others = st.fixed_dictionaries(
        {}, optional={"disk_bytes": st.integers(100, 10**7), "ttl": table, "host_ttl": table}
    )
    return st.tuples(st.one_of(st.just({}), policies), others).map(lambda p: p[0] | p[1])


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    started=st.sampled_from(("canopy-lru", "wa")),
    host=st.sampled_from((None, "lru", "canopy-slru")),
    ttl=st.sampled_from((None, *TABLES)),
    bodies=st.lists(plans().filter(bool), min_size=1, max_size=4),
)
def test_what_was_in_force_sent_back_restores_every_value(
    tmp_path: Path, started: str, host: str | None, ttl: Any, bodies: list[dict[str, Any]]
) -> None:
    tiers = TierOptions(
        host=None if host is None else PolicyChoice(host),
        host_ttl=None if ttl is None else TTLTable.from_json(ttl),
    )
    tree = DiskTree(tmp_path / f"d{len(list(tmp_path.iterdir()))}", policy=started, tiers=tiers, config=ONE_TOKEN)  # fmt: skip
    try:
        before, kept = [], in_force(tree.core)
        for number, body in enumerate(bodies):
            tree.serve([7, 8, number, number + 1], float(number), category="chat")
            before.append(json.loads(json.dumps(in_force(tree.core))))
            to(tree, **body)
            now = ServerPlan.from_json({"version": 1, **in_force(tree.core)})
            for key, value in ServerPlan.from_json({"version": 1, **body}).to_json().items():
                assert now.to_json()[key] == value, key
            check(tree)
        for body in reversed(before):
            to(tree, **body)
        assert in_force(tree.core) == kept
        for node in tree.core._node_arena.values():  # no leaf is lost, and none is ranked twice
            assert tree.core.contains(node)
        check(tree)
        assert tree.core.live.device_policy.name == tree.core.live.chosen.name.removeprefix(
            "canopy-"
        )
    finally:
        tree.close()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"host_bytes": 5}, "'host_bytes' cannot change while a server runs"),
        ({"server": {}}, "cannot change"),
        ({"nonsense": 1}, "cannot change"),
        ({}, "nothing to change"),
        ([1], "JSON object"),
        ({"disk_bytes": -1}, "disk_bytes must be a whole number"),
        ({"disk_bytes": 1.5}, "disk_bytes must be a whole number"),
        ({"ttl": {"residual_ttl_s": -1}}, "residual_ttl_s must be seconds"),
        ({"ttl": {"groups": [{"root": 1, "ttl_s": 1}], "hash": "trace"}}, "does not know"),
        ({"host_eviction": "wa"}, "needs radix_eviction"),
        ({"radix_eviction": "lru"}, "device must be one of"),
        ({"radix_eviction": "wa", "radix_eviction_config": {"block_tokens": 1}}, "cannot change"),
        ({"radix_eviction": "wa", "radix_eviction_config": {"typo": 1}}, "unknown key 'typo'"),
    ],
)
def test_a_bad_body_is_refused_by_name(body: Any, why: str) -> None:
    with pytest.raises(CanopyError, match=why):
        part_of(body)


def test_what_this_server_cannot_take_is_refused_whole(tree: DiskTree) -> None:
    before = in_force(tree.core)
    groups = {"groups": [{"root": "0x1", "ttl_s": 1.0}], "block_tokens": 32}
    for body in ({"ttl": groups}, {"host_ttl": groups}, {"disk_bytes": 1}):
        with pytest.raises(CanopyError, match=r"blocks of 32 tokens|holds no page"):
            to(tree, radix_eviction="canopy-lru", **body)
        assert in_force(tree.core) == before
    tree.core.exchange.apply(change_of({"device": "s3fifo", "canary": 0.5}), "test")
    with pytest.raises(CanopyError, match="end it first"):
        to(tree, radix_eviction="canopy-lru")


def test_a_tier_that_is_not_there_is_named() -> None:
    tree = LiveTree(32, "wa", ONE_TOKEN)
    assert in_force(tree.core) == {"radix_eviction": "wa"}
    for body, why in (
        ({"disk_bytes": 4096}, "no disk tier"),
        ({"ttl": TABLES[0]}, "no disk tier"),
        ({"host_ttl": TABLES[0]}, "no host tier"),
    ):
        with pytest.raises(CanopyError, match=why):
            to(tree, **body)
    to(tree, radix_eviction="canopy-lru")
    assert in_force(tree.core)["radix_eviction"] == "canopy-lru"


def test_ttls_that_follow_the_traffic_are_not_overruled(tmp_path: Path) -> None:
    tree = DiskTree(tmp_path / "d", config=ONE_TOKEN, tiers=TierOptions(ttl_window_s=60.0))
    with pytest.raises(CanopyError, match="--canopy-ttl-window"):
        to(tree, ttl=TABLES[0])
    tree.close()


def test_a_message_carries_the_plan_and_nothing_else() -> None:
    plan = part_of({"ttl": TABLES[2], "disk_bytes": 7, "radix_eviction": "wa"})
    assert unpacked(message("ab12", plan)) == ("ab12", plan)
    assert unpacked(message("ab12", None)) == ("ab12", None)
    for text in ("", "{}", "[", '{"answer": "../x", "plan": null}', '{"answer": "a", "plan": 3}'):
        assert unpacked("canopy_plan:" + text) is None
    assert set(CHANGEABLE) <= set(ServerPlan.__dataclass_fields__)


def test_a_group_that_the_next_table_has_too_keeps_its_pages(tree: DiskTree) -> None:
    first = TTLTable((Group(5, 10.0),), block_tokens=64)
    to(tree, ttl=first.to_json())
    tree.serve(list(range(8)), 1.0, path=[5], block_tokens=64)
    (leaf,) = [n.canopy for n in tree.core._node_arena.values() if n is not tree.core.root_node]
    leaf.group = 0
    to(tree, ttl=TTLTable((Group(9, 1.0), Group(5, 20.0)), block_tokens=64).to_json())
    assert leaf.group == 1
