"""Choice of tokens over all chunks together."""

from __future__ import annotations

import torch

from canopy_chunks.fuse.selectors.base import best
from canopy_chunks.store.chunk import FusedPrompt


def over_chunks(prompt: FusedPrompt, score: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` best positions of all chunks together by ``score [prompt]``.

    Not the prompt's last token, which is always computed.
    """
    inside = prompt.in_chunk()
    inside[len(prompt) - 1] = False
    return best(score, inside, count)
