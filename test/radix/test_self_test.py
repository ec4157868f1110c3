"""The test of SGLang's tree at start: it passes on the installed SGLang, and names a changed step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sglang.srt.mem_cache.unified_cache.components.full import FullComponent
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sglang_canopy.errors import CanopyError
from sglang_canopy.radix import self_test
from sglang_canopy.server.scheduler.cache_factory import new_cache


@pytest.fixture(autouse=True)
def _server() -> None:
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_the_installed_sglang_passes(page_size: int) -> None:
    self_test.run(new_cache, page_size)


def _with_more(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda old: lambda *args, **kwargs: change(old(*args, **kwargs))


def _longer(result: Any) -> Any:
    return result._replace(full_kv_hit_length=result.full_kv_hit_length + 1)


def _counted_twice(old: Any) -> Any:
    return lambda self, node: (old(self, node), old(self, node))[1]


def _without_leaf(old: Any) -> Any:
    def add(self: Any, *args: Any, **kwargs: Any) -> Any:
        node = old(self, *args, **kwargs)
        self.evictable_device_leaves.discard(node)
        return node

    return add


MUTATIONS = {
    "a leaf must have been hit": (
        *(UnifiedTreeCore, "_is_device_leaf"),
        lambda old: lambda self, node: old(self, node) and node.hit_count > 0,
    ),
    "no leaf is evictable": (UnifiedTreeCore, "_is_device_leaf", lambda _: lambda *_a: False),
    "hits are counted twice": (UnifiedTreeCore, "_inc_hit_count_and_check", _counted_twice),
    "a match has another length": (UnifiedTreeCore, "match_prefix", _with_more(_longer)),
    "a new node is no leaf": (UnifiedTreeCore, "_add_new_node", _without_leaf),
    "a split is renamed": (UnifiedTreeCore, "_split_node", lambda _: None),
    "a split takes one more argument": (
        *(UnifiedTreeCore, "_split_node"),
        lambda old: lambda self, key, node, length, kind: old(self, key, node, length),
    ),
    "a lock is not taken": (
        *(FullComponent, "acquire_component_lock"),
        lambda _: lambda self, node, result, **_k: result,
    ),
    "freed slots are lost": (UnifiedRadixCache, "_free_values", lambda _: lambda *_a, **_k: None),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_changed_sglang_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, change = MUTATIONS[name]
    monkeypatch.setattr(owner, attribute, change(getattr(owner, attribute)))
    with pytest.raises(CanopyError, match="differs from the tested ones"):
        self_test.run(new_cache, 4)
