"""The token scale: the server's token counts in a log divided by the tokens that the reader cut.

Capacities are converted by it, so a wrong scale makes all advice wrong. The usual fault is a log
whose counts exclude cached tokens: the scale is then far too low, or varies between prompts.
"""

from __future__ import annotations

import math
from collections import Counter

from canopy_lab.trace.prompts import LoggedPrompt
from canopy_lab.trace.understood import Understood
from sglang_canopy.errors import CanopyError

MIN_SCALE, MAX_SCALE = 0.4, 4.0
"""Range of the scale: 10 bytes to 1 byte per token. The reader cuts tokens of 4 bytes."""
MAX_SPREAD = 4.0
"""Largest ratio between the scales of most prompts of a log."""
_EXCLUDED_SHARE = 0.1
"""Share of the tokens at each end that is excluded from the comparison."""
_BIN_WIDTH = 0.05
"""Width of a bin of the histogram, in powers of two."""


class TokenScale:
    """Compares logged counts with the number of tokens cut. Ignores prompts with pictures."""

    def __init__(self, has_tokenizer: bool) -> None:
        self._has_tokenizer = has_tokenizer
        self._logged_tokens = self._counted_tokens = 0
        self._tokens_by_bin: Counter[int] = Counter()
        """Number of tokens by the bin of their prompt's scale."""

    def add(self, prompt: LoggedPrompt, tokens: int) -> None:
        """Add a prompt that was cut into ``tokens``."""
        if prompt.logged_tokens is None or not tokens:
            return
        if any(part.kind in ("image", "media") for part in prompt.parts):
            return
        self._logged_tokens += prompt.logged_tokens
        self._counted_tokens += tokens
        self._tokens_by_bin[round(math.log2(prompt.logged_tokens / tokens) / _BIN_WIDTH)] += tokens

    def value(self, understood: Understood) -> float:
        """Return the scale; 1 if the log has no counts.

        Raises ``CanopyError`` if the counts cannot belong to the prompts. With a tokenizer, such
        counts are ignored and noted in ``understood``.
        """
        if not self._counted_tokens:
            return 1.0
        scale, spread = self._logged_tokens / self._counted_tokens, self._spread()
        if MIN_SCALE <= scale <= MAX_SCALE and spread <= MAX_SPREAD:
            return scale
        counts = f"the log's token counts are {scale:.2f} of what its prompts have"
        if spread > MAX_SPREAD:
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
        """Return the ratio of the upper to the lower end of the histogram without outer bins."""
        total_tokens, tokens_below, outer_bins = self._tokens_by_bin.total(), 0, []
        for quantile in (_EXCLUDED_SHARE, 1 - _EXCLUDED_SHARE):
            tokens_below = 0
            for bin_number in sorted(self._tokens_by_bin):
                tokens_below += self._tokens_by_bin[bin_number]
                if tokens_below >= quantile * total_tokens:
                    outer_bins.append(bin_number)
                    break
        return float(2 ** ((outer_bins[1] - outer_bins[0]) * _BIN_WIDTH))
