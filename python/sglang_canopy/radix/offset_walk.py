"""SGLang's tree core, walking a long key by offsets.

SGLang's insert slices the rest of the key at every node, and its match and insert copy the whole key again
to round it down to pages. Here a walk copies only the compared parts of a key, and its rest once if a new
leaf needs it. The nodes found, split, freed and created are the same, in the same order.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
from sglang.srt.mem_cache.base_prefix_cache import InsertResult, MatchResult
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.cache_action import FreeDeviceKV
from sglang.srt.mem_cache.unified_cache.components import (
    BASE_COMPONENT_TYPE,
    get_and_increase_time_counter,
)
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import InsertStepResult

from sglang_canopy.releases import existing_fields

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

TOKEN_BYTES = 8
"""Bytes of a token id in a key's array."""
_COMPARED_IDS = 1 << 12
"""Token ids compared at once: enough to be fast, but few for keys that soon differ."""
_VISITED_FIELDS = existing_fields(MatchResult, "last_visited_node_id")


class CappedKey(RadixKey):
    """A key that is rounded down to pages without a copy."""

    __slots__ = ()

    @classmethod
    def share_tokens(cls, key: RadixKey) -> CappedKey:
        """Return an equal key that shares the tokens of ``key``."""
        return cls(key.token_ids, key.extra_key, key.is_bigram, key.limit, key.cache_salt)

    def page_aligned(self, page_size: int) -> RadixKey:
        length = len(self) // page_size * page_size
        limit = length + 1 if self.is_bigram and length else length
        return RadixKey(self.token_ids, self.extra_key, self.is_bigram, limit, self.cache_salt)


class KeyCursor:
    """Walks down a tree along ``key``: ``next_child``, then ``advance`` or ``advance_whole``. ``key``,
    or its first ``length`` tokens, must be whole pages."""

    __slots__ = (
        "_end",
        "_ids",
        "_ids_end",
        "_key",
        "_page_size",
        "_pair_tail",
        "is_whole",
        "offset",
    )

    def __init__(self, key: RadixKey, page_size: int, length: int | None = None) -> None:
        self._key = key
        self._ids: array[int] = key.token_ids
        self._page_size = page_size
        self._end = len(key) if length is None else length
        self._pair_tail = int(key.is_bigram)  # n pairs consist of n + 1 tokens
        self._ids_end = self._end + self._pair_tail if self._end else 0
        self.offset = 0
        """Tokens (pairs, in a key of pairs) before the cursor."""
        self.is_whole = True
        """Whether the last ``advance`` passed all tokens of its node."""

    def next_child(self, node: UnifiedTreeNode) -> UnifiedTreeNode | None:
        """Return the child of ``node`` that may continue the key, or ``None``. An only child is
        returned without comparing its first page: below the root all nodes are of one namespace, and
        building the key of a page takes longer than comparing it."""
        if self.offset >= self._end:
            return None
        children = node.children
        if len(children) == 1 and node.parent is not None:
            for only_child in children.values():
                return only_child
        return children.get(self._key.child_key_at(self.offset, self._page_size))

    def advance_whole(self, node: UnifiedTreeNode) -> bool:
        """Move past all tokens of ``node``, if the key continues with them."""
        ids = _own_ids(node.key)
        length = len(ids)
        end = self.offset + length
        if end > self._ids_end:
            return False
        if length <= _COMPARED_IDS:
            if self._ids[self.offset : end] != ids:
                return False
        elif self._count_common(ids) < length:
            return False
        self.offset = end - self._pair_tail
        return True

    def advance(self, node: UnifiedTreeNode) -> int:
        """Move past the leading pages of ``node`` that continue the key. Returns their tokens."""
        start_offset = self.offset
        self.is_whole = self.advance_whole(node)
        if not self.is_whole:
            common_tokens = self._count_common(_own_ids(node.key)) - self._pair_tail
            common_tokens = max(min(common_tokens, self._end - start_offset), 0)
            self.offset += common_tokens // self._page_size * self._page_size
        return self.offset - start_offset

    def _count_common(self, ids: array[int]) -> int:
        """Return the number of leading token ids that ``ids`` and the rest of the key share."""
        count = min(len(ids), self._ids_end - self.offset)
        for start in range(0, count, _COMPARED_IDS):
            stop = min(start + _COMPARED_IDS, count)
            key_ids, node_ids = self._ids[self.offset + start : self.offset + stop], ids[start:stop]
            if key_ids != node_ids:
                differs = np.frombuffer(key_ids, np.int64) != np.frombuffer(node_ids, np.int64)
                return start + int(differs.argmax())
        return count


