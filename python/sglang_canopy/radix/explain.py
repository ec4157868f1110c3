"""Explain a conversation: where its KV is, its rank, and when it would be evicted."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE

from sglang_canopy.radix.counters import DEVICE, REASONS, TIERS
from sglang_canopy.tenant import shown_tenant

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_canopy.radix.core import CanopyTreeCore

MAX_NODES = 256
"""Maximum nodes of a path in an answer."""
MAX_TENANTS = 16
LOOKED_AHEAD_TOKENS = 1 << 16
LOOKED_AHEAD_LEAVES = 256
"""Victims read ahead, in tokens and in leaves, once for all tenants. Counts instead of times: every
rank must read the same victims."""


def parse_question(text: str) -> tuple[str, dict[str, Any]] | None:
    """Parse a message: the name of the answer, and the question (``conversation``, and ``tenant``,
    absent for all tenants). ``None`` for any other text."""
    try:
        question = json.loads(text)
        answer_name = str(question.pop("answer"))
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None
    is_valid = answer_name.isalnum() and isinstance(question.get("conversation"), str)
    is_valid = is_valid and isinstance(question.get("tenant"), str | None)
    return (answer_name, question) if is_valid else None


def explain(core: CanopyTreeCore, question: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one entry for each requested tenant that has, or had, such a conversation. Does not affect
    evictions."""
    conversation = question["conversation"]
    if "tenant" in question:
        tenants = [question["tenant"]]
    else:
        tenants = core.conversations.tenants_of(conversation)[:MAX_TENANTS]
    victims = _next_victims(core) if tenants else []
    return [_explain_tenant(core, tenant, conversation, victims) for tenant in tenants]


def _next_victims(core: CanopyTreeCore) -> list[tuple[UnifiedTreeNode, int]]:
    """Return the next victims, and the tokens of each that would be evicted."""
    victims = core.evictable_device_leaves.lowest_ranked(LOOKED_AHEAD_TOKENS, LOOKED_AHEAD_LEAVES)
    return [(node, len(node.key) - keep_tokens) for node, keep_tokens in victims]


def _explain_tenant(
    core: CanopyTreeCore,
    tenant: str | None,
    conversation: Hashable,
    victims: list[tuple[UnifiedTreeNode, int]],
) -> dict[str, Any]:
    now, policy = core.clock.now, core.live.device_policy
    end_node = core.conversations.end_node(tenant, conversation)
    nodes = [] if end_node is None else _describe_path(core, end_node)
    tokens = dict.fromkeys(TIERS, 0)
    for node in nodes:
        for tier in node["tiers"]:
            tokens[tier] += node["tokens"]
    last_accesses = [
        node.canopy.last_access for node in _ancestors(core, end_node) if not node.canopy.shared
    ]
    return {
        "tenant": shown_tenant(tenant),
        "conversation": conversation,
        "cached": bool(nodes),
        "tokens": tokens,
        "last_use_ago_s": round(now - max(last_accesses), 3) if last_accesses else None,
        "nodes": nodes[:MAX_NODES],
        "policy": policy.name,
        "belief": {} if end_node is None else dict(policy.explain(end_node.canopy, now)),
        "next_to_go": None if end_node is None else _foresee_eviction(core, end_node, victims),
        "evicted": [
            {
                "evicted_ago_s": round(now - eviction.time_s, 3),
                "tier": TIERS[eviction.tier],
                "tokens": eviction.tokens,
                "offset": eviction.offset,
                "reason": REASONS[eviction.reason_index],
                "by": eviction.policy,
                "category": eviction.category,
                "idle_s": round(eviction.idle_s, 3),
                "demoted": eviction.is_demoted,
            }
            for eviction in core.traffic.evictions.latest_evictions(tenant, conversation)
        ],
    }


def _ancestors(core: CanopyTreeCore, node: UnifiedTreeNode | None) -> list[UnifiedTreeNode]:
    ancestors = []
    while node is not None and node is not core.root_node:
        ancestors.append(node)
        node = node.parent
    return ancestors


def _describe_path(core: CanopyTreeCore, end_node: UnifiedTreeNode) -> list[dict[str, Any]]:
    now, offset, descriptions = core.clock.now, 0, []
    for node in reversed(_ancestors(core, end_node)):
        kv, leaf = node.component_data[BASE_COMPONENT_TYPE], node.canopy
        is_on_tiers = (kv.value is not None, kv.host_value is not None, leaf.is_on_disk)
        descriptions.append(
            {
                "offset": offset,
                "tokens": len(node.key),
                "tiers": [tier for tier, is_there in zip(TIERS, is_on_tiers) if is_there],
                "category": leaf.category,
                "last_use_ago_s": round(now - leaf.last_access, 3),
                "uses": leaf.hits,
                "shared": leaf.shared,
            }
        )
        offset += len(node.key)
    return descriptions


def _foresee_eviction(
    core: CanopyTreeCore, end_node: UnifiedTreeNode, victims: list[tuple[UnifiedTreeNode, int]]
) -> dict[str, Any]:
    """Return the tokens that would be evicted before this path's last node on the device."""
    device_nodes = {
        node
        for node in _ancestors(core, end_node)
        if node.component_data[BASE_COMPONENT_TYPE].value is not None
    }
    tokens_per_s = core.traffic.evictions.tokens_per_s(DEVICE, core.clock.now)
    tokens_before = 0
    free_tokens = core.live.count_free_tokens()
    for node, tokens in victims if device_nodes else ():
        if node in device_nodes:
            seconds = (tokens_before + free_tokens) / tokens_per_s if tokens_per_s > 0 else math.inf
            return {
                "tokens_before": tokens_before,
                "free_tokens": free_tokens,
                "seconds": None if math.isinf(seconds) else round(seconds, 1),
            }
        tokens_before += tokens
    return {
        "tokens_before": None,
        "looked_at_tokens": tokens_before,
        "free_tokens": free_tokens,
        "seconds": None,
    }
