"""Time to first token of single requests, with known and with new documents."""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

from rag_load import Prompt, ask, flush, learn, median, off, state
from rag_pairs import pairs
from rag_server import Rows, a_library, chunks_for, started


def ttft(tokenizer: Any, args: argparse.Namespace) -> None:
    """Return medians of alternating requests, by prompt length."""
    lengths, rows = [int(x) for x in args.lengths.split(",")], Rows(args)
    with started(args, max(lengths)) as server:
        print("tokens chunks cached  prefix cache  reuse    ratio  planning  rate   recomputed")
        for tokens in lengths:
            flush(server.url)
            rows.add(_by_length(server, tokenizer, args, tokens))


def _by_length(
    server: Any, tokenizer: Any, args: argparse.Namespace, tokens: int
) -> dict[str, Any]:
    lib, chunks = a_library(tokenizer, args, tokens)
    learn(server.url, lib, chunks)
    prompt, answers = pairs(server, lib, chunks, args.repeats)
    plain, fused = zip(*answers)
    mine = fused[-1]
    row = {
        "tokens": len(prompt.ids),
        "chunks": chunks,
        "prefix_s": median([a.ttft_s for a in plain]),
        "prefix_cached": median([a.cached for a in plain]),
        "reuse_s": median([a.ttft_s for a in fused]),
        "speedup": median([a.ttft_s / b.ttft_s for a, b in answers]),
        "plan_s": median([a.report["plan_ms"] / 1000 for a in fused]),
        "ratio": mine.report["ratio"],
        "recomputed": mine.report["recomputed"],
        "computed": mine.report["computed"],
        "reused_by_tier": {k: v for k, v in mine.report.items() if k.startswith("reused_")},
        "all": {
            "prefix_s": [a.ttft_s for a in plain],
            "reuse_s": [a.ttft_s for a in fused],
            "prefix_cpu_s": [a.cpu_s for a in plain],
            "reuse_cpu_s": [a.cpu_s for a in fused],
            "plan_ms": [a.report["plan_ms"] for a in fused],
        },
    }
    print(
        f"{row['tokens']:6} {chunks:6} {row['prefix_cached']:6.0f}  {row['prefix_s']:9.2f} s  "
        f"{row['reuse_s']:5.2f} s  {row['speedup']:5.2f}x  {row['plan_s']:6.2f} s  "
        f"{row['ratio']:.3f}  {row['recomputed']:10}",
        flush=True,
    )
    return row


def first_use(tokenizer: Any, args: argparse.Namespace) -> None:
    """Alternate new prompts with named documents and new prompts without."""
    rows, chunks = Rows(args), chunks_for(args.tokens, args.chunks)
    lib, _ = a_library(tokenizer, args, args.tokens)
    size = len(lib.documents[0])
    with started(args, args.tokens) as server:
        ask(server.url, off(lib.prompt(chunks)))  # the first request of a server is slow
        for turn in range(args.repeats):
            draw, pair = random.Random(f"{args.seed} {turn}"), {}
            for marked in (turn % 2 == 0, turn % 2 == 1):
                ids, bounds = list(lib.system), []
                for _ in range(chunks):
                    bounds += [len(ids), len(ids) + size]
                    ids += [draw.randrange(1000, 20_000) for _ in range(size)]
                prompt = Prompt(ids + lib.questions[0], bounds, ())
                pair[marked] = ask(server.url, prompt if marked else off(prompt)).ttft_s
                while state(server.url)["waiting_chunks"]:
                    time.sleep(0.2)
            row = {"plain_s": pair[False], "named_s": pair[True], "times": pair[True] / pair[False]}
            rows.add(row)
            print(
                f"plain {row['plain_s']:.3f} s, documents named {row['named_s']:.3f} s: "
                f"{row['times']:.3f} times",
                flush=True,
            )
        print(f"median {median([r['times'] for r in rows]):.3f} times")
