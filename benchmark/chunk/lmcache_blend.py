"""LMCache's own CacheBlend beside ours, on the same model, prompts and KV: KL.

    pip install --target LMC --no-deps lmcache==0.5.6
    PYTHONPATH=$PYTHONPATH:LMC python benchmark/chunk/lmcache_blend.py --model DIR \
        --data musique_100.json --limit 8 [--ratio 0.15] [--json rows.jsonl]

``LMCBlender.process_qkv`` of the package chooses and merges, as it is: which tokens' K deviate most at
layer 1, and what replaces them. Around it LMCache has vLLM's layers and kernels, which need a GPU; here
this project's own layers run, in the order of ``LMCBaseModel.compute_layer``. As there, system text and
documents are blended and the question is computed afterwards. Questions in the file are skipped.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from comparators import questions
from comparators.plain_model import PlainModel, norm
from comparators.quality import FORCED, Reference, encode_case, mean_se, measure, refer
from comparators.weights import load
from lmcache.v1.compute.blend.blender import LMCBlender
from lmcache.v1.compute.blend.metadata import LMCBlendCommonMetadata, LMCBlendMetadata

from canopy_chunks.fuse import rows as engine
from canopy_chunks.fuse.cache import KVCache, dense_cache
from canopy_chunks.fuse.encode import Encoder
from canopy_chunks.fuse.placement import place_chunks
from canopy_chunks.quality.answers import Case, prompt_of_case, tokenise
from canopy_chunks.store.chunk import FusedPrompt

CHECK_LAYER = 1
"""LMCache's default ``blend_check_layers``."""
OURS = ("question", "hkvd")


def blended(model: PlainModel, prompt: FusedPrompt, cache: KVCache, end: int, ratio: float) -> None:
    """Blend positions ``0..end`` of a cache that holds the reused KV, by LMCache's own class."""
    shape = model.shape
    width = shape.kv_heads * shape.head_dim

    def get_kv(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(pool[layer][:end, 0].reshape(end, width) for pool in (cache.k, cache.v))  # type: ignore[return-value]

    def rotary(positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> tuple[Any, Any]:
        heads = (x.view(len(positions), -1, shape.head_dim) for x in (q, k))
        return tuple(model.rope.apply(x, positions).flatten(1) for x in heads)  # type: ignore[return-value]

    blender = object.__new__(LMCBlender)  # its constructor requires a loaded vLLM model
    layers = [SimpleNamespace(self_attn=SimpleNamespace(rotary_emb=rotary))] * shape.layers
    vllm = SimpleNamespace(model=SimpleNamespace(layers=layers))
    blender.layerwise_model = SimpleNamespace(vllm_model=vllm)
    blender.gpu_connector = SimpleNamespace(get_kv=get_kv)
    blender.common_metadata = LMCBlendCommonMetadata(
        check_layers=[CHECK_LAYER], recomp_ratios=[ratio], thresholds=None
    )
    blender.metadata = LMCBlendMetadata(imp_indices=None, attn_mask=None, positions=None)
    attention = SimpleNamespace(update_from_top_indices=lambda top: None)
    hidden, output = F.embedding(prompt.ids[:end], model.embed), None
    part = KVCache(cache.k, cache.v, cache.slots[:end], cache.in_order)
    for i, layer in enumerate(model.layers):
        joined = F.linear(norm(hidden, layer.norm_in, shape.eps), layer.qkv, layer.qkv_bias)
        q, k, v = joined.split([shape.heads * shape.head_dim, width, width], dim=-1)
        q, k, v, hidden, output, attention = blender.process_qkv(
            q, k, v, hidden, i, output, attention
        )
        positions = blender.metadata.positions
        for pool, rows in ((cache.k, k), (cache.v, v)):
            pool[i][:end, 0] = rows.view(end, shape.kv_heads, shape.head_dim)
        rows = q.view(-1, shape.heads, shape.head_dim)
        attended = part.attend(i, rows, positions, shape.head_dim**-0.5)
        hidden = hidden + F.linear(attended.flatten(1), layer.out, layer.out_bias)
        wide, narrow = layer.mlp_biases
        mid = norm(hidden, layer.norm_mid, shape.eps)
        gate, up = F.linear(mid, layer.gate_up, wide).chunk(2, -1)
        hidden = hidden + F.linear(F.silu(gate) * up, layer.down, narrow)


@torch.no_grad()
def lmcache(
    model: PlainModel, case: Case, reference: Reference, chunks: list[Any], ratio: float
) -> float:
    """KL (nats a token) along full recomputation's answer."""
    prompt = prompt_of_case(case, chunks, model.device)
    n, end = len(prompt), prompt.placed[-1].end
    cache = dense_cache(model, n + FORCED)

    def upto(count: int) -> KVCache:
        return KVCache(cache.k, cache.v, cache.slots[:count], cache.in_order)

    engine.prefill(model, prompt.ids[: len(case.prefix)], upto(len(case.prefix)))  # cached exactly
    place_chunks(model, prompt.placed, upto(n), prompt.in_chunk())
    blended(model, prompt, cache, end, ratio)
    first = model.logits(engine.prefill(model, prompt.ids[end:], upto(n), end)[-1:])
    forced = torch.tensor(reference.tokens[:-1])
    rest = engine.prefill(model, forced, upto(n + FORCED - 1), n)
    rows = torch.cat([first, model.logits(rest)]).log_softmax(-1)
    true = reference.logprobs
    return float((true.exp() * (true - rows)).sum(-1).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--encode", default="alone,prefix")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    from transformers import AutoTokenizer

    model, tokenizer = load(args.model), AutoTokenizer.from_pretrained(args.model)
    rows = []
    if args.json and args.json.exists():
        rows = [json.loads(line) for line in args.json.read_text().splitlines()]
    done = {row["question"] for row in rows}
    encoders: dict[tuple[int, ...], Encoder] = {}
    for number, example in enumerate(questions.read(args.data, args.limit)):
        name = f"{Path(args.data).name}:{number}"
        if name in done:
            continue
        case = tokenise(tokenizer, example, 6, 160)
        reference = refer(model, tokenizer, case)
        row: dict[str, Any] = {"question": name, "ratio": args.ratio}
        for how in args.encode.split(","):
            chunks = encode_case(model, case, how, encoders)
            row[f"lmcache {how}"] = lmcache(model, case, reference, chunks, args.ratio)
            for ours in OURS:
                found = measure(model, tokenizer, case, reference, chunks, ours, args.ratio, False)
                row[f"{ours} {how}"] = found["kl"]
            none = measure(model, tokenizer, case, reference, chunks, "first-k", 0.0, False)
            row[f"none {how}"] = none["kl"]
        rows.append(row)
        if args.json:
            with args.json.open("a") as f:
                f.write(json.dumps(row) + "\n")
    print(f"r = {args.ratio}, {len(rows)} questions: KL (s.e.), minus `asked`, paired")
    for how in args.encode.split(","):
        for name in ("none", "lmcache", *OURS):
            kl, se = mean_se([row[f"{name} {how}"] for row in rows])
            off = mean_se([row[f"{name} {how}"] - row[f"asked {how}"] for row in rows])
            print(f"  {how:>7} {name:>8}: {kl:.3f} ({se:.3f}), {off[0]:+.3f} ({off[1]:.3f})")


if __name__ == "__main__":
    main()
