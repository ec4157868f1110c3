"""Faults seeded in functions of SGLang: the check that detects each at start."""

import dataclasses
import inspect
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components.base import TreeComponent as CacheComponent
from sglang.srt.mem_cache.unified_cache.components.full import FullComponent
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_memory
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

import canopy_cpu
from sglang_canopy import releases
from sglang_canopy.errors import CanopyError
from sglang_canopy.radix import self_test, tier_self_test
from sglang_canopy.radix.offset_walk import OffsetWalkCore
from sglang_canopy.radix.overrides import check_overrides
from sglang_canopy.radix.recorder import Recorder
from sglang_canopy.server.scheduler.cache_factory import OVERRIDING_CLASSES, check_tree, new_cache
from sglang_canopy.server.start.hook import _find_owner
from sglang_canopy.server.start.hooks import HOOKS
from sglang_canopy.server.start.self_check import check_signature
from sglang_canopy.storage.backend import CanopyStorage
from sglang_canopy.storage.page_self_test import check_page
from support.disk_tree import DiskTree

CORE, CACHE, FULL = UnifiedTreeCore, UnifiedRadixCache, FullComponent
Change = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def default_server(monkeypatch: pytest.MonkeyPatch) -> None:
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))
    monkeypatch.setattr(OffsetWalkCore, "walks_by_offsets", True)
    for name in ("SWITCHED_OFF", "UNCALLED_HOOKS"):
        monkeypatch.setattr(releases, name, type(getattr(releases, name))())


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_the_installed_sglang_passes(page_size: int) -> None:
    self_test.check_device_tier(new_cache, page_size)
    check_overrides(*OVERRIDING_CLASSES, CanopyStorage)


def _map_result(change: Change) -> Change:
    return lambda original: lambda *args, **kwargs: change(original(*args, **kwargs))


def _do_nothing(_original: Any) -> Any:
    return lambda *_a, **_k: None


def _call_twice(original: Any) -> Any:
    return lambda self, *args: (original(self, *args), original(self, *args))[1]


def _rename_keyword(old_name: str, new_name: str) -> Change:
    def change(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if old_name in kwargs:
                raise TypeError(f"unexpected keyword argument {old_name!r}; {new_name!r} is new")
            return function(*args, **kwargs)

        return call

    return change


def _drop_leaf(original: Any) -> Any:
    def add(self: Any, *args: Any, **kwargs: Any) -> Any:
        node = original(self, *args, **kwargs)
        self.evictable_device_leaves.discard(node)
        return node

    return add


def _split_one_page_later(original: Any) -> Any:
    def split(self: Any, key: Any, child: Any, length: int) -> Any:
        later = length + self.page_size
        return original(self, key, child, later if later < len(key) else length)

    return split


def _lose_first_slots(original: Any) -> Any:
    later = lambda frees: {kind: slots[1:] for kind, slots in frees.items()}  # noqa: E731
    return lambda self, frees, *rest: original(self, later(frees), *rest)


TREE_FAULTS: dict[str, tuple[type, str, Change]] = {
    "a keyword is renamed": (CORE, "_add_new_node", _rename_keyword("session_id", "session")),
    "a result is a number": (CORE, "evict_device_leaf", _map_result(attrgetter("unbacked_tokens"))),
    "a lock is not taken": (
        *(FULL, "acquire_component_lock"),
        lambda _: lambda self, node, result, **_k: result,
    ),
    "a lock is not released": (FULL, "release_component_lock", _do_nothing),
    "a node is split elsewhere": (CORE, "_split_node", _split_one_page_later),
    "a split takes one more argument": (
        *(CORE, "_split_node"),
        lambda original: lambda self, key, node, length, kind: original(self, key, node, length),
    ),
    "a new node is no leaf": (CORE, "_add_new_node", _drop_leaf),
    "no leaf is evictable": (CORE, "_is_device_leaf", lambda _: lambda *_a: False),
    "a field of the result is missing": (
        *(CORE, "match_prefix"),
        _map_result(lambda match: match._replace(device_prefix_len=None)),
    ),
    "freed slots are lost": (CACHE, "_free_values", _do_nothing),
    "a victim's first slots are lost": (CACHE, "_free_values", _lose_first_slots),
    "a store is not recorded": (Recorder, "record_store", _do_nothing),
    "a removal is recorded twice": (Recorder, "record_remove", _call_twice),
    "an allocation evicts nothing": (CACHE, "evict_for_alloc", _do_nothing),
    "a key is rounded to pages": (*(RadixKey, "page_aligned"), lambda _: lambda self, page: self),
    "nodes are kept when removed": (CORE, "_unregister_node", _do_nothing),
}
WALK_FAULTS: dict[str, tuple[type, str, Change]] = {
    "hits are counted twice": (CORE, "_inc_hit_count_and_check", _call_twice),
    "a match has another length": (
        *(CORE, "match_prefix"),
        _map_result(lambda match: match._replace(full_kv_hit_length=match.full_kv_hit_length + 1)),
    ),
}


HOST_FAULTS: dict[str, tuple[type, str, Change]] = {
    "loaded KV is exchanged": (
        *(CORE, "commit_load_back"),
        lambda load: lambda self, node, slots, *rest: load(self, node, slots.flip(0), *rest),
    )
}


def _change_signature(change: Callable[[list[Any]], list[Any]]) -> Change:
    def changed(original: Any) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs)

        signature = inspect.signature(original)
        parameters = change([*signature.parameters.values()])
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        function.__qualname__ = original.__qualname__
        return function

    return changed


