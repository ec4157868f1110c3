"""Which blocks agents of one kind share: their tools' definitions and their system prompts.

Archives of agents number the blocks of each conversation by themselves, so they do not say that two
conversations begin alike. But they say how many tokens the tools and the system prompt have. Agents
of one model with the same number of tokens of tools are taken to have the same tools, and with the
same number of both the same system prompt too. Within the files of the public archive, where ids can
be compared, that is so for every pair of sub-agents with equal counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from canopy_lab.trace.agentic import Conversation
from canopy_lab.trace.record import TraceRequest


class SharedHeads:
    """The blocks that conversations seen so far begin with."""

    def __init__(self) -> None:
        self._known: dict[tuple[str | int, ...], int] = {}
        """Model, tokens of tools, tokens of the system prompt where the block reaches into it, and
        the block's place, to its id."""

    def share(self, conversation: Conversation, ids: list[int]) -> None:
        """Replace what others begin with, too. ``ids``: each local block id to its own new id.

        Ids stay chained: equal ids, equal prefixes. Where a file itself says that two of its agents
        differ, they do, and so does all that comes after.
        """
        moved: dict[int, int] = {}
        taken: set[int] = set()
        for (model, tools, system), head in _heads(conversation):
            for place, block in enumerate(head):
                key: tuple[str | int, ...] = (model, tools, place)
                if (place + 1) * conversation.requests[0].block_tokens > tools:
                    key = (model, tools, system, place)
                known = self._known.get(key, ids[block])
                if moved.get(block) != known and (block in moved or known in taken):
                    break
                moved[block] = self._known[key] = known
                taken.add(known)
        for block, known in moved.items():
            ids[block] = known


def _heads(conversation: Conversation) -> Iterator[tuple[tuple[str, int, int], tuple[int, ...]]]:
    """Of each agent and model: its kind, and the full blocks that most of its prompts begin with."""
    found: dict[tuple[str | None, str, int, int], Counter[tuple[int, ...]]] = {}
    for request in conversation.requests:
        blocks = _head_blocks(request)
        if blocks and len(request.blocks) >= blocks and request.model is not None:
            kind = (
                request.conversation,
                request.model,
                request.tool_tokens,
                request.system_tokens,
            )
            found.setdefault(kind, Counter())[request.blocks[:blocks]] += 1
    for kind, heads in found.items():
        yield kind[1:], heads.most_common(1)[0][0]


def _head_blocks(request: TraceRequest) -> int:
    """Full blocks of the tools and the system prompt."""
    return (request.tool_tokens + request.system_tokens) // request.block_tokens
