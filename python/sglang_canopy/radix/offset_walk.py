"""SGLang's tree core, walking a long key by offsets.

SGLang's insert slices the rest of the key at every node, and its match and insert copy the whole
key once more to round it down to pages. Here a walk copies no more of a key than it compares, and
the rest of it once, where a new leaf needs it. What is found, split, freed and created is the
same, in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.cache_action import FreeDeviceKV
from sglang.srt.mem_cache.unified_cache.components import (
    BASE_COMPONENT_TYPE,
    get_and_increase_time_counter,
)
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

from sglang_canopy.radix.key_cursor import CappedKey, KeyCursor, has_offsets

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams


class OffsetWalkCore(UnifiedTreeCore):
    """A tree core of full attention alone; with more components the walks are SGLang's."""

    def match_prefix(self, params: MatchPrefixParams) -> Any:
        key = params.key
        if self.page_size > 1 and self._walks(key):
            key, _ = key.maybe_to_bigram_view(self.is_eagle)
            key = CappedKey.of(key).page_aligned(self.page_size)
            return self._match_prefix_helper(key, params) if len(key) else self._empty_match_result
        return super().match_prefix(params)

    def _match_prefix_helper(self, key: RadixKey, params: MatchPrefixParams) -> Any:
        if not self._walks(key):
            return super()._match_prefix_helper(key, params)
        node = best = on_device = self.root_node
        values: list[Any] = []
        device_nodes = matched = 0
        action = None
        with KeyCursor(key, self.page_size) as cursor:
            while (child := cursor.child(node)) is not None:
                data = child.component_data[BASE_COMPONENT_TYPE]
                if data.value is None and data.host_value is None:
                    break
                length = cursor.advance(child)
                if not length:
                    break
                matched += length
                if not cursor.whole:
                    child, action = self._split_node(child.key, child, length)
                    data = child.component_data[BASE_COMPONENT_TYPE]
                node = child
                if data.value is not None:
                    values.append(data.value)
                    best = on_device = node
                    device_nodes = len(values)
                elif self.enable_hicache:
                    best = node
                if not cursor.whole:
                    break
        return self._match_post_processor(
            params,
            values,
            best,
            on_device,
            device_nodes,
            matched,
            action,
            last_visited_node_id=None if node is self.root_node else node.id,
            device_validators=self._create_match_validators(params, match_device_only=True),
        )

    def begin_insert(self, params: InsertParams) -> Any:
        key = params.key
        if self.page_size > 1 and params.value is not None and self._walks(key):
            key, params.value = key.maybe_to_bigram_view(self.is_eagle, params.value)
            params.key = CappedKey.of(key)
        return super().begin_insert(params)

    def _insert_walk_step(self, state: Any) -> None:
        if not self._walks(state.key) or not self._insert_along_whole_nodes(state):
            super()._insert_walk_step(state)

    def _insert_along_whole_nodes(self, state: Any) -> bool:
        """Walk the nodes of which the key has every token, as far as they are on the device.

        Returns whether an action is now to be done before the walk goes on.
        """
        params, key, priority = state.params, state.key, state.priority
        own_from, inserted = params.prev_prefix_len, params.inserted_len
        actions, node = state.pending_actions, state.node
        start = total = state.total_prefix_length
        backup = False
        with KeyCursor(key, self.page_size) as cursor:
            while not backup and (child := cursor.child(node)) is not None:
                if child.component_data[BASE_COMPONENT_TYPE].value is None:
                    break
                if not cursor.advance_whole(child):
                    break
                node = child
                node.last_access_time = get_and_increase_time_counter()
                if node.priority < priority:
                    node.priority = priority
                before, total = total, start + cursor.offset
                if total > own_from:  # the tree has what the request computed again
                    duplicate = slice(max(before, own_from) - start, total - start)
                    actions.append(FreeDeviceKV([state.value[duplicate]]))
                if total > inserted and self._inc_hit_count_and_check(node):
                    actions.append(self._build_backup_kv_action(node))
                    backup = True
        if total > start:
            state.node, state.total_prefix_length = node, total
            state.value = state.value[total - start :]
        if total > start or key.limit is not None:
            state.key = key[total - start :]
        return backup

    def _walks(self, key: RadixKey) -> bool:
        return len(self.components) == 1 and has_offsets(key)
