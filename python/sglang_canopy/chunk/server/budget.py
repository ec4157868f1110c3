"""Prefill budget by what is computed: a fused prompt fills only its recomputed share of a window.

What is admitted here is an expectation. Where it fails (a chunk was evicted, a file is damaged),
``windows.py`` cuts the forward, so that none computes more than a window all the same.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from sglang_canopy.chunk.server.engine import ChunkEngine
from sglang_canopy.chunk.server.wish import wish_of


@dataclass(frozen=True, slots=True)
class Expected:
    """Where a prompt's KV will come from: ``spans`` of known chunks, of which ``ratio`` is computed."""

    spans: tuple[tuple[int, int], ...]
    ratio: float

    def saved(self, start: int, end: int) -> int:
        """Tokens of ``start..end`` that are expected not to be computed."""
        return sum(
            math.floor((1.0 - self.ratio) * max(0, min(b, end) - max(a, start)))
            for a, b in self.spans
        )

    def credit(self, start: int, end: int, room: int | None) -> int:
        """What to add to a window's ``room`` so that it ends where the room is really used up."""
        if room is None or end - start - self.saved(start, end) <= room:
            return self.saved(start, end)
        low, high = start, end  # the last end whose computed tokens fit
        while high - low > 1:
            middle = (low + high) // 2
            if middle - start - self.saved(start, middle) <= room:
                low = middle
            else:
                high = middle
        return self.saved(start, low)


def expected(engine: ChunkEngine, req: Any) -> Expected | None:
    """What a waiting request's prompt is expected to reuse; ``None``: nothing."""
    wish = wish_of(req)
    if wish is None or not engine.may_fuse(req, wish):
        return None
    known = engine.known(wish)
    prefix = req.prefix_len + getattr(req, "host_hit_length", 0)
    if not engine.worth(known, prefix, len(req.full_untruncated_fill_ids)):
        return None
    spans = tuple((k.start, k.end) for k in known if k.tier is not None)
    return Expected(spans, engine.ratio_of(wish, known))


@functools.cache
def adder_class(stock: type) -> type:
    """SGLang's ``PrefillAdder`` with the saved tokens left in the budgets of computed tokens.

    The KV pool is charged in full, since every slot is needed. ``engine`` is set per class use.
    """

    class ChunkPrefillAdder(stock):  # type: ignore[misc,valid-type]
        canopy_engine: ChunkEngine | None = None

        def add_one_req(self, req: Any, *args: Any, **kwargs: Any) -> Any:
            engine = type(self).canopy_engine
            found = expected(engine, req) if engine is not None else None
            if found is None:
                return super().add_one_req(req, *args, **kwargs)
            before = len(self.can_run_list)
            start = req.prefix_len + getattr(req, "host_hit_length", 0)
            end = len(req.full_untruncated_fill_ids)
            given = found.credit(start, end, self.rem_chunk_tokens)
            self._canopy_grant(given)
            result = super().add_one_req(req, *args, **kwargs)
            admitted = len(self.can_run_list) > before
            kept = found.saved(req.prefix_len, req.extend_end) if admitted else 0
            self._canopy_grant(min(kept, given) - given)
            return result

        def _canopy_grant(self, tokens: int) -> None:
            self.rem_input_tokens += tokens
            if self.rem_chunk_tokens is not None:
                self.rem_chunk_tokens += tokens

    return ChunkPrefillAdder
