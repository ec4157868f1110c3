"""Tokens as a log's server counted them, for each token that the reader cut.

Capacities are converted by this scale, so a wrong one makes all advice wrong. Counts that leave out
cached tokens are the usual fault: the scale is then far too low, or differs from prompt to prompt.
"""

from __future__ import annotations

import math
from collections import Counter

from canopy_lab.trace.prompts import LoggedPrompt
from canopy_lab.trace.understood import Understood
from sglang_canopy.errors import CanopyError

LEAST, MOST = 0.4, 4.0
"""A token has 1 to 10 bytes in every language and tokenizer that we know; 4 bytes make the scale 1."""
WIDEST = 4.0
"""Most by which the ratio of most prompts' tokens may differ within one log."""
_OUTER = 0.1
"""Share of the tokens at either end that may lie outside."""
_STEP = 0.05
"""Width of the histogram's cells, in powers of two."""


class TokenScale:
    """Compares logged counts with the tokens that were cut. Prompts with pictures are left out."""

    def __init__(self, has_tokenizer: bool) -> None:
        self._has_tokenizer = has_tokenizer
        self._logged = self._cut = 0
        self._ratios: Counter[int] = Counter()
        """Tokens cut, by the ratio of their prompt."""

    def add(self, prompt: LoggedPrompt, tokens: int) -> None:
        """Take in a prompt that was cut into ``tokens``."""
        if prompt.logged_tokens is None or not tokens:
            return
        if any(part.kind in ("image", "media") for part in prompt.parts):
            return
        self._logged += prompt.logged_tokens
        self._cut += tokens
        self._ratios[round(math.log2(prompt.logged_tokens / tokens) / _STEP)] += tokens

    def found(self, understood: Understood) -> float:
        """Return the scale; 1 if the log counts nothing.

        Raises ``CanopyError`` for counts that cannot be those of the prompts. With a tokenizer they
        are ignored instead, and ``understood`` says so.
        """
        if not self._cut:
            return 1.0
        scale, spread = self._logged / self._cut, self._spread()
        if LEAST <= scale <= MOST and spread <= WIDEST:
            return scale
        counts = f"the log's token counts are {scale:.2f} of what its prompts have"
        if spread > WIDEST:
            counts += f" and differ by a factor of {spread:.0f} between prompts"
        if self._has_tokenizer:
            understood.changed[f"have token counts that are not used ({counts})"] = (
                understood.requests
            )
            return 1.0
        raise CanopyError(
            f"{counts}: they may leave out cached tokens, or the prompts may be cut; give --tokenizer "
            "PATH (tokens are then counted here), or a log whose counts include cached tokens"
        )

    def _spread(self) -> float:
        """Ratio between the upper and the lower end of the middle of the histogram."""
        total, seen, ends = self._ratios.total(), 0, []
        for share in (_OUTER, 1 - _OUTER):
            seen = 0
            for cell in sorted(self._ratios):
                seen += self._ratios[cell]
                if seen >= share * total:
                    ends.append(cell)
                    break
        return float(2 ** ((ends[1] - ends[0]) * _STEP))
