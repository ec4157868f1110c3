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
from canopy_documents.quality.answers import Case, prompt_of_case, tokenise
from canopy_documents.quality.tasks import Example
from question import ROOT

MODEL = ROOT / ".canopy" / "models" / "smollm2-135m-instruct"
CHUNK_TOKENS = 160
FORCED = 16
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
    return tokenise(load_model()[1], example, documents, chunk_tokens)


def compare(example: Example, arms: Sequence[ReuseArm]) -> dict[str, dict[str, Any]]:
    """By arm's name (``full`` first): ``cpu_s`` of its prefill, ``run`` (rows computed, as a share of the
    prompt), ``kl`` in nats a token and ``top1``. CPU seconds are one thread's; a score that needs the
    chunk alone is made before the clock starts, since it is stored with the chunk.
    """
    model, _ = load_model()
    case = case_of(example)
    ids = torch.tensor(case.ids)
    n, room = len(case.ids), len(case.ids) + FORCED
    caches = [dense_cache(model, room)]
    start = time.process_time()
    first = model.logits(row_forward.prefill(model, ids, caches[0].upto(n))[-1:])[0]
    rows: dict[str, dict[str, Any]] = {"full": {"cpu_s": time.process_time() - start, "run": 1.0}}
    firsts = [first]
    chunks: dict[str, list[Any]] = {}
    for arm in arms:
        if arm.encode not in chunks:
            encoder = Encoder(model, prefix_for(case, arm.encode))
            chunks[arm.encode] = [encoder.encode(d) for d in case.documents]
        prompt, selector = prompt_of_case(case, chunks[arm.encode], model.device), arm.make()
        if isinstance(selector, OfflineSelector):
            for chunk in chunks[arm.encode]:
                selector.scores(chunk)
        caches.append(dense_cache(model, room))
        start = time.process_time()
        fused = fused_prefill(model, prompt, caches[-1].upto(n), selector, arm.ratio)
        rows[arm.name] = {"cpu_s": time.process_time() - start, "run": fused.rows.numel() / n}
        firsts.append(fused.logits)
    _closeness(model, caches, n, firsts, rows)
    return rows


def _closeness(
    model: Model,
    caches: Sequence[KVCache],
    n: int,
    firsts: Sequence[torch.Tensor],
    rows: dict[str, dict[str, Any]],
) -> None:
    """KL and agreement along the first ``FORCED`` tokens of full recompute's (the first's) answer."""
    reference, tokens = [firsts[0]], [int(firsts[0].argmax())]
    for position in range(n, n + FORCED - 1):
        last = torch.tensor([tokens[-1:]])
        reference.append(side_by_side(model, caches[:1], torch.tensor([position]), last)[0, 0])
        tokens.append(int(reference[-1].argmax()))
    true, forced = torch.stack(reference).log_softmax(-1), torch.tensor(tokens)
    position = torch.arange(n, n + FORCED - 1)
    ids = forced[:-1].expand(len(caches), -1)
    for part in range(0, len(caches), 8):  # all logits at once would take half a gigabyte
        rest = side_by_side(model, caches[part : part + 8], position, ids[part : part + 8])
        for row, first, logits in zip(list(rows.values())[part:], firsts[part:], rest):
            got = torch.cat([first[None], logits]).log_softmax(-1)
            row["kl"] = max(0.0, float((true.exp() * (true - got)).sum(-1).mean()))
            row["top1"] = float((got.argmax(-1) == forced).float().mean())
