"""Figure 3: what the question attends to after each kind of recompute."""

from __future__ import annotations

from typing import Any

import torch
from artefact import Context
from comparators.quality import mean_se

from cachetune import pictures
from cachetune.arms import Arm
from cachetune.measure import case_of, loaded
from cachetune.parts import each
from cachetune.questions import questions
from cachetune.summary import interval
from canopy_chunks import engine
from canopy_chunks.cache import KVCache, dense_cache
from canopy_chunks.encode import Encoder
from canopy_chunks.fusion import fused_prefill
from canopy_chunks.model import Model
from canopy_chunks.quality import prompt_of_case
from canopy_chunks.tasks import Example

QUESTIONS = 5
ARMS = (
    Arm("random", 0.0),
    *(Arm(n) for n in ("frequency", "high-frequency", "random", "epic", "question")),
)
BINS = 96
"""Columns of a heat map: context positions side by side."""


def run(context: Context) -> dict[str, Any]:
    """Distance of each arm's attention to full recompute's, and the first question's heat maps."""
    found = each(context, questions(context.data, "musique", QUESTIONS), _one)
    names = list(found[0]["distance"])
    pictures.heat_maps(context.figure(), found[0]["maps"])
    rows = {}
    for name in names:
        values = [question["distance"][name] for question in found]
        none = [question["distance"]["no recompute, alone"] for question in found]
        rows[name] = {
            "total_variation": [round(x, 4) for x in mean_se(values)],
            "minus_no_recompute": interval([a - b for a, b in zip(values, none)]),
            "cosine": round(mean_se([q["cosine"][name] for q in found])[0], 4),
        }
    return {"questions": QUESTIONS, "data": "musique", "arms": rows}


def _one(example: Example) -> dict[str, Any]:
    model, _ = loaded()
    case = case_of(example)
    ids, n = torch.tensor(case.ids), len(case.ids)
    encoder = Encoder(model)
    prompt = prompt_of_case(case, [encoder.encode(d) for d in case.documents], model.device)
    cache = dense_cache(model, n)
    engine.prefill(model, ids, cache)
    true = _attention(model, cache, ids, prompt.tail())
    maps, distance, cosine = {"full recompute": _columns(true)}, {}, {}
    for arm in ARMS:
        cache = dense_cache(model, n)
        fused_prefill(model, prompt, cache, arm.make(), arm.ratio)
        got = _attention(model, cache, ids, prompt.tail())
        distance[arm.name] = float((got - true).abs().sum(-1).mean() / 2)
        cosine[arm.name] = float(torch.cosine_similarity(got, true, dim=-1).mean())
        if arm.selector in ("frequency", "high-frequency") or arm.ratio == 0:
            maps[arm.name] = _columns(got)
    return {"distance": distance, "cosine": cosine, "maps": maps}


def _attention(model: Model, cache: KVCache, ids: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
    """``[layers, tail, context]``: the question's attention to all before it, the mean of the heads,
    as shares of what goes there. The first token of all, where most of it rests, is left out."""
    shape, end = model.shape, int(tail[0])
    before, found = torch.arange(1, end), []
    group, scale = shape.heads // shape.kv_heads, shape.head_dim**-0.5

    def watch(layer: int, q: torch.Tensor, _: torch.Tensor) -> None:
        keys, _ = cache.read(layer, before)
        asked = (q * scale).unflatten(1, (shape.kv_heads, group))
        weight = torch.einsum("mhgd,nhd->mhgn", asked, keys).softmax(dim=-1)
        found.append(weight.mean(dim=(1, 2)))

    engine.run_rows(model, ids[tail], tail, cache, watch=watch)
    return torch.stack(found)


def _columns(weight: torch.Tensor) -> list[list[float]]:
    """A heat map: the last layers' mean, question tokens by ``BINS`` columns of the context."""
    mean = weight[weight.shape[0] // 2 :].mean(0)
    at = torch.arange(mean.shape[1]) * BINS // mean.shape[1]
    columns = torch.zeros(mean.shape[0], BINS).index_add(1, at, mean)
    return [[round(float(x), 4) for x in row] for row in columns]
