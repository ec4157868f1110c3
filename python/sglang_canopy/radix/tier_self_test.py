"""Test the host tier when a scheduler has built its cache: a small cache with a host pool evicts, copies
and loads back. ``storage/page_self_test.py`` tests the disk tier."""

from __future__ import annotations

import atexit
import random
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams
from sglang.srt.runtime_context import get_memory

from sglang_canopy import releases
from sglang_canopy.radix.counters import HOST
from sglang_canopy.radix.self_test import (
    CANOPY_POLICY,
    MakeCache,
    SmallTree,
    difference_error,
    draw_paths,
    silence_sglangs_log,
)

HEAD_DIM = 64
"""Values of a token's key: kernels copy whole vectors."""


def check_host_tier(make_cache: MakeCache, page_size: int, server_args: Any, device: str) -> None:
    """Test a small host tier like this server's. Raises ``CanopyError`` with the failed step."""
    memory_settings = {"hicache_size": 0, "hicache_ratio": 2.0, "hicache_storage_backend": None}
    with silence_sglangs_log(), get_memory().override(**memory_settings):
        tree = _HostTree(page_size, CANOPY_POLICY, make_cache, device, HEAD_DIM)
        try:
            tree.cache.init_hicache(server_args, tree.params)
        except Exception as error:  # a layout that SGLang has for this server's model only
            releases.switch_off("test of the host tier", f"SGLang builds no small one: {error!r}")
            return
        finally:
            atexit.unregister(tree.cache.shutdown)
    tree.cache.write_through_threshold, tree.cache.load_back_threshold = 1, 0
    try:
        _fill_and_read(tree)
        tree.cache.release_host_resources()
    except Exception as error:
        raise difference_error("host tier", error) from error


class _Request(SimpleNamespace):
    """A request with the fields that a load reads; another field is ``None``."""

    def __getattr__(self, name: str) -> None:
        return None


class _HostTree(SmallTree):
    def compute(self, slots: torch.Tensor, tokens: list[int]) -> None:
        for buffer in (*self.kv_pool.k_buffer, *self.kv_pool.v_buffer):
            buffer[slots] = torch.tensor(tokens, dtype=buffer.dtype, device=buffer.device)[
                :, None, None
            ]

    def finish_copies(self) -> None:
        """Finish every copy, and check both tiers."""
        self.cache.writing_check(write_back=True)
        self.cache.loading_check()
        self.check()
        self.check_slots(HOST, "host_value", self.cache.cache_controller.mem_pool_host)

    def make_room(self, tokens: int) -> None:
        missing_tokens = tokens - self.allocator.available_size()
        if missing_tokens > 0:
            self.cache.evict(EvictParams(num_tokens=missing_tokens))

    def load_back(self, path: list[int]) -> int:
        """Load a path's host copy. Return its tokens; their KV on the device is compared."""
        match = self.match(path)
        if not match.host_hit_length:
            return 0
        request = _Request(
            rid="canopy-self-test",
            last_node=match.last_device_node,
            host_hit_length=match.host_hit_length,
            swa_host_hit_length=0,
            mamba_host_hit_length=0,
            prefix_indices=[],
            kv=_Request(),
        )
        self.cache.init_load_back(
            InitLoadBackParams(match.best_match_node, match.host_hit_length, req=request)
        )
        self.cache.cache_controller.start_loading()
        self.finish_copies()
        slots = self.device_slots(self.match(path))
        for buffer in (*self.kv_pool.k_buffer, *self.kv_pool.v_buffer):
            kv = buffer[slots][:, 0, :].cpu()
            expected = torch.tensor(path[: len(slots)], dtype=kv.dtype)[:, None].expand_as(kv)
            if not torch.equal(kv, expected):
                raise AssertionError("KV that was loaded from the host is another's")
        return int(match.host_hit_length)


def _fill_and_read(tree: _HostTree) -> None:
    """Insert and load more than the device holds, then more than the host holds."""
    reused, loaded_tokens = draw_paths(random.Random(3), tree.page_size)[:4], 0
    fillers = [[1000 + 10 * i] * (24 * tree.page_size) for i in range(12)]
    for path in (*reused, *fillers[:4], *reused, *fillers[4:], fillers[7]):
        tree.make_room(24 * tree.page_size)
        loaded_tokens += tree.load_back(path)
        tree.insert(path)
        tree.finish_copies()
    if not loaded_tokens:
        raise AssertionError("the host tier kept nothing that the device evicted")
