"""A real ``UnifiedRadixCache`` on CPU tensors, with or without Canopy in it."""

import atexit
import itertools
from array import array
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sglang_canopy.config.tiers import TierOptions
from sglang_canopy.radix.cache import CanopyRadixCache
from sglang_canopy.radix.live_request import LiveRequest
from sglang_canopy.records import Request
from sglang_canopy.server.scheduler.cache_factory import install_core, prepare_params
from support.evictable_recount import recount_core

_rids = itertools.count()


class LiveTree:
    """The tree, its allocator, and the few calls that a scheduler makes.

    ``tokens``: slots of the device pool. ``policy`` is a Canopy policy's name; with ``sglang_core``
    ("python" or "rust") it is SGLang's. ``has_pairs``: keys as under EAGLE, where n tokens are
    n - 1 pairs. ``has_latent_kv``: KV as in MLA. ``rank_group``: process group of the replica's ranks.
    """

    def __init__(
        self,
        tokens: int,
        policy: str = "canopy-lru",
        config: dict[str, Any] | None = None,
        page_size: int = 1,
        sglang_core: str | None = None,
        host_tokens: int = 0,
        write_policy: str = "write_through",
        tiers: TierOptions | None = None,
        storage_arguments: dict[str, Any] | None = None,
        has_sessions: bool = False,
        has_pairs: bool = False,
        emits_kv_events: bool = False,
        has_floor: bool = False,
        has_latent_kv: bool = False,
        rank_group: Any = None,
    ) -> None:
        arguments: dict[str, Any] = {
            "model_path": "dummy",
            "page_size": page_size,
            "hicache_io_backend": "direct",
            "hicache_mem_layout": "layer_first",
            "hicache_write_policy": write_policy,
            "hicache_ratio": max(host_tokens / tokens, 1e-9),
        }
        server_args = ServerArgs(**(arguments | (storage_arguments or {})))
        set_global_server_args_for_scheduler(server_args)
        pool = ReqToTokenPool(size=8, max_context_len=4096, device="cpu", enable_memory_saver=False)
        placement = {"dtype": torch.float16, "device": "cpu"}
        pool_class, kv_shape = MHATokenToKVPool, {"head_num": 1, "head_dim": 8}
        if has_latent_kv:
            pool_class, kv_shape = MLATokenToKVPool, {"kv_lora_rank": 8, "qk_rope_head_dim": 4}
        kv_pool = pool_class(
            size=tokens, page_size=page_size, layer_num=1, enable_memory_saver=False, **kv_shape, **placement
        )  # fmt: skip
        paged = (PagedTokenToKVPoolAllocator, tokens, page_size)
        allocator_class, *sizes = paged if page_size > 1 else (TokenToKVPoolAllocator, tokens)
        allocator = allocator_class(*sizes, kvcache=kv_pool, need_sort=False, **placement)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=pool,
            token_to_kv_pool_allocator=allocator,
            page_size=page_size,
            tree_components=(ComponentType.FULL,),
            eviction_policy=policy,
            eviction_policy_config=config,
            enable_session_radix_cache=has_sessions,
            is_eagle=has_pairs,
            tp_cache_group=rank_group,
            enable_kv_cache_events=emits_kv_events,
        )
        self.has_pairs = has_pairs
        if sglang_core is None:
            install_core()
            prepare_params(params, tiers, floor=has_floor)
        else:
            params.tree_core_backend = sglang_core
        self.page_size = page_size
        self.allocator = allocator
        self.cache = (CanopyRadixCache if sglang_core is None else UnifiedRadixCache)(params)
        self.core = self.cache.tree_core
        if host_tokens:
            from canopy_cpu import install

            install()
            HookRegistry.apply_hooks()
            self.cache.init_hicache(server_args, params)
            atexit.unregister(self.cache.shutdown)
            self.cache.write_through_threshold = 1
            self.cache.load_back_threshold = 0

    def request(self, time: float = 0.0, **fields: Any) -> LiveRequest:
        """Return a new request, which the tree has received as from the scheduler."""
        request = LiveRequest(time=time, **fields)
        self.core.requests.arrive(request)
        return request

    def insert(
        self,
        tokens: list[int],
        request: Request | None = None,
        salt: str | None = None,
        extra_key: str | None = None,
    ):
        """Insert ``tokens`` as freshly computed KV; evict to make room. Return SGLang's ``InsertResult``."""
        key = self.key(tokens, salt, extra_key).page_aligned(self.page_size)
        root_id = self.core.root_node.id
        match = self.cache.match_prefix(MatchPrefixParams(key=key))
        lock = self.cache.lock(match.last_device_node)
        new_tokens = len(key) - match.device_prefix_len
        evict_tokens = new_tokens - self.allocator.available_size()
        if evict_tokens > 0:
            self.cache.evict(EvictParams(num_tokens=evict_tokens))
        new_kv = self.allocator.alloc(new_tokens)
        assert new_kv is not None, (new_tokens, self.allocator.available_size())
        self.write_kv(new_kv, tokens[match.device_prefix_len : len(key)])
        slots = self.core.collect_full_device_indices(match.last_device_node, root_id)
        params = InsertParams(key=key, value=torch.cat([slots, new_kv]), prev_prefix_len=len(slots))
        params.canopy = request
        result = self.cache.insert(params)
        self.cache.unlock(lock)
        self.settle()
        return result

    def key(self, tokens: list[int], salt: str | None = None, extra_key: str | None = None):
        """The key of a path, as the scheduler makes it."""
        return RadixKey(array("q", tokens), extra_key, self.has_pairs, cache_salt=salt)

    def match_params(self, tokens: list[int]) -> MatchPrefixParams:
        """The parameters of a look-up of a path."""
        return MatchPrefixParams(key=self.key(tokens))

    def write_kv(self, slots: torch.Tensor, tokens: list[int]) -> None:
        """Write KV as a forward pass does: here every token's KV is its id."""
        for buffer in self.buffers():
            buffer[slots] = torch.tensor(tokens, dtype=buffer.dtype)[:, None, None]

    def kv(self, tokens: list[int]) -> list[int]:
        """The device's KV of the cached part of a path, as token ids."""
        match = self.cache.match_prefix(MatchPrefixParams(key=self.key(tokens)))
        core = self.core
        slots = core.collect_full_device_indices(match.last_device_node, core.root_node.id)
        return self.buffers()[-1][slots][:, -1, -1].int().tolist()

    def buffers(self) -> list[torch.Tensor]:
        pool = self.allocator.get_kvcache()
        is_latent = isinstance(pool, MLATokenToKVPool)
        return pool.kv_buffer if is_latent else [*pool.k_buffer, *pool.v_buffer]

    def match(self, tokens: list[int], salt: str | None = None, extra_key: str | None = None):
        """Return the tokens of the longest prefix on the device."""
        key = self.key(tokens, salt, extra_key)
        return self.cache.match_prefix(MatchPrefixParams(key=key)).device_prefix_len

    def settle(self) -> None:
        """Let every copy between the tiers finish."""
        if self.cache.cache_controller is not None:
            self.cache.writing_check(write_back=True)
            self.cache.loading_check()

    def load_back(self, tokens: list[int], extra_key: str | None = None) -> int:
        """Load a path from the host to the device, as SGLang does on admission. Return the loaded tokens."""
        key = self.key(tokens, extra_key=extra_key)
        match = self.cache.match_prefix(MatchPrefixParams(key=key))
        if match.host_hit_length == 0:
            return 0
        req = SimpleNamespace(
            rid=next(_rids),
            last_node=match.last_device_node,
            swa_host_hit_length=0,
            mamba_host_hit_length=0,
            host_hit_length=match.host_hit_length,
            prefix_indices=[],
            kv=SimpleNamespace(mamba_pool_idx=None),
            time_stats=None,
        )
        loaded, _ = self.cache.init_load_back(
            InitLoadBackParams(
                match.best_match_node, host_hit_length=match.host_hit_length, req=req
            )
        )
        self.cache.cache_controller.start_loading()
        self.settle()
        return loaded

    def evict(self, tokens: int) -> None:
        self.cache.evict(EvictParams(num_tokens=tokens))

    def serve(self, tokens: list[int], time: float, **fields: Any) -> int:
        """Serve one request: look up, make room, insert, finish. Return the tokens hit."""
        request = self.request(time, prompt_tokens=len(tokens), **fields)
        hit_tokens = self.match(tokens)
        request.cached_tokens = hit_tokens
        self.core.requests.finish(request)
        self.insert(tokens, request)
        return hit_tokens


