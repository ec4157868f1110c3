"""A model split over two ranks, and fused prompts of it: functions and scenarios of `ranks`."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from support.document_models import build_model  # isort: skip (it finds comparators)
from comparators.weights import from_transformers

from canopy_documents.fuse.cache import dense_cache
from canopy_documents.fuse.fusion import fused_prefill
from canopy_documents.fuse.rows import Stop
from canopy_documents.fuse.selectors import make_selector
from canopy_documents.quality.checker import answers_differ
from canopy_documents.store.chunk import FusedPrompt, PlacedChunk
from support.fused_prompts import encode

RANK_COUNT, PREFIX_TOKENS, DOCUMENT_TOKENS, QUESTION_TOKENS = 2, 12, 50, 9


@dataclasses.dataclass
class GlooRanks:
    """A model's ``ranks`` over gloo: sums, embeds and gathers over this test's processes."""

    embed_rows: torch.Tensor

    def sum(self, part):
        dist.all_reduce(part)
        return part

    def embed(self, ids):
        return F.embedding(ids, self.embed_rows)

    def gather(self, logits):
        parts = [torch.empty_like(logits) for _ in range(RANK_COUNT)]
        dist.all_gather(parts, logits.contiguous())
        return torch.cat(parts, dim=-1)


def split_model(model, rank: int):
    """Return one rank's part of a model."""
    shape = model.shape
    kv_heads, heads = shape.kv_heads // RANK_COUNT, shape.heads // RANK_COUNT

    def own_part(tensor, dim=0):
        return tensor.chunk(RANK_COUNT, dim)[rank].contiguous()

    head_dim = shape.head_dim

    def split_layer(whole_layer):
        q, k, v = whole_layer.qkv.split([shape.heads * head_dim, *[shape.kv_heads * head_dim] * 2])
        gate, up = whole_layer.gate_up.chunk(2)
        return dataclasses.replace(
            whole_layer,
            qkv=torch.cat([own_part(q), own_part(k), own_part(v)]),
            out=own_part(whole_layer.out, 1),
            gate_up=torch.cat([own_part(gate), own_part(up)]),
            down=own_part(whole_layer.down, 1),
        )

    return dataclasses.replace(
        model,
        shape=dataclasses.replace(shape, heads=heads, kv_heads=kv_heads),
        layers=tuple(split_layer(layer) for layer in model.layers),
        head=own_part(model.head),
        ranks=GlooRanks(model.embed),
    )


def prompt_of_three(model) -> FusedPrompt:
    """Three chunks in another order than they were cut in."""
    ids = torch.randint(0, 300, (230,), generator=torch.Generator().manual_seed(1))
    prefix = ids[:PREFIX_TOKENS]
    starts = range(PREFIX_TOKENS, PREFIX_TOKENS + 3 * DOCUMENT_TOKENS, DOCUMENT_TOKENS)
    texts = [ids[start : start + DOCUMENT_TOKENS].tolist() for start in starts]
    reordered = [encode(model, texts[i], prefix.tolist()) for i in (2, 0, 1)]
    documents = [torch.tensor(chunk.ids) for chunk in reordered]
    prompt_ids = torch.cat([prefix, *documents, ids[-QUESTION_TOKENS:]])
    return FusedPrompt(prompt_ids, tuple(map(PlacedChunk, reordered, starts)))


def fuse(model, selector: str):
    """Return the computed rows and the last token's logits of a fused prompt of three chunks."""
    prompt = prompt_of_three(model)
    cache = dense_cache(model, len(prompt))
    fused = fused_prefill(model, prompt, cache, make_selector(selector), 0.2)
    return fused.rows, fused.logits


def check_answers(model, ratio: float) -> tuple[bool, int]:
    """Return whether the prompt's exact and fused answers differ, and the number of steps of the check."""
    prompt, steps_taken = prompt_of_three(model), 0
    ids = prompt.ids.tolist()
    check = answers_differ(model, ids, lambda: prompt.placed, "question", ratio, None, Stop())
    while True:
        try:
            next(check)
        except StopIteration as stop:
            return stop.value, steps_taken
        steps_taken += 1


def check_two_ratios(rank: int, _: Path) -> list[tuple[bool, int]]:
    torch.set_num_threads(1)
    model = split_model(from_transformers(build_model("llama")), rank)
    return [check_answers(model, ratio) for ratio in (0.0, 1.0)]


def fuse_by_question(rank: int, _: Path) -> list[Any]:
    torch.set_num_threads(1)
    model = split_model(from_transformers(build_model("llama")), rank)
    return [tensor.tolist() for tensor in fuse(model, "question")]
