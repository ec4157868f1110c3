"""A tenant's KV leaves SGLang's tree, on each tier, and other KV stays whole. The Rust core: test_chunks.py."""

import pytest

pytest.importorskip("sglang")

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

from canopy_chunks.server.scheduler import delete_kv
from sglang_canopy.tenant import documents_key, tenants_of_key
from support.live_tree import LiveTree

FIRST, SECOND = list(range(40)), [*range(20), *range(100, 130)]


def held(tree, tokens, extra, salt=None) -> int:
    """Tokens of a path on device and host."""
    found = tree.cache.match_prefix(MatchPrefixParams(key=tree.key(tokens, salt, extra)))
    return found.device_prefix_len + found.host_hit_length


@pytest.mark.parametrize("core", [None, "python"])
@pytest.mark.parametrize("host_tokens", [0, 600])
def test_a_tenants_kv_is_deleted(core, host_tokens) -> None:
    tree = LiveTree(600, "lru" if core else "canopy-lru", core=core, host_tokens=host_tokens)
    free = tree.allocator.available_size()
    keys = ["a", documents_key("a", "0" * 24), "b", None]
    for key in keys:
        for tokens in (FIRST, SECOND):
            tree.insert(tokens, extra=key)
    tree.insert(FIRST, salt="s", extra="a")
    assert delete_kv(tree.cache, "a/")
    for key in keys[:2]:
        assert held(tree, FIRST, key) == held(tree, SECOND, key) == 0
    for key in keys[2:]:
        assert (held(tree, FIRST, key), held(tree, SECOND, key)) == (40, 50)
    assert held(tree, FIRST, "a", "s") == 40
    assert not delete_kv(tree.cache, "a/")
    for tenant in (None, "b/", "a/s"):
        assert delete_kv(tree.cache, tenant)
    assert tree.allocator.available_size() == free


def test_kv_that_a_request_uses_stays_until_it_ends() -> None:
    tree = LiveTree(600)
    for tokens in (FIRST, SECOND):
        tree.insert(tokens, extra="a")
    hit = tree.cache.match_prefix(MatchPrefixParams(key=tree.key(FIRST, None, "a")))
    lock = tree.cache.lock(hit.last_device_node)
    assert delete_kv(tree.cache, "a/")
    assert (held(tree, FIRST, "a"), held(tree, SECOND, "a")) == (40, 20)
    tree.cache.unlock(lock)
    assert delete_kv(tree.cache, "a/")
    assert held(tree, FIRST, "a") == 0


def test_an_adapters_kv_is_its_tenants() -> None:
    adapter = "0123456789abcdef" * 2
    for key, tenants in (
        (None, {None}),
        ("a", {"a/"}),
        (f"a/{adapter}", {f"a%2F{adapter}/", "a/"}),
        (adapter, {f"{adapter}/", None}),
        (documents_key(f"a{adapter}", "x"), {f"a{adapter}/", "a/"}),
    ):
        assert tenants_of_key(key, None) == tenants
