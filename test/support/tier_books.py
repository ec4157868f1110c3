"""A check of counters: the tokens that entered a tier and did not leave it are in the tier."""

from typing import Any

from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_canopy.radix.counters import DEVICE, HOST, TIERS


class TierBooks:
    """Compares a core's counters with its nodes, also after the tree was reset."""

    def __init__(self, core: Any) -> None:
        self.core, self._reset_core = core, core.reset
        self._emptied_tokens = {DEVICE: 0, HOST: 0}
        core.reset = self._empty

    def _empty(self) -> None:
        self._reset_core()
        self._emptied_tokens = {tier: self._counted_tokens(tier) for tier in self._emptied_tokens}

    def _counted_tokens(self, tier: int) -> int:
        rows = [row.tiers[tier] for row in self.core.live.counters.all_counts()]
        return sum(row.entered_tokens - sum(row.evicted_tokens) for row in rows)

    def _tokens_in_tier(self, tier: int) -> int:
        """Tokens in the tier; a copy counts once SGLang has finished it."""
        tokens = 0
        for node in self.core._node_arena.values():
            component_data = node.component_data[ComponentType.FULL]
            is_in_tier = tier == DEVICE or node.write_through_pending_id is None
            slots = component_data.value if tier == DEVICE else component_data.host_value
            tokens += len(slots) if slots is not None and is_in_tier else 0
        return tokens

    def check(self) -> None:
        """Raises AssertionError for a tier whose counters differ from its nodes."""
        for tier, emptied_tokens in self._emptied_tokens.items():
            expected_tokens = self._counted_tokens(tier) - emptied_tokens
            tokens = self._tokens_in_tier(tier)
            assert tokens == expected_tokens, (TIERS[tier], tokens, expected_tokens)
