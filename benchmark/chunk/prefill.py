"""Full against fused prefill on the same code, by prompt length: speed-up, and time by step.

    python benchmark/chunk/prefill.py --model DIR [--lengths 2048,4096,8192] [--json OUT]

Random tokens: the work does not depend on what the tokens are. Runs alternate between full and
fused, so that a noisy machine hurts both; medians are reported, and the spread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from comparators import CLASSES, make_selector
from comparators.weights import load

from canopy_chunks.fuse import rows as engine
from canopy_chunks.fuse.cache import dense_cache
from canopy_chunks.fuse.encode import encode
from canopy_chunks.fuse.fusion import fused_prefill
from canopy_chunks.fuse.model import Model
from canopy_chunks.fuse.selectors import Offline
from canopy_chunks.store.chunk import Chunk, FusedPrompt, Placed

PREFIX, QUESTION = 32, 32


def prompt_of(model: Model, length: int, chunk_tokens: int) -> FusedPrompt:
    """Prefix, chunks of ``chunk_tokens`` and a question; one real chunk under many sets of tokens."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(10, model.shape.vocab, (length,), generator=generator)
    room = length - PREFIX - QUESTION
    count = max(1, round(room / chunk_tokens))
    ends = [PREFIX + room * (i + 1) // count for i in range(count)]
    most = -(-room // count)
    one = encode(model, ids[PREFIX : PREFIX + most].tolist(), ids[:PREFIX].tolist())
    placed, at = [], PREFIX
    for end in ends:
        n, tokens = end - at, tuple(ids[at:end].tolist())
        chunk = Chunk(tokens, one.raw_k[:, :n].clone(), one.v[:, :n].clone(), one.prefix)
        placed.append(Placed(chunk, at))
        at = end
    return FusedPrompt(ids, tuple(placed))


def measure(model: Model, prompt: FusedPrompt, selector: str, ratio: float, repeats: int) -> dict:
    """Medians in seconds of alternating runs. CPU seconds (all threads) and wall time.

    Both run in the same cache, which has been written before: a server's pool is there already.
    """
    choose, full, fused, parts, cpu = make_selector(selector), [], [], [], [[], []]
    cache = dense_cache(model, len(prompt))
    for pool in (*cache.k, *cache.v):
        pool.fill_(0)
    for _ in range(repeats):
        begin, used = time.perf_counter(), time.process_time()
        model.logits(engine.prefill(model, prompt.ids, cache)[-1:])
        full.append(time.perf_counter() - begin)
        cpu[0].append(time.process_time() - used)
        used = time.process_time()
        timing = fused_prefill(model, prompt, cache, choose, ratio).timing
        cpu[1].append(time.process_time() - used)
        fused.append(timing.total)
        parts.append(timing)
    middle = statistics.median
    return {
        "tokens": len(prompt),
        "ratio": ratio,
        "selector": selector,
        "full_s": middle(full),
        "fused_s": middle(fused),
        "speedup": middle(full) / middle(fused),
        "speedup_each": [round(a / b, 2) for a, b in zip(full, fused)],
        "speedup_cpu_seconds": middle(cpu[0]) / middle(cpu[1]),
        "select_s": middle([t.select for t in parts]),
        "place_s": middle([t.place for t in parts]),
        "recompute_s": middle([t.recompute for t in parts]),
    }


def index_cost(model: Model, tokens: int) -> dict:
    """CPU seconds to make each offline selector's scores for one chunk, and of its prefill.

    CPU seconds, because both are pure computation and a shared machine spoils the wall's.
    """
    ids = torch.randint(10, model.shape.vocab, (tokens,)).tolist()
    begin = time.process_time()
    chunk = encode(model, ids)
    prefill_s, scores = time.process_time() - begin, {}
    for selector in (c() for c in CLASSES if issubclass(c, Offline)):
        laps = []
        for _ in range(3):
            chunk.scores.clear()
            begin = time.process_time()
            selector.scores(chunk)
            laps.append(time.process_time() - begin)
        scores[selector.name] = statistics.median(laps)
    return {"tokens": tokens, "prefill_s": prefill_s, "index_s": scores}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--lengths", default="2048,4096,8192")
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--selector", default="question")
    parser.add_argument("--chunk-tokens", type=int, default=400)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--index-tokens", type=int, default=0, help="time index generation too")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = load(args.model, getattr(torch, args.dtype))
    rows, index = [], None
    print("tokens   full s  fused s  speed-up  (CPU s)  select   place  recompute")
    measure(model, prompt_of(model, 256, 96), args.selector, args.ratio, 1)  # warms up
    for length in (int(n) for n in args.lengths.split(",")):
        prompt = prompt_of(model, length, args.chunk_tokens)
        r = measure(model, prompt, args.selector, args.ratio, args.repeats)
        rows.append(r)
        print(
            f"{r['tokens']:>6} {r['full_s']:>8.2f} {r['fused_s']:>8.2f} {r['speedup']:>9.2f} "
            f"{r['speedup_cpu_seconds']:>8.2f} {r['select_s']:>7.3f} {r['place_s']:>7.3f} "
            f"{r['recompute_s']:>10.3f}",
            flush=True,
        )
    if args.index_tokens:
        index = index_cost(model, args.index_tokens)
        for name, seconds in index["index_s"].items():
            share = seconds / index["prefill_s"]
            print(f"index {name:<20} {seconds * 1e3:8.1f} ms = {share:.2%} of the chunk's prefill")
    if args.json:
        args.json.write_text(
            json.dumps({"rows": rows, "index": index, "args": vars(args)}, default=str)
        )


if __name__ == "__main__":
    main()
