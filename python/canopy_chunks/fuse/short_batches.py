"""Short batches that do not wait for background work that earlier prefills have earned."""

from __future__ import annotations

from dataclasses import dataclass

MAX_SPARED = 8
"""Maximum short batches in a row that do not wait. A piece of work takes longer than a short batch;
under load without a pause or a long prompt, one batch in nine waits."""


@dataclass(slots=True)
class ShortBatches:
    """Decides by counts alone, so tensor-parallel ranks decide alike."""

    in_a_row: int = 0

    def spares(self, tokens: int, credit: float, piece_tokens: int) -> bool:
        """Return whether a batch of ``tokens`` prompt tokens does not wait.

        credit: tokens of earned work; less than a piece delays no batch.
        """
        if tokens >= piece_tokens or credit < piece_tokens:
            self.in_a_row = 0
        else:
            self.in_a_row = (self.in_a_row + 1) % (MAX_SPARED + 1)
        return self.in_a_row > 0