def _own_ids(key: RadixKey) -> array[int]:
    return key.token_ids if key.limit is None else key.raw_token_ids()


class OffsetWalkCore(UnifiedTreeCore):
    """A tree core for full attention only; with more components SGLang's walks are used."""

    walks_by_offsets = True
    """Whether walks are by offsets, or all are SGLang's own."""

    def reset(self) -> None:
        super().reset()
        self._insert_actions: list[Any] = []
        """Actions of a one-step insert; the cache removes them as it performs them."""

    def match_prefix(self, params: MatchPrefixParams) -> Any:
        key = params.key
        if not self._can_walk(key):
            return super().match_prefix(params)
        key, _ = key.maybe_to_bigram_view(self.is_eagle)
        key = CappedKey.share_tokens(key).page_aligned(self.page_size)
        if not len(key):
            return self._empty_match_result
        root = node = best_node = device_node = self.root_node
        device_tokens = matched_tokens = 0
        action = None
        cursor = KeyCursor(key, self.page_size)
        while (child := cursor.next_child(node)) is not None:
            kv = child.component_data[BASE_COMPONENT_TYPE]
            if kv.value is None and kv.host_value is None:
                break
            node_tokens = cursor.advance(child)
            if not node_tokens:
                break
            matched_tokens += node_tokens
            if not cursor.is_whole:
                child, action = self._split_node(child.key, child, node_tokens)
                kv = child.component_data[BASE_COMPONENT_TYPE]
            node = child
            if kv.value is not None:
                best_node = device_node = node
                device_tokens += node_tokens
            elif self.enable_hicache:
                best_node = node
            if not cursor.is_whole:
                break
        _set_access_times(best_node)
        result = MatchResult(
            device_tokens,
            device_node,
            best_node if self.enable_hicache else device_node,
            best_node,
            full_kv_hit_length=matched_tokens,
            **dict.fromkeys(_VISITED_FIELDS, None if node is root else node.id),
        )
        result = self.components[0].finalize_match_result_in_tree_core(result, params, [], 0)
        return result._replace(
            last_device_node=result.last_device_node.id,
            last_host_node=result.last_host_node.id,
            best_match_node=result.best_match_node.id,
            cache_actions=[] if action is None else [action],
        )

    def begin_insert(self, params: InsertParams) -> Any:
        key = params.key
        if params.value is None or not self._can_walk(key):
            return super().begin_insert(params)
        key, params.value = key.maybe_to_bigram_view(self.is_eagle, params.value)
        # The insert must wait for copies to a lower tier, which are made between two nodes.
        needs_copies = self.enable_external_cache_linker or (
            self.enable_hicache and not self.is_write_back
        )
        if params.rotation_base is None and not needs_copies:
            length = len(key) // self.page_size * self.page_size
            if length:
                return self._insert_at_once(params, length)
        if self.page_size > 1:
            params.key = CappedKey.share_tokens(key)
        return super().begin_insert(params)

    def end_insert(self) -> list[Any]:
        # Duplicate KV must still be freed after an exception.
        actions, self._insert_actions = self._insert_actions, []
        return [*actions, *super().end_insert()]

    def _insert_at_once(self, params: InsertParams, length: int) -> InsertStepResult:
        """Perform SGLang's insert of the key's first ``length`` tokens in one step."""
        assert self._ongoing_insert_walk_state is None, "an insert within an insert"
        key, slots, priority = params.key, params.value, params.priority or 0
        own_kv_start, inserted_tokens = params.prev_prefix_len, params.inserted_len
        actions = self._insert_actions
        result = InsertResult(0, adopted_ranges={} if params.track_adopted_ranges else None)
        node, walked_tokens = self.root_node, 0
        node.last_access_time = get_and_increase_time_counter()
        node.priority = max(node.priority, priority)
        cursor = KeyCursor(key, self.page_size, length)
        while (child := cursor.next_child(node)) is not None:
            if not cursor.advance(child):
                break
            node_start, walked_tokens = walked_tokens, cursor.offset
            child.last_access_time = get_and_increase_time_counter()
            if not cursor.is_whole:
                child, action = self._split_node(child.key, child, walked_tokens - node_start)
                if action is not None:
                    actions.append(action)
            node = child
            if node.priority < priority:
                node.priority = priority
            if node.component_data[BASE_COMPONENT_TYPE].value is None:
                self._unevict_node_on_insert(
                    node, slots[node_start:walked_tokens], session_id=params.session_id
                )
                result.record_adopted_range(BASE_COMPONENT_TYPE, node_start, walked_tokens)
            elif walked_tokens > own_kv_start:  # the tree already has this KV
                actions.append(FreeDeviceKV([slots[max(node_start, own_kv_start) : walked_tokens]]))
            if walked_tokens > inserted_tokens and not self.is_write_back:
                node.hit_count += 1
        is_new_leaf = walked_tokens < length
        if is_new_leaf:
            # SGLang copies a key to round it down to pages, but keeps a key of single tokens as it
            # is.
            is_kept_as_is = self.page_size == 1 and walked_tokens == 0 and key.limit is None
            result.record_adopted_range(BASE_COMPONENT_TYPE, walked_tokens, length)
            node = self._add_new_node(
                node,
                key if is_kept_as_is else key[walked_tokens:length],
                slots[walked_tokens:length],
                priority=priority,
                session_id=params.session_id,
            )
            if length > inserted_tokens and not self.is_write_back:
                node.hit_count += 1
        result.prefix_len, result.last_device_node = walked_tokens, node.id
        self.components[0].commit_insert_component_data(node, is_new_leaf, params, result, actions)
        return InsertStepResult(actions, result)

    def _insert_walk_step(self, state: Any) -> None:
        if not self._can_walk(state.key) or not self._insert_along_whole_nodes(state):
            super()._insert_walk_step(state)

    def _insert_along_whole_nodes(self, state: Any) -> bool:
        """Walk the nodes on the device that the key contains entirely. Returns whether an action must
        be performed before the walk continues."""
        params, key, priority = state.params, state.key, state.priority
        own_kv_start, inserted_tokens = params.prev_prefix_len, params.inserted_len
        actions, node = state.pending_actions, state.node
        start = walked_tokens = state.total_prefix_length
        needs_backup = False
        cursor = KeyCursor(key, self.page_size)
        while not needs_backup and (child := cursor.next_child(node)) is not None:
            if child.component_data[BASE_COMPONENT_TYPE].value is None:
                break
            if not cursor.advance_whole(child):
                break
            node = child
            node.last_access_time = get_and_increase_time_counter()
            if node.priority < priority:
                node.priority = priority
            node_start, walked_tokens = walked_tokens, start + cursor.offset
            if walked_tokens > own_kv_start:  # the tree already has this KV
                duplicate = slice(max(node_start, own_kv_start) - start, walked_tokens - start)
                actions.append(FreeDeviceKV([state.value[duplicate]]))
            if walked_tokens > inserted_tokens and self._inc_hit_count_and_check(node):
                actions.append(self._build_backup_kv_action(node))
                needs_backup = True
        if walked_tokens > start:
            state.node, state.total_prefix_length = node, walked_tokens
            state.value = state.value[walked_tokens - start :]
        if walked_tokens > start or key.limit is not None:
            state.key = key[walked_tokens - start :]
        return needs_backup

    def _can_walk(self, key: RadixKey) -> bool:
        """Return whether ``key``'s tokens are an array of 64-bit ids, as from the scheduler."""
        tokens = key.token_ids
        has_ids = type(tokens) is array and tokens.itemsize == TOKEN_BYTES
        return has_ids and len(self.components) == 1 and self.walks_by_offsets


def _set_access_times(node: UnifiedTreeNode | None) -> None:
    """Set SGLang's access times up to ``node``, each just before that of its child."""
    time = get_and_increase_time_counter()
    while node is not None:
        node.last_access_time = time
        time -= 0.00001
        node = node.parent
