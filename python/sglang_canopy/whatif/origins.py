"""Which conversation a path belongs to, by the path alone: the same number for all of its turns."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_canopy.reuse.shadow import full_blocks

MOST = 200_000
"""Conversations remembered, those used last."""


class Origins:
    """Where each conversation's last prompt ends, and the number that names it.

    A path that runs through that end goes on with the conversation. Client names of conversations
    are not asked for: few clients give one.
    """

    def __init__(self, most: int = MOST) -> None:
        self._ends: dict[int, int] = {}
        self._most = most

    def of(self, path: Sequence[int], prompt_tokens: int, block_tokens: int) -> int:
        """The number of the conversation that a request continues or begins.

        ``path``: chained block hashes of the prompt, or of prompt and output.
        """
        full = full_blocks(path, prompt_tokens, block_tokens)
        if not full:
            return path[0] if path else 0
        end = path[full - 1]
        ends = self._ends
        origin = end
        for depth in range(full - 1, -1, -1):
            found = ends.pop(path[depth], None)
            if found is not None:
                origin = found
                break
        ends[end] = origin
        if len(ends) > self._most:
            del ends[next(iter(ends))]
        return origin

    def __len__(self) -> int:
        return len(self._ends)
