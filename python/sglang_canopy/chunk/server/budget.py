"""Prefill budget by what is computed: a fused prompt fills only its recomputed share of a window."""

from __future__ import annotations

import functools
import math
from typing import Any

from sglang_canopy.chunk.server.engine import ChunkEngine
from sglang_canopy.chunk.server.wish import wish_of


def saving(engine: ChunkEngine, req: Any) -> int:
    """Tokens of a waiting request's prompt that are expected not to be computed."""
    wish = wish_of(req)
    if wish is None or not engine.may_fuse(req, wish):
        return 0
    known = engine.known(wish)
    usable = engine.worth(known, req.prefix_len, len(req.full_untruncated_fill_ids))
    return math.floor((1.0 - engine.ratio_of(wish, known)) * usable)


@functools.cache
def adder_class(stock: type) -> type:
    """SGLang's ``PrefillAdder`` with the saved tokens left in the budgets of computed tokens.

    The KV pool is charged in full, since every slot is needed. ``engine`` is set per class use.
    """

    class ChunkPrefillAdder(stock):  # type: ignore[misc,valid-type]
        canopy_engine: ChunkEngine | None = None

        def add_one_req(self, req: Any, *args: Any, **kwargs: Any) -> Any:
            engine = type(self).canopy_engine
            spare = saving(engine, req) if engine is not None else 0
            if not spare:
                return super().add_one_req(req, *args, **kwargs)
            before = len(self.can_run_list)
            self.rem_input_tokens += spare
            if self.rem_chunk_tokens is not None:
                self.rem_chunk_tokens += spare
            result = super().add_one_req(req, *args, **kwargs)
            whole = req.extend_end == len(req.full_untruncated_fill_ids)
            if len(self.can_run_list) == before or not whole:
                self.rem_input_tokens -= spare
                if self.rem_chunk_tokens is not None:
                    self.rem_chunk_tokens -= spare
            return result

    return ChunkPrefillAdder
