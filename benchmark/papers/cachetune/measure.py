"""Measure every arm on one question: closeness to full recompute, and cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from cachetune.arms import ReuseArm
from cachetune.decode import side_by_side
from comparators.quality import prefix_for
from comparators.weights import load

from canopy_documents.fuse import rows as row_forward
from canopy_documents.fuse.cache import KVCache, dense_cache
from canopy_documents.fuse.encode import Encoder
from canopy_documents.fuse.fusion import fused_prefill
from canopy_documents.fuse.model import Model
from canopy_documents.fuse.selectors import OfflineSelector
from canopy_documents.quality.answers import Case, make_case, prompt_of_case
from canopy_documents.quality.tasks import Example
from question import ROOT

MODEL = ROOT / ".canopy" / "models" / "smollm2-135m-instruct"
CHUNK_TOKENS = 160
FORCED_TOKENS = 16
"""Tokens of full recompute's own answer along which KL is measured."""


@cache
def load_model() -> tuple[Model, Any]:
    """The model in fp32 and its tokenizer; one thread."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    return load(str(MODEL)), AutoTokenizer.from_pretrained(MODEL)


def case_of(example: Example, documents: int = 6, chunk_tokens: int = CHUNK_TOKENS) -> Case:
    """A question as tokens."""
    return make_case(load_model()[1], example, documents, chunk_tokens)


def compare_arms(example: Example, arms: Sequence[ReuseArm]) -> dict[str, dict[str, Any]]:
    """By arm's name (``full`` first): ``cpu_s`` of its prefill, ``run`` (rows computed, as a share of the
    prompt), ``kl`` in nats a token and ``top1``. CPU seconds are one thread's; a score that needs the
    chunk alone is made before the clock starts, since it is stored with the chunk.
    """
    model, _ = load_model()
    case = case_of(example)
    ids = torch.tensor(case.token_ids)
    n, cache_tokens = len(case.token_ids), len(case.token_ids) + FORCED_TOKENS
    caches = [dense_cache(model, cache_tokens)]
    start_s = time.process_time()
    full_logits = model.logits(row_forward.prefill(model, ids, caches[0].truncated(n))[-1:])[0]
    rows: dict[str, dict[str, Any]] = {"full": {"cpu_s": time.process_time() - start_s, "run": 1.0}}
    first_logits = [full_logits]
    chunks: dict[str, list[Any]] = {}
    for arm in arms:
        if arm.encoding not in chunks:
            encoder = Encoder(model, prefix_for(case, arm.encoding))
            chunks[arm.encoding] = [encoder.encode(d) for d in case.documents]
        selector = arm.make_selector()
        prompt = prompt_of_case(case, chunks[arm.encoding], model.device)
        if isinstance(selector, OfflineSelector):
            for chunk in chunks[arm.encoding]:
                selector.scores(chunk)
        caches.append(dense_cache(model, cache_tokens))
        start_s = time.process_time()
        fused = fused_prefill(model, prompt, caches[-1].truncated(n), selector, arm.ratio)
        rows[arm.name] = {"cpu_s": time.process_time() - start_s, "run": fused.rows.numel() / n}
        first_logits.append(fused.logits)
    _add_closeness(model, caches, n, first_logits, rows)
    return rows


def _add_closeness(
    model: Model,
    caches: Sequence[KVCache],
    n: int,
    first_logits: Sequence[torch.Tensor],
    rows: dict[str, dict[str, Any]],
) -> None:
    """Add KL and agreement to the rows: along the answer of full recompute, which is the first."""
    full_logits, tokens = [first_logits[0]], [int(first_logits[0].argmax())]
    for position in range(n, n + FORCED_TOKENS - 1):
        last = torch.tensor([tokens[-1:]])
        full_logits.append(side_by_side(model, caches[:1], torch.tensor([position]), last)[0, 0])
        tokens.append(int(full_logits[-1].argmax()))
    true, forced_tokens = torch.stack(full_logits).log_softmax(-1), torch.tensor(tokens)
    position = torch.arange(n, n + FORCED_TOKENS - 1)
    ids = forced_tokens[:-1].expand(len(caches), -1)
    for start in range(0, len(caches), 8):  # all logits at once would take half a gigabyte
        batch = slice(start, start + 8)
        later_logits = side_by_side(model, caches[batch], position, ids[batch])
        arms = zip(list(rows.values())[batch], first_logits[batch], later_logits)
        for row, first_row, arm_logits in arms:
            logprobs = torch.cat([first_row[None], arm_logits]).log_softmax(-1)
            row["kl"] = max(0.0, float((true.exp() * (true - logprobs)).sum(-1).mean()))
            row["top1"] = float((logprobs.argmax(-1) == forced_tokens).float().mean())
