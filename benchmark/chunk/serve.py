"""Chunk reuse against prefix caching in one real server: time to first token, and request rate.

    python benchmark/chunk/serve.py ttft --model DIR --data FOLDER --lengths 2048,4096,7168
    python benchmark/chunk/serve.py load --model DIR --data FOLDER --tokens 2048 --rates 0.2,0.4,0.8

Both sides are the same server: a request either names its documents or says ``"off"``, which is
SGLang's own prefix cache. Orders are shuffled, so a prefix hit is the system prompt and now and
then a first document. ``--mode`` starts the server as a baseline (epic, cacheblend, ...).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from rag_load import Library, Prompt, ask, flush, learn, library, median, percentile, state

from sglang_canopy.launch import cpu_arguments, free_port, serving

QUESTION = 40


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("ttft", "load"))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder or file of documents")
    parser.add_argument("--lengths", default="2048,4096,7168", help="prompt tokens (ttft)")
    parser.add_argument("--tokens", type=int, default=2048, help="prompt tokens (load)")
    parser.add_argument("--rates", default="0.1,0.2,0.4,0.8", help="requests a second (load)")
    parser.add_argument("--seconds", type=float, default=60, help="of arrivals a rate (load)")
    parser.add_argument("--target", type=float, default=None, help="TTFT target in s (load)")
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--chunks", type=int, default=0, help="documents a prompt; 0: by length")
    parser.add_argument("--zipf", type=float, default=0.8)
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--selector", default=None)
    parser.add_argument("--mode", default="default")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--first-use", type=int, default=2, help="pairs of unseen prompts (ttft)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--disk", action="store_true", help="keep chunks on disk only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    longest = max(int(x) for x in args.lengths.split(","))
    if args.what == "load":
        longest = args.tokens
    flags = ["--canopy-chunks", "on", "--canopy-chunk-mode", args.mode]
    flags += ["--canopy-chunk-ratio", str(args.ratio), "--chunked-prefill-size", "8192"]
    flags += ["--mem-fraction-static", "0.6"]
    flags += ["--context-length", "8192", "--canopy-chunk-memory-mb", "0" if args.disk else "4096"]
    with tempfile.TemporaryDirectory() as folder:
        if args.disk:
            flags += ["--canopy-chunk-disk-mb", "8192", "--canopy-chunk-dir", folder]
        if args.selector:
            flags += ["--canopy-chunk-selector", args.selector]
        kv = (longest + 512) * (8 if args.what == "load" else 2)
        given = [*cpu_arguments(args.model, kv_tokens=kv, dtype=args.dtype), *flags]
        environment = {"OMP_NUM_THREADS": str(args.threads)}
        log = Path(folder) / "server.log"
        with serving(given, log=log, port=free_port(), environment=environment) as server:
            run = ttft if args.what == "ttft" else load
            rows = run(server.url, tokenizer, args)
            trouble = server.log_text().count("Traceback")
            print(f"errors in the server's log: {trouble}; counters: {_counters(server.url)}")
    if args.json:
        settings = {k: str(v) for k, v in vars(args).items()}
        args.json.write_text(
            json.dumps({"settings": settings, "cpus": os.cpu_count(), "rows": rows}, indent=1)
        )


def chunks_for(tokens: int, given: int) -> int:
    """6 documents at 2k tokens, 10 at 4k, 16 at 7k, unless told."""
    return given or max(4, min(20, round(2 + tokens / 480)))


def a_library(tokenizer: Any, args: argparse.Namespace, tokens: int) -> tuple[Library, int]:
    chunks = chunks_for(tokens, args.chunks)
    each = (tokens - QUESTION) // chunks
    return library(tokenizer, args.data, args.documents, each, args.zipf, args.seed), chunks


def ttft(url: str, tokenizer: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Medians of alternating requests, by prompt length; quality on the same requests."""
    rows = []
    print("tokens chunks  prefix cache  reuse    ratio  first use  plan    same first  KL top-20")
    for tokens in map(int, args.lengths.split(",")):
        lib, chunks = a_library(tokenizer, args, tokens)
        flush(url)
        turns = args.first_use if not rows else 0  # the shortest prompts show it best
        first = [_first_use(url, lib, chunks, i, args.seed) for i in range(turns)]
        learn(url, lib, chunks)
        plain, fused, plans, same, kls, cached = [], [], [], [], [], []
        for _ in range(args.repeats):
            prompt = lib.prompt(chunks)
            mine = ask(url, prompt, tops=20)
            theirs = ask(url, Prompt(prompt.ids, "off", ()), tops=20)  # type: ignore[arg-type]
            assert mine.report.get("fused"), mine.report
            fused.append(mine.ttft_s)
            plain.append(theirs.ttft_s)
            plans.append(mine.report["plan_ms"] / 1000)
            same.append(mine.ids[0] == theirs.ids[0])
            kls.append(kl(theirs.top, mine.top))
            cached.append(theirs.cached)
        row = {
            "tokens": len(prompt.ids),
            "chunks": chunks,
            "prefix_s": median(plain),
            "prefix_cached": median(cached),
            "reuse_s": median(fused),
            "speedup": median([a / b for a, b in zip(plain, fused)]),
            "first_use": median([b / a for a, b in first]) if first else None,
            "plan_s": median(plans),
            "same_first": sum(same) / len(same),
            "kl_top20": sum(kls) / len(kls),
            "recomputed": mine.report["recomputed"],
            "computed": mine.report["computed"],
            "all": {"prefix_s": plain, "reuse_s": fused},
        }
        rows.append(row)
        print(
            f"{row['tokens']:6} {chunks:6}  {row['prefix_s']:9.2f} s  {row['reuse_s']:5.2f} s  "
            f"{row['speedup']:5.2f}x  {_times(row['first_use'])}  {row['plan_s']:5.2f} s  "
            f"{row['same_first']:9.2f}  {row['kl_top20']:9.3f}",
            flush=True,
        )
    return rows


