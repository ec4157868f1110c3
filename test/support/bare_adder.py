"""SGLang's own prefill adder over an empty pool: its budgets and verdicts, without a server."""

import contextlib
from types import SimpleNamespace

import pytest


def bare_adder(page_tokens: int):
    """SGLang's adder (a class that takes the pool's free tokens and the tokens of a prefill window, or
    ``None`` for whole prompts) and its module. ``new_ratio``: SGLang's ``new_token_ratio``. Skips without sglang."""
    schedule_policy = pytest.importorskip("sglang.srt.managers.schedule_policy")
    from sglang.srt.mem_cache.prefill_budget import PrefillBudget

    class Adder(schedule_policy.PrefillAdder):
        def __init__(self, free_tokens: int, window_tokens: int | None, new_ratio=0.5) -> None:
            empty_cache = {"evictable_size": lambda: 0, "disable": False}
            self.tree_cache = SimpleNamespace(supports_mamba=lambda: False, **empty_cache)
            allocator = SimpleNamespace(page_size=page_tokens, available_size=lambda: free_tokens)
            self.memory_budget = PrefillBudget(allocator, self.tree_cache)
            self.new_token_ratio, self.page_size = new_ratio, page_tokens
            self.per_req_token_overhead, self.prefill_tile_block_m = page_tokens, 64
            self.rem_input_tokens, self.rem_chunk_tokens = 16384, window_tokens
            self.rem_mamba_slots = self.dllm_config = self.chunked_req_limit = None
            self.prefill_max_requests = self.prefill_delayer_single_pass = None
            self.kv_shard_scratch_spec = self.new_chunked_req = None
            self.exact_chunk_fill, self.kv_shard_granule = False, 0
            self.can_run_list, self.mamba_chunk_grid = [], 1
            self.log_hit_tokens = self.log_input_tokens = self.log_replay_tokens = 0

        @contextlib.contextmanager
        def _lock_node(self, node):
            yield

        def _mamba_gap_budget_for_req(self, *_, **__):
            return 0

        def _request_slot_reserve_for_req(self, *_, **__):
            return 0

        def _replay_len(self, *_):
            return 0

        def _account_prefill_cache_admission(self, *_):
            pass

    return Adder, schedule_policy
