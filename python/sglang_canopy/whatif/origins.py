"""Identify the conversation of a request by its path alone."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_canopy.reuse.shadow import full_blocks

MAX_ORIGINS = 200_000
"""Limit of remembered conversations; the least recently used are dropped."""


class Origins:
    """Conversation numbers by the last block of each conversation's latest prompt.

    A path that contains this block continues the conversation. Conversation names from clients are
    ignored because few clients send one.
    """

    def __init__(self, most: int = MAX_ORIGINS) -> None:
        self._conversation_by_end: dict[int, int] = {}
        self._limit = most

    def of(self, path: Sequence[int], prompt_tokens: int, block_tokens: int) -> int:
        """Return the number of the conversation that a request continues or begins.

        ``path``: chained block hashes of the prompt, or of prompt and output.
        """
        full = full_blocks(path, prompt_tokens, block_tokens)
        if not full:
            return path[0] if path else 0
        end = path[full - 1]
        ends = self._conversation_by_end
        origin = end
        for depth in range(full - 1, -1, -1):
            found = ends.pop(path[depth], None)
            if found is not None:
                origin = found
                break
        ends[end] = origin
        if len(ends) > self._limit:
            del ends[next(iter(ends))]
        return origin

    def __len__(self) -> int:
        return len(self._conversation_by_end)