def _add_parameter(parameters: list[Any]) -> list[Any]:
    return [*parameters, inspect.Parameter("reserve", inspect.Parameter.KEYWORD_ONLY)]


def _rename_last(parameters: list[Any]) -> list[Any]:
    return [*parameters[:-1], parameters[-1].replace(name="other")]


PARAMETER_FAULTS = {
    "an eviction takes one more keyword": (CACHE, "_evict_components", _add_parameter),
    "an insert's last parameter is renamed": (
        *(CacheComponent, "commit_insert_component_data"),
        _rename_last,
    ),
    "a victim's last parameter is renamed": (FULL, "_evict_device_next_node", _rename_last),
    "a removal states its reason": (KVCacheEventRecorder, "record_remove", _add_parameter),
}


@pytest.mark.parametrize("fault", TREE_FAULTS)
def test_a_changed_tree_is_refused(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, change = TREE_FAULTS[fault]
    monkeypatch.setattr(owner, attribute, change(getattr(owner, attribute)))
    with pytest.raises(CanopyError, match=r"differs from the tested ones \(0\.5\.22 to"):
        check_tree(4)


@pytest.mark.parametrize("fault", WALK_FAULTS)
def test_a_changed_walk_switches_canopys_off(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, change = WALK_FAULTS[fault]
    monkeypatch.setattr(owner, attribute, change(getattr(owner, attribute)))
    check_tree(4)
    assert [*releases.SWITCHED_OFF] == ["walk by offsets"]
    assert "step" in releases.SWITCHED_OFF["walk by offsets"]
    assert not OffsetWalkCore.walks_by_offsets


def _host_tier(page_size: int, write_policy: str) -> ServerArgs:
    """Arguments of a server with a host tier, of any size, for this process."""
    arguments = ServerArgs(
        model_path="dummy",
        page_size=page_size,
        hicache_size=1 << 20,
        hicache_io_backend="direct",
        hicache_mem_layout="layer_first",
        hicache_write_policy=write_policy,
    )
    set_global_server_args_for_scheduler(arguments)
    canopy_cpu.install()
    HookRegistry.apply_hooks()
    return arguments


@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("write_policy", ["write_through", "write_through_selective", "write_back"])
def test_the_installed_sglangs_host_tier_passes(page_size: int, write_policy: str) -> None:
    tier_self_test.check_host_tier(new_cache, page_size, _host_tier(page_size, write_policy), "cpu")
    assert get_memory().hicache_size == 1 << 20


@pytest.mark.parametrize("fault", HOST_FAULTS)
def test_a_changed_host_tier_is_refused(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = _host_tier(4, "write_back")
    owner, attribute, change = HOST_FAULTS[fault]
    monkeypatch.setattr(owner, attribute, change(getattr(owner, attribute)))
    with pytest.raises(CanopyError, match="host tier differs from the tested ones"):
        tier_self_test.check_host_tier(new_cache, 4, arguments, "cpu")


def test_a_page_at_another_address_is_refused(tmp_path, monkeypatch) -> None:
    pool = DiskTree(tmp_path, page_size=4).storage.mem_pool_host
    check_page(pool)
    assert pool.available_size() == pool.size
    find = type(pool).get_page_buffer_meta
    monkeypatch.setattr(type(pool), "get_page_buffer_meta", lambda self, slot: find(self, slot + 4))
    with pytest.raises(CanopyError, match="differs from the page written"):
        check_page(pool)


@pytest.mark.parametrize("fault", PARAMETER_FAULTS)
def test_other_parameters_are_refused_by_name(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, change = PARAMETER_FAULTS[fault]
    monkeypatch.setattr(owner, attribute, _change_signature(change)(getattr(owner, attribute)))
    with pytest.raises(CanopyError, match=rf"{attribute} of this SGLang has other parameters"):
        check_overrides(*OVERRIDING_CLASSES)


def test_an_optional_hook_without_its_function_is_switched_off() -> None:
    (hook,) = [hook for hook in HOOKS if hook.target.endswith("._get_scheduler_first_token_time")]
    absent_hook = dataclasses.replace(hook, target=f"{hook.target}_absent")
    check_signature(absent_hook)
    absent_hook.register()
    assert absent_hook.is_in_place()
    assert hook.fallback in releases.SWITCHED_OFF[absent_hook.target]


def test_hooks_that_sglang_does_not_call_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HookRegistry, "register", lambda *_: None)
    first_hooks = [h for h in HOOKS if h.is_on_first_request and hasattr(*_find_owner(h.target))]
    for hook in first_hooks:
        hook.register()
    releases.UNCALLED_HOOKS.difference_update(hook.target for hook in first_hooks[1:])
    releases.record_uncalled_hooks()
    assert [*releases.SWITCHED_OFF] == [first_hooks[0].target]
