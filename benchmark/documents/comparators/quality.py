"""Compare fused prefill with full recompute: KL, agreement and answers kept, with standard errors."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from canopy_documents.fuse import rows as row_forward
from canopy_documents.fuse.cache import KVCache, dense_cache
from canopy_documents.fuse.encode import Encoder
from canopy_documents.fuse.fusion import fused_prefill
from canopy_documents.fuse.model import Model
from canopy_documents.fuse.selectors import OfflineSelector
from canopy_documents.quality import answers as quality
from canopy_documents.quality.answers import Case, greedy_steps, normalise, prompt_of_case
from canopy_documents.store.chunk import Chunk
from comparators import make_selector

ENCODINGS = ("prefix", "mixed", "standin", "bos", "alone")
"""Heads that a chunk may be encoded behind: the prompt's prefix; that where it comes first and that with
stand-ins elsewhere; the latter everywhere; the prompt's first token, the BOS of a model that has
one, as CacheBlend's script does; nothing."""
FORCED_TOKENS = 16
"""Tokens of the full recompute's own continuation that each variant is forced along; also those of
an answer by default."""


@dataclass(slots=True)
class Reference:
    """Full recompute: log-probabilities ``[FORCED_TOKENS, vocab]``, its greedy tokens, its text, seconds."""

    logprobs: torch.Tensor
    tokens: list[int]
    text: str
    ttft_s: float


def reference_of(
    model: Model, tokenizer: Any, case: Case, answer_tokens: int = FORCED_TOKENS
) -> Reference:
    """Return full recompute of the prompt, its greedy continuation, and its text of ``answer_tokens``."""
    ids = torch.tensor(case.token_ids, device=model.device)
    cache = dense_cache(model, ids.numel() + max(FORCED_TOKENS, answer_tokens))
    start = time.perf_counter()
    logits_row = model.logits(row_forward.prefill(model, ids, cache.truncated(ids.numel()))[-1:])
    ttft_s = time.perf_counter() - start
    logits, tokens = [logits_row[0]], [int(logits_row.argmax())]
    for step in range(FORCED_TOKENS - 1):
        position = ids.numel() + step
        last = torch.tensor(tokens[-1:], device=model.device)
        hidden = row_forward.prefill(model, last, cache.truncated(position + 1), position)
        logits_row = model.logits(hidden)
        logits.append(logits_row[0])
        tokens.append(int(logits_row.argmax()))
    text = _continue_answer(model, tokenizer, cache, ids.numel(), tokens, answer_tokens)
    return Reference(torch.stack(logits).log_softmax(-1), tokens, text, ttft_s)


def prefix_for(case: Case, encoding: str, index: int = 0) -> tuple[int, ...]:
    """Return the tokens after which a document of a case is encoded with ``encoding``."""
    if encoding == "alone":
        return ()
    if encoding == "bos":
        return tuple(case.prefix[:1])
    if encoding == "prefix":
        return tuple(case.prefix)
    if encoding == "standin":
        return (*case.prefix, *case.stand_in_prefix)
    return quality.prefix_for(case, index)


def encode_case(
    model: Model, case: Case, encoding: str, encoders: dict[tuple[int, ...], Encoder] | None = None
) -> list[Chunk]:
    """``canopy_documents.quality.answers.encode_case``, with this file's encodings too."""
    return quality.encode_case(model, case, encoders, lambda case, i: prefix_for(case, encoding, i))


