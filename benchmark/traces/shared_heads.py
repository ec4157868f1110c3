"""Blocks that agents of one kind share: their tools' definitions and their system prompts.

Archives of agents number the blocks of each conversation separately, so equal starts of conversations
are not visible. But they have the numbers of tokens of the tools and of the system prompt. Agents of
one model with equal numbers of tool tokens are assumed to have the same tools, and with equal numbers
of both, the same system prompt. Within the files of the public archive, whose ids can be compared, that
is true for every pair of sub-agents with equal counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from canopy_lab.trace.agentic import Conversation


class SharedHeads:
    """The blocks that conversations seen so far begin with."""

    def __init__(self) -> None:
        self._known: dict[tuple[str | int, ...], int] = {}
        """(model, tool tokens, system prompt tokens if the block overlaps it, block index) -> block id."""

    def share(self, conversation: Conversation, ids: list[int]) -> None:
        """Replace the ids of shared heads. ``ids``: local block id -> new id.

        Ids stay chained: equal ids, equal prefixes. If a file's ids show that two of its agents
        differ, they and all blocks after them stay different.
        """
        moved: dict[int, int] = {}
        used_ids: set[int] = set()
        for (model, tools, system), head in _heads(conversation):
            for place, block in enumerate(head):
                key: tuple[str | int, ...] = (model, tools, place)
                if (place + 1) * conversation.requests[0].block_tokens > tools:
                    key = (model, tools, system, place)
                shared_ids = self._known.get(key, ids[block])
                if moved.get(block) != shared_ids and (block in moved or shared_ids in used_ids):
                    break
                moved[block] = self._known[key] = shared_ids
                used_ids.add(shared_ids)
        for block, shared_ids in moved.items():
            ids[block] = shared_ids


def _heads(conversation: Conversation) -> Iterator[tuple[tuple[str, int, int], tuple[int, ...]]]:
    """Yield each agent's kind, and the full blocks that most of its prompts begin with."""
    heads_of: dict[tuple[str | None, str, int, int], Counter[tuple[int, ...]]] = {}
    for request in conversation.requests:
        blocks = (request.tool_tokens + request.system_tokens) // request.block_tokens
        if blocks and len(request.blocks) >= blocks and request.model is not None:
            kind = (request.conversation, request.model, request.tool_tokens, request.system_tokens)
            heads_of.setdefault(kind, Counter())[request.blocks[:blocks]] += 1
    for kind, heads in heads_of.items():
        yield kind[1:], heads.most_common(1)[0][0]
