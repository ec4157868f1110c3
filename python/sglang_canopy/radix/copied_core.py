"""The tree core's part in copying ahead: it tells ``CopyAhead`` what becomes of the copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import DriveHostEvictionResult

from sglang_canopy.radix.copy_ahead import AUTO, CopyAhead
from sglang_canopy.radix.tier_traffic import TierTrafficCore

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.components import ComponentType, TreeComponent
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode


class CopiedCore(TierTrafficCore):
    """Reports to ``ahead``, and gives up copies on the host in the order that it asks for."""

    def __init__(
        self, params: CacheInitParams, components: dict[ComponentType, TreeComponent]
    ) -> None:
        tokens = params.canopy.tiers.copy_ahead
        self.ahead = None if tokens is None else CopyAhead(self, None if tokens == AUTO else tokens)
        """``None``: nothing is copied ahead."""
        super().__init__(params, components)

    def reset(self) -> None:
        super().reset()
        if self.ahead is not None:
            self.ahead.clear()

    def _split_node(self, key: Any, child: UnifiedTreeNode, split_len: int) -> Any:
        head, action = super()._split_node(key, child, split_len)
        if self.ahead is not None:
            self.ahead.split(child, head)
        return head, action

    # ---- out of a tier ----

    def _demote(self, node: UnifiedTreeNode, *args: Any, **kwargs: Any) -> None:
        super()._demote(node, *args, **kwargs)
        if self.ahead is not None:
            self.ahead.left_device(node)

    def _delete_unbacked_device_leaf(
        self, node: UnifiedTreeNode, *args: Any, **kwargs: Any
    ) -> None:
        super()._delete_unbacked_device_leaf(node, *args, **kwargs)
        if self.ahead is not None:
            self.ahead.left_device(node)

    def _release_full_host_duplicate(
        self, node: UnifiedTreeNode, *args: Any, **kwargs: Any
    ) -> None:
        super()._release_full_host_duplicate(node, *args, **kwargs)
        if self.ahead is not None:
            self.ahead.left_host(node)

    def _unregister_node(self, node: UnifiedTreeNode) -> None:
        super()._unregister_node(node)
        if self.ahead is not None:
            self.ahead.gone(node)

    # ---- which copies the host gives up ----

    def drive_host_eviction(self, component_type: ComponentType, num_tokens: int) -> Any:
        result = super().drive_host_eviction(component_type, num_tokens)
        if self.ahead is not None and not self.ahead.busy and self.is_write_back:
            # The last resort of a full host: copies of what is the next to leave the device.
            super()._reclaim_full_host_duplicates(
                num_tokens,
                result.tracker,
                result.device_frees,
                result.host_frees,
                cache_actions=result.cache_actions,
            )
        return result

    def _reclaim_full_host_duplicates(
        self, num_tokens: int, tracker: Any, device_frees: Any, host_frees: Any, cache_actions: Any
    ) -> None:
        # SGLang gives up every copy of what the device has before anything that it has not.
        if self.ahead is not None:
            self._give_up(num_tokens, tracker, device_frees, host_frees, cache_actions)
            return
        super()._reclaim_full_host_duplicates(
            num_tokens, tracker, device_frees, host_frees, cache_actions=cache_actions
        )

    def give_up_copies(self, tokens: int) -> DriveHostEvictionResult:
        """Free ``tokens`` of the host that hold what is not next to leave the device."""
        result = DriveHostEvictionResult()
        self._give_up(
            tokens, result.tracker, result.device_frees, result.host_frees, result.cache_actions
        )
        return result

    def _give_up(
        self, tokens: int, tracker: Any, device_frees: Any, host_frees: Any, actions: Any
    ) -> None:
        assert self.ahead is not None
        released = []
        for node in self.full_host_duplicates.values():
            if tracker[BASE_COMPONENT_TYPE] >= tokens:
                break
            if self.ahead.spares(node) or not self._can_reclaim_full_host_duplicate(node):
                continue
            self._release_full_host_duplicate(
                node, tracker, device_frees, host_frees, cache_actions=actions
            )
            released.append(node.id)
        for node_id in released:
            del self.full_host_duplicates[node_id]
