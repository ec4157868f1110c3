"""Admission of prompts with documents: SGLang's budgets are charged for computed tokens only."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from canopy_documents.server.engine import DocumentEngine
from canopy_documents.server.library import reusable_tokens
from canopy_documents.server.request import document_request_of, engine_of


@dataclass(frozen=True, slots=True)
class ExpectedReuse:
    """Expected reuse of a prompt: ``spans`` of stored documents, and their ``ratio`` to compute."""

    spans: tuple[tuple[int, int], ...]
    ratio: float

    def saved_tokens(self, start: int, end: int) -> int:
        """Return the number of tokens of ``start..end`` that are expected to be reused."""
        return sum(
            math.floor((1.0 - self.ratio) * max(0, min(span_end, end) - max(span_start, start)))
            for span_start, span_end in self.spans
        )

    def window_credit(self, start: int, end: int, room_tokens: int | None) -> int:
        """Return the tokens to add to a window's ``room_tokens``, so that computed tokens fill it."""
        if room_tokens is None or end - start - self.saved_tokens(start, end) <= room_tokens:
            return self.saved_tokens(start, end)
        low, high = start, end  # find the last end whose computed tokens fit
        while high - low > 1:
            middle = (low + high) // 2
            if middle - start - self.saved_tokens(start, middle) <= room_tokens:
                low = middle
            else:
                high = middle
        return self.saved_tokens(start, low)


def expected_reuse(engine: DocumentEngine, req: Any) -> ExpectedReuse | None:
    """Return the expected reuse of a waiting request's prompt; ``None`` without reuse."""
    request = document_request_of(req)
    if request is None or not engine.may_fuse(req, request):
        return None
    documents = engine.library.resolve(request)
    prefix_tokens = req.prefix_len + req.host_hit_length
    if not reusable_tokens(documents, prefix_tokens, len(req.full_untruncated_fill_ids)):
        return None
    spans = tuple((d.start, d.end) for d in documents if d.tier is not None)
    return ExpectedReuse(spans, engine.ratio_for(request, documents))


def use_document_adder(original_class: Any, scheduler: Any, *_: Any, **__: Any) -> Any:
    """Hook after ``Scheduler.get_prefill_adder_class``."""
    engine = engine_of(scheduler)
    return None if engine is None else _make_adder_class(original_class, engine)


@functools.lru_cache(4)
def _make_adder_class(original_class: type, engine: DocumentEngine) -> type:
    """Return SGLang's ``PrefillAdder``, whose budgets are charged only for computed tokens.

    A fused prompt fills only its recomputed share of a window. Admission uses an expectation. If it
    is wrong (a document was evicted, a file is damaged), ``batch.split_into_windows`` splits the
    forward, so that no forward exceeds a window. The KV pool is charged in full, since every slot
    is needed.
    """

    class DocumentPrefillAdder(original_class):  # type: ignore[misc,valid-type]
        def add_one_req(self, req: Any, *args: Any, **kwargs: Any) -> Any:
            reuse = expected_reuse(engine, req)
            if reuse is None:
                return super().add_one_req(req, *args, **kwargs)
            before = len(self.can_run_list)
            start = req.prefix_len + req.host_hit_length
            end = len(req.full_untruncated_fill_ids)
            credit = reuse.window_credit(start, end, self.rem_chunk_tokens)
            self._canopy_grant(credit)
            result = super().add_one_req(req, *args, **kwargs)
            admitted = len(self.can_run_list) > before
            saved = reuse.saved_tokens(req.prefix_len, req.extend_end) if admitted else 0
            self._canopy_grant(min(saved, credit) - credit)
            return result

        def _canopy_grant(self, tokens: int) -> None:
            self.rem_input_tokens += tokens
            if self.rem_chunk_tokens is not None:
                self.rem_chunk_tokens += tokens

    return DocumentPrefillAdder
