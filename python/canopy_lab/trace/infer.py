"""Conversation and turn of a request, from its block chain alone.

Used for traces without conversation names. A request continues an earlier one if its blocks contain
the last full block of the earlier prompt and more after it. A prefix that several conversations
share (a system prompt) does not count: the earlier conversation must have introduced that block.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

MAX_BLOCKS = 4_000_000


class ConversationIndex:
    """Recent prompts, as the ``max_blocks`` newest blocks of about 200 bytes each.

    A conversation whose blocks were dropped continues as a new one.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._conversation_by_block: dict[int, int] = {}
        """Block id -> conversation that introduced it."""
        self._prompt_end_by_block: dict[int, tuple[int, int, int]] = {}
        """Last full block of a prompt -> (conversation, turn, prompt tokens) of its latest request."""
        self._conversation_count = 0

    def _forget(self) -> None:
        """Drop the oldest quarter at once: single deletions would scan the dict's gaps."""
        for block in list(islice(self._conversation_by_block, max(1, self._max_blocks // 4))):
            del self._conversation_by_block[block]
            self._prompt_end_by_block.pop(block, None)

    def add(
        self, blocks: Sequence[int], input_tokens: int, block_tokens: int
    ) -> tuple[int, int, int | None]:
        """Add one request; returns ``(conversation, turn, parent's last full block)``.

        Conversations are numbered from 0 in order of their first request, turns from 1. The third
        value is ``None`` for a first turn.
        """
        conversation_by_block = self._conversation_by_block
        known_blocks = 0
        for block in blocks:
            if block not in conversation_by_block:
                break
            known_blocks += 1
        conversation, turn, parent = self._conversation_count, 1, None
        for i in range(known_blocks - 1, -1, -1):
            end = self._prompt_end_by_block.get(blocks[i])
            # An equal or shorter prompt repeats the turn.
            if end is not None and end[2] < input_tokens:
                conversation, turn, parent = end[0], end[1] + 1, blocks[i]
                break
        if parent is None:
            self._conversation_count += 1
        for block in blocks[known_blocks:]:
            conversation_by_block[block] = conversation
        if len(conversation_by_block) > self._max_blocks:
            self._forget()
        full_blocks = min(len(blocks), input_tokens // block_tokens)
        if full_blocks and conversation_by_block.get(blocks[full_blocks - 1]) == conversation:
            self._prompt_end_by_block[blocks[full_blocks - 1]] = (conversation, turn, input_tokens)
        return conversation, turn, parent
