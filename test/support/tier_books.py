"""Tokens that entered a tier and did not leave it are in the tier."""

from typing import Any

from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_canopy.radix.counters import DEVICE, HOST, TIERS


class TierBooks:
    """Compares a core's counters with its nodes, also after the tree was emptied."""

    def __init__(self, core: Any) -> None:
        self.core, self._reset = core, core.reset
        self._emptied_tokens = {DEVICE: 0, HOST: 0}
        core.reset = self._empty

    def _empty(self) -> None:
        self._reset()
        self._emptied_tokens = {tier: self._counted_tokens(tier) for tier in self._emptied_tokens}

    def _counted_tokens(self, tier: int) -> int:
        rows = [row.tiers[tier] for row in self.core.live.counters.rows()]
        return sum(row.entered_tokens - sum(row.evicted_tokens) for row in rows)

    def _tokens_in_tier(self, tier: int) -> int:
        """Tokens in the tier; a copy counts once SGLang has finished it."""
        tokens = 0
        for node in self.core._node_arena.values():
            data = node.component_data[ComponentType.FULL]
            is_in_tier = tier == DEVICE or node.write_through_pending_id is None
            value = data.value if tier == DEVICE else data.host_value
            tokens += 0 if value is None or not is_in_tier else len(value)
        return tokens

    def check(self) -> None:
        for tier, emptied_tokens in self._emptied_tokens.items():
            expected = self._counted_tokens(tier) - emptied_tokens
            tokens = self._tokens_in_tier(tier)
            assert tokens == expected, (TIERS[tier], tokens, expected)
