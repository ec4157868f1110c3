"""SGLang's cache, with a shorter eviction path for a single tier."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_canopy.thread_time import timed_method

if TYPE_CHECKING:
    from sglang_canopy.radix.core import CanopyTreeCore

logger = logging.getLogger(__name__)

_FULL = ComponentType.FULL


class CanopyRadixCache(UnifiedRadixCache):
    """``UnifiedRadixCache`` over a ``CanopyTreeCore``.

    SGLang evicts victim by victim in resumable steps, so that a host copy can be made between two
    of them. Without a lower tier no copy is needed: the victims of one call are deleted in one pass
    and their slots freed together. With sliding windows or states SGLang's steps are used, since it
    evicts those in its own order.
    """

    tree_core: CanopyTreeCore

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tree_core.disk.attach(self)
        self.drain_s = self.tree_core.live.tiers.drain_s
        """Seconds for the drain at shutdown."""

    def init_hicache(self, server_args: Any, params: Any) -> None:
        super().init_hicache(server_args, params)
        if self.host_memory_mode != "buffer_only":
            self.tree_core.live.host_tokens = int(self.cache_controller.mem_pool_host.size)

    def release_host_resources(self) -> None:
        """Drain to the disk tier first: SGLang calls this after a scheduler's last request."""
        try:
            self.tree_core.disk.drain(self.drain_s)
        except Exception:
            logger.exception("Canopy disk tier: not closed")
        super().release_host_resources()

    def checkpoint_into_tree(self, req: Any, **options: Any) -> None:
        core = self.tree_core
        core.inserting = core.requests.admit(req)
        try:
            super().checkpoint_into_tree(req, **options)
        finally:
            core.inserting = None

    def advance_unpublished_req(self, req: Any) -> None:
        core = self.tree_core
        core.inserting = core.requests.admit(req)
        try:
            super().advance_unpublished_req(req)
        finally:
            core.inserting = None

    @timed_method
    def _evict_components(
        self,
        request_by_type: dict[ComponentType, int],
        tracker: dict[ComponentType, int],
        available_size_targets: dict[ComponentType, tuple[ComponentType, int]] | None = None,
        *,
        allocation_reclaim_satisfied: Any = None,
    ) -> None:
        targets = available_size_targets or {}
        if (
            len(self.tree_components) > 1
            or self.cache_controller is not None
            or self.linker is not None
            or allocation_reclaim_satisfied is not None
        ):
            # For an allocation, SGLang requests the eviction of everything and stops at its target.
            if _FULL in targets and targets[_FULL][0] is _FULL:
                self.tree_core.shortfall = lambda: self._shortfall(targets)
            try:
                super()._evict_components(
                    request_by_type,
                    tracker,
                    available_size_targets,
                    allocation_reclaim_satisfied=allocation_reclaim_satisfied,
                )
            finally:
                self.tree_core.shortfall = None
            return
        need = request_by_type[_FULL]
        if _FULL in targets:
            need = min(need, self._shortfall(targets))
        while need > 0:
            frees: dict[ComponentType, list] = {_FULL: []}
            try:
                freed = self.tree_core.delete_leaves(need, frees)
            finally:  # free the slots of removed leaves, even if the next leaf failed
                self._free_values(frees, {})
            tracker[_FULL] += freed
            if freed == 0 or _FULL not in targets:
                return
            # An allocator may hold back freed slots, so continue until its target is met.
            need = self._shortfall(targets)

    def _shortfall(self, targets: dict[ComponentType, tuple[ComponentType, int]]) -> int:
        """Return the tokens that an allocation still lacks."""
        component, target = targets[_FULL]
        return target - self._component_available_size(component)
