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
        self._shared_ids: dict[tuple[str | int, ...], int] = {}
        """(model, tool tokens, system prompt tokens if the block overlaps it, block index) -> block id."""

    def share(self, conversation: Conversation, ids: list[int]) -> None:
        """Replace the ids of shared heads in ``ids``, which maps a conversation's block ids to the overlay's.

        Ids stay chained: equal ids, equal prefixes. If a file's ids show that two of its agents
        differ, they and all blocks after them stay different.
        """
        new_ids: dict[int, int] = {}
        used_ids: set[int] = set()
        for (model, tool_tokens, system_tokens), head in _heads(conversation):
            for index, block_id in enumerate(head):
                key: tuple[str | int, ...] = (model, tool_tokens, index)
                if (index + 1) * conversation.requests[0].block_tokens > tool_tokens:
                    key = (model, tool_tokens, system_tokens, index)
                shared_id = self._shared_ids.get(key, ids[block_id])
                if new_ids.get(block_id) != shared_id and (
                    block_id in new_ids or shared_id in used_ids
                ):
                    break
                new_ids[block_id] = self._shared_ids[key] = shared_id
                used_ids.add(shared_id)
        for block_id, shared_id in new_ids.items():
            ids[block_id] = shared_id


def _heads(conversation: Conversation) -> Iterator[tuple[tuple[str, int, int], tuple[int, ...]]]:
    """Yield each agent's kind, and the full blocks that most of its prompts begin with."""
    heads_of: dict[tuple[str | None, str, int, int], Counter[tuple[int, ...]]] = {}
    for request in conversation.requests:
        head_blocks = (request.tool_tokens + request.system_tokens) // request.block_tokens
        if head_blocks and len(request.blocks) >= head_blocks and request.model is not None:
            kind = (request.conversation, request.model, request.tool_tokens, request.system_tokens)
            heads_of.setdefault(kind, Counter())[request.blocks[:head_blocks]] += 1
    for kind, heads in heads_of.items():
        yield kind[1:], heads.most_common(1)[0][0]