def _times(ratio: float | None) -> str:
    return f"{'-':>9}" if ratio is None else f"{ratio:8.3f}x"


def _first_use(url: str, lib: Library, chunks: int, turn: int, seed: int) -> tuple[float, float]:
    """Seconds of a prompt without and with marks, both never seen: fresh documents."""
    draw, out = random.Random(f"{seed} {turn}"), []
    size = len(lib.documents[0])
    for marked in (turn % 2 == 0, turn % 2 == 1):
        ids, bounds = list(lib.system), []
        for _ in range(chunks):
            bounds += [len(ids), len(ids) + size]
            ids += [draw.randrange(1000, 20_000) for _ in range(size)]
        ids += lib.questions[0]
        out.append((marked, ask(url, Prompt(ids, bounds if marked else "off", ())).ttft_s))  # type: ignore[arg-type]
        while state(url)["waiting_chunks"]:
            time.sleep(0.2)
    by = dict(out)
    return by[False], by[True]


def kl(true: dict[int, float], other: dict[int, float]) -> float:
    """KL of the first token over plain serving's 20 likeliest, the rest as one; nats."""
    floor = min(other.values())
    p = [math.exp(v) for v in true.values()]
    q = [math.exp(other.get(t, floor)) for t in true]
    rest_p, rest_q = max(1e-9, 1 - sum(p)), max(1e-9, 1 - sum(q))
    pairs = [*zip(p, q), (rest_p, rest_q)]
    return max(0.0, sum(a * math.log(a / b) for a, b in pairs if a > 0))


def load(url: str, tokenizer: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Open-loop Poisson arrivals at each rate, with and without reuse; rate sustained at the target."""
    lib, chunks = a_library(tokenizer, args, args.tokens)
    learn(url, lib, chunks)
    one = [
        median([ask(url, _said(lib.prompt(chunks), off)).ttft_s for _ in range(3)])
        for off in (True, False)
    ]
    target = args.target or 2.0 * one[0]
    print(
        f"alone: prefix cache {one[0]:.2f} s, reuse {one[1]:.2f} s; target TTFT {target:.2f} s (p90)"
    )
    rows, best = [], {True: 0.0, False: 0.0}
    for off in (True, False):
        for rate in sorted(map(float, args.rates.split(","))):
            times = _arrivals(url, lib, chunks, rate, args.seconds, off, args.seed)
            p90 = percentile(times, 0.9)
            kept = p90 <= target
            name = "prefix cache" if off else "reuse"
            print(
                f"{name:12} {rate:.3g}/s: {len(times)} requests, TTFT p50 {median(times):.2f} s, "
                f"p90 {p90:.2f} s{'' if kept else '  over the target'}",
                flush=True,
            )
            rows.append(
                {"off": off, "rate": rate, "n": len(times), "p50": median(times), "p90": p90}
            )
            if not kept:
                break
            best[off] = rate
    if best[True]:
        print(
            f"sustained: prefix cache {best[True]:.3g}/s, reuse {best[False]:.3g}/s: "
            f"{best[False] / best[True]:.2f} times"
        )
    return [{"alone_s": one, "target_s": target, "sustained": [best[True], best[False]]}, *rows]


def _said(prompt: Prompt, off: bool) -> Prompt:
    return Prompt(prompt.ids, "off" if off else prompt.bounds, prompt.documents)  # type: ignore[arg-type]


def _arrivals(
    url: str, lib: Library, chunks: int, rate: float, seconds: float, off: bool, seed: int
) -> list[float]:
    """Seconds to the first token of every request that arrived; all are waited for."""
    draw, times, threads = random.Random(f"{seed} {rate}"), [], []

    def one(prompt: Prompt) -> None:
        times.append(ask(url, prompt, tokens=2).ttft_s)

    started, at = time.perf_counter(), 0.0
    while (at := at + draw.expovariate(rate)) < seconds or len(threads) < 4:
        prompt = _said(lib.prompt(chunks), off)
        time.sleep(max(0.0, started + at - time.perf_counter()))
        threads.append(threading.Thread(target=one, args=(prompt,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return times


def _counters(url: str) -> dict[str, Any]:
    found = state(url)
    names = ("fused_requests", "reused_tokens", "recomputed_tokens", "fallbacks", "not_fused")
    return {name: found[name] for name in names}


if __name__ == "__main__":
    main()
