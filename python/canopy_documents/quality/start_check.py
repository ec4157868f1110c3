"""Quality check: tests reuse at start on questions with known answers, and refuses it below a share.

The questions ask for made-up facts in filler documents. The served model answers each question by
greedy decoding: once after full recompute, and after a fused prefill with the server's selector
at every ratio it may use. Distances between next-token probabilities are not measured,
since an answer may be fluent, close, and wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from canopy_documents.fuse import rows as row_forward
from canopy_documents.fuse.cache import dense_cache
from canopy_documents.fuse.encode import Encoder
from canopy_documents.fuse.fusion import fused_prefill
from canopy_documents.fuse.model import Model
from canopy_documents.fuse.selectors import OfflineSelector, make_selector
from canopy_documents.quality.answers import (
    Case,
    answer_text,
    contains_answer,
    encode_case,
    greedy_steps,
    make_case,
    prompt_of_case,
)
from canopy_documents.quality.tasks import SYNTHETIC, default_filler, make_examples
from sglang_canopy.errors import CanopyError

logger = logging.getLogger(__name__)

QUESTION_COUNT = 12
ANSWER_TOKENS = 16
DOCUMENT_COUNT, DOCUMENT_TOKENS = 6, 160


@dataclass(frozen=True, slots=True)
class KeptAnswers:
    """Number of questions that full recompute answers correctly (``right_answers``), and how many
    of these reuse answers correctly, too (``kept_answers``)."""

    right_answers: int
    kept_answers: int

    @property
    def share(self) -> float | None:
        """Share of answers kept; None if full recompute answered no question correctly."""
        return self.kept_answers / self.right_answers if self.right_answers else None

    def __str__(self) -> str:
        if not self.right_answers:
            return "no answer is right even without reuse"
        return f"{self.kept_answers} of {self.right_answers} right answers are kept"


def check_quality(
    model: Model, tokenizer: Any, selector: str, ratios: Iterable[float], min_kept: float | None
) -> dict[float, KeptAnswers]:
    """Return the answers kept at every ratio; empty without ``min_kept``.

    Raises CanopyError, with the figures, if a ratio keeps less than ``min_kept``.
    """
    if min_kept is None:
        return {}
    if tokenizer is None:
        raise CanopyError("the quality check needs a tokenizer; drop --skip-tokenizer-init")
    by_ratio = measure_kept(model, tokenizer, selector, sorted(set(ratios)))
    for r, kept in by_ratio.items():
        logger.info("canopy: quality check at ratio %s: %s", r, kept)
    failing = [r for r, kept in by_ratio.items() if kept.share is None or kept.share < min_kept]
    if failing:
        figures = "; ".join(f"ratio {r}: {by_ratio[r]}" for r in failing)
        raise CanopyError(
            f"the quality check refuses to reuse documents: min_kept is {min_kept}, and at {figures}. "
            "Raise the ratio, use another model, or lower min_kept"
        )
    return by_ratio


def measure_kept(
    model: Model,
    tokenizer: Any,
    selector: str,
    ratios: Iterable[float],
    questions: int = QUESTION_COUNT,
) -> dict[float, KeptAnswers]:
    """Return the answers kept, by ratio."""
    ratios, per_task = list(ratios), -(-questions // len(SYNTHETIC))
    right_answers, kept_answers = 0, dict.fromkeys(ratios, 0)
    encoders: dict[tuple[int, ...], Encoder] = {}
    for example in make_examples(SYNTHETIC, per_task, default_filler())[:questions]:
        case = make_case(tokenizer, example, DOCUMENT_COUNT, DOCUMENT_TOKENS)
        if not contains_answer(full_answer(model, tokenizer, case), case.answers):
            continue
        right_answers += 1
        chunks = encode_case(model, case, encoders)
        for ratio in ratios:
            text = fused_answer(model, tokenizer, case, chunks, selector, ratio)
            kept_answers[ratio] += contains_answer(text, case.answers)
    return {ratio: KeptAnswers(right_answers, kept) for ratio, kept in kept_answers.items()}


def full_answer(model: Model, tokenizer: Any, case: Case) -> str:
    """Return the greedy answer after a plain prefill."""
    ids = torch.tensor(case.token_ids, device=model.device)
    cache = dense_cache(model, ids.numel() + ANSWER_TOKENS)
    hidden = row_forward.prefill(model, ids, cache.truncated(ids.numel()))
    return _decode_answer(model, tokenizer, cache, ids.numel(), model.logits(hidden[-1:])[0])


def fused_answer(
    model: Model, tokenizer: Any, case: Case, chunks: list[Any], selector: str, ratio: float
) -> str:
    """Return the greedy answer after a fused prefill at a ratio."""
    prompt, chooser = prompt_of_case(case, chunks, model.device), make_selector(selector)
    if isinstance(chooser, OfflineSelector):
        for chunk in chunks:
            chooser.scores(chunk)
    n = len(prompt)
    cache = dense_cache(model, n + ANSWER_TOKENS)
    fused = fused_prefill(model, prompt, cache.truncated(n), chooser, ratio)
    return _decode_answer(model, tokenizer, cache, n, fused.logits)


def _decode_answer(model: Model, tokenizer: Any, cache: Any, n: int, first: torch.Tensor) -> str:
    first_tokens, end = [int(first.argmax())], tokenizer.eos_token_id
    steps = greedy_steps(model, cache, n, first_tokens, ANSWER_TOKENS, end)
    return answer_text(tokenizer, row_forward.finish(steps))