class FakeReq(SimpleNamespace):
    """A request that is compared by identity, as SGLang's ``Req``."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def fake_req(tokens: list[int], output: list[int], stamp: dict | None = None, **overrides: Any):
    """The attributes of SGLang's ``Req`` that Canopy reads."""
    params = {"canopy": stamp} if stamp else None
    defaults = {
        "rid": next(_rids),
        "origin_input_ids": tokens,
        "output_ids": output,
        "sampling_params": SimpleNamespace(custom_params=params, max_new_tokens=len(output)),
        "extra_key": None,
        "retraction_count": 0,
        "cache_salt": None,
        "cached_tokens": 0,
        "cached_tokens_device": 0,
        "cached_tokens_host": 0,
        "cached_tokens_storage": 0,
        "session": None,
        "finished_reason": SimpleNamespace(),
        "to_finish": None,
        "priority": None,
    }
    return FakeReq(**{**defaults, **overrides})


def check_tree(tree: LiveTree) -> None:
    """Recount sizes, leaf sets, metadata and the policies' leaves."""
    core = tree.core
    device_tokens = host_tokens = 0
    for node in core._node_arena.values():
        if node is core.root_node:
            continue
        leaf, component_data = node.canopy, node.component_data[ComponentType.FULL]
        assert leaf.hits >= 0
        if leaf.hits:
            assert leaf.created <= leaf.last_access <= core.clock.now
        device_tokens += 0 if component_data.value is None else len(component_data.value)
        host_tokens += 0 if component_data.host_value is None else len(component_data.host_value)
    assert device_tokens + tree.allocator.available_size() == tree.allocator.size
    recount_core(core)
    if tree.cache.cache_controller is not None:
        pool = tree.cache.cache_controller.mem_pool_host
        assert host_tokens + pool.available_size() == pool.size
    tree.cache.sanity_check()
