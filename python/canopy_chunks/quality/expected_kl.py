"""Expected KL of reuse by number of documents and ratio, and the ratio that keeps it below a bound.

KL to full recompute grows with the number of documents and falls with the ratio; a prompt's length
changes it little. The shape was fitted to a sweep of SmolLM2-135M: 25 to 30 chat prompts of 1k and
4k tokens, with 4 and 16 documents. At start, the quality gate's questions give the scale for the
server's own model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from canopy_chunks.fuse import rows as engine
from canopy_chunks.fuse.cache import dense_cache
from canopy_chunks.fuse.encode import Encoder
from canopy_chunks.fuse.fusion import fused_prefill
from canopy_chunks.fuse.model import Model
from canopy_chunks.fuse.selectors import make_selector
from canopy_chunks.quality.answers import (
    divergence,
    encode_case,
    forced_logprobs,
    greedy_steps,
    prompt_of_case,
    tokenise,
)
from canopy_chunks.quality.tasks import SYNTHETIC, default_filler, synthetic

LEVEL, GROWTH, FALL = 0.0155, 0.8, 4.7
"""Parameters of the expected KL: nats per token for two documents at ratio 0, exponent of the
number of documents after the first, and decay rate in the ratio."""
FITTED_AT = 0.092
"""KL of the fitted model on the questions of :func:`measure_scale`."""
MAX_RATIO = 0.5
"""Larger ratios save too little time, so such a prompt is computed in full."""
QUESTIONS, DOCUMENTS, DOCUMENT_TOKENS, ANSWER_TOKENS, RATIO = 6, 6, 160, 16, 0.15


@dataclass(frozen=True, slots=True)
class ExpectedKL:
    """Mean KL to full recompute, nats per token; ``scale``: relative to the fitted model."""

    scale: float

    def at(self, documents: int, ratio: float) -> float:
        """Return the expected KL of a prompt, 0 for a single document."""
        if ratio >= 1:
            return 0.0
        return self.scale * LEVEL * max(0, documents - 1) ** GROWTH * math.exp(-FALL * ratio)

    def ratio_for(self, documents: int, bound: float) -> float:
        """Return the smallest ratio, in hundredths, whose expected KL is at most ``bound``; 1 if it
        exceeds ``MAX_RATIO``."""
        unrepaired = self.at(documents, 0.0)
        if not math.isfinite(unrepaired):  # not measured: logits were not finite
            return 1.0
        if unrepaired <= bound:
            return 0.0
        ratio = math.ceil(100 * math.log(unrepaired / bound) / FALL - 1e-9) / 100
        return ratio if ratio <= MAX_RATIO else 1.0


@torch.no_grad()
def measure_scale(model: Model, tokenizer: Any, selector: str, encode: str) -> float:
    """Return the model's mean KL on built-in questions, relative to the fitted model's."""
    encoders: dict[tuple[int, ...], Encoder] = {}
    found = []
    for example in synthetic(SYNTHETIC, QUESTIONS // len(SYNTHETIC), default_filler()):
        case = tokenise(tokenizer, example, DOCUMENTS, DOCUMENT_TOKENS)
        ids = torch.tensor(case.ids, device=model.device)
        n = ids.numel()
        cache = dense_cache(model, n + ANSWER_TOKENS)
        logits = [model.logits(engine.prefill(model, ids, cache.upto(n))[-1:])[0]]
        steps = greedy_steps(
            model,
            cache,
            n,
            [int(logits[0].argmax())],
            ANSWER_TOKENS,
            tokenizer.eos_token_id,
            logits,
        )
        answer = engine.finish(steps)
        prompt = prompt_of_case(case, encode_case(model, case, encode, encoders), model.device)
        fused = fused_prefill(model, prompt, cache.upto(n), make_selector(selector), RATIO)
        reused = forced_logprobs(model, cache, fused.logits, answer, n)
        found.append(divergence(torch.stack(logits).log_softmax(-1), reused))
    return sum(found) / len(found) / FITTED_AT