def measure(
    model: Model,
    tokenizer: Any,
    case: Case,
    reference: Reference,
    chunks: Sequence[Chunk],
    selector: str,
    ratio: float,
    generate: bool,
    answer_tokens: int = FORCED_TOKENS,
) -> dict[str, Any]:
    """One variant on one example: ``kl`` (nats a token), ``top1``, ``text``, ``margin``, seconds.

    margin: by how many nats full recompute preferred its token at the first difference of the greedy
    answers; None without a difference.
    """
    prompt = prompt_of_case(case, chunks, model.device)
    chooser = make_selector(selector)
    if isinstance(chooser, OfflineSelector):  # their scores are stored: no time of a request
        for chunk in chunks:
            chooser.scores(chunk)
    n = len(prompt)
    cache = dense_cache(model, n + max(FORCED_TOKENS, answer_tokens))
    start = time.perf_counter()
    fused = fused_prefill(model, prompt, cache.truncated(n), chooser, ratio)
    ttft_s = time.perf_counter() - start
    logprobs = forced_logprobs(model, cache, fused.logits, reference.tokens, n)
    true_logprobs = reference.logprobs
    kl = divergence(true_logprobs, logprobs)
    same_top = (logprobs.argmax(-1) == true_logprobs.argmax(-1)).float()
    difference = first_difference(logprobs, reference.tokens, tokenizer.eos_token_id)
    text, margin = None, None
    if difference is not None:
        token = int(logprobs[difference].argmax())
        true_row = true_logprobs[difference]
        margin = float(true_row[reference.tokens[difference]] - true_row[token])
    if generate:
        text = reference.text
        first_tokens = reference.tokens
        if difference is not None:
            first_tokens = [*reference.tokens[:difference], token]
        if difference is not None or answer_tokens > FORCED_TOKENS:
            text = _continue_answer(model, tokenizer, cache, n, first_tokens, answer_tokens)
    return {
        "kl": kl,
        "top1": float(same_top.mean()),
        "text": text,
        "margin": margin,
        "ttft_s": ttft_s,
        "rows": fused.rows.numel(),
    }


def forced_logprobs(
    model: Model,
    cache: KVCache,
    first_logits: torch.Tensor,
    tokens: Sequence[int],
    prompt_tokens: int,
) -> torch.Tensor:
    """Return log-probabilities ``[len(tokens), vocab]`` of the answer ``tokens``, which follow
    ``prompt_tokens`` tokens whose KV is in the cache.

    ``first_logits [vocab]``: the logits of the answer's first token.
    """
    forced = torch.tensor(tokens[:-1], dtype=torch.long, device=model.device)
    if not forced.numel():
        return first_logits[None].log_softmax(-1)
    end = prompt_tokens + len(forced)
    later_hidden = row_forward.prefill(model, forced, cache.truncated(end), prompt_tokens)
    return torch.cat([first_logits[None], model.logits(later_hidden)]).log_softmax(-1)


def divergence(true_logprobs: torch.Tensor, logprobs: torch.Tensor) -> float:
    """Return the mean KL divergence (nats per token) of log-probabilities ``logprobs [m, vocab]`` from
    ``true_logprobs``."""
    return max(float((true_logprobs.exp() * (true_logprobs - logprobs)).sum(-1).mean()), 0.0)


def first_difference(
    logprobs: torch.Tensor, tokens: Sequence[int], end_token: int | None
) -> int | None:
    """Where the greedy tokens of ``logprobs [m, vocab]`` first differ from ``tokens``, along which they
    were forced; None where they do not up to the ``end_token``."""
    for index, (wanted_token, token) in enumerate(zip(tokens, logprobs.argmax(-1).tolist())):
        if wanted_token != token:
            return index
        if wanted_token == end_token:
            return None
    return None


def _continue_answer(
    model: Model, tokenizer: Any, cache: KVCache, n: int, start: Sequence[int], max_tokens: int
) -> str:
    """Greedy text of at most ``max_tokens`` tokens that begins with ``start``, behind n tokens of the cache."""
    steps = greedy_steps(model, cache, n, start, max_tokens, tokenizer.eos_token_id)
    return quality.answer_text(tokenizer, row_forward.finish(steps))


def f1(text: str, answers: Iterable[str]) -> float:
    """Best token F1 over the answers."""
    answer_words = normalise(text).split()
    best_f1 = 0.0
    for answer in answers:
        expected_words = normalise(answer).split()
        shared_words = sum((Counter(answer_words) & Counter(expected_words)).values())
        if shared_words:
            best_f1 = max(best_f1, 2 * shared_words / (len(answer_words) + len(expected_words)))
    return best_f1


def rouge_l(text: str, answers: Iterable[str]) -> float:
    """Best ROUGE-L (F measure of the longest common subsequence of words) over the answers."""
    answer_words, best_score = normalise(text).split(), 0.0
    for answer in answers:
        expected_words = normalise(answer).split()
        row = [0] * (len(expected_words) + 1)
        for word in answer_words:
            diagonal = 0
            for j, other in enumerate(expected_words, 1):
                above = row[j]
                row[j] = diagonal + 1 if word == other else max(above, row[j - 1])
                diagonal = above
        if row[-1]:
            best_score = max(best_score, 2 * row[-1] / (len(answer_words) + len(expected_words)))
    return best_score


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error (0 for one value)."""
    if not values:
        return math.nan, math.nan
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return statistics.fmean(values), error
