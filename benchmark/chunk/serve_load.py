"""Open-loop arrivals: time to first token against request rate, until a target is missed."""

from __future__ import annotations

import argparse
import random
import threading
import time
from typing import Any

from rag_load import Library, Prompt, ask, flush, learn, median, off, percentile
from rag_pairs import pairs
from rag_server import Rows, a_library, started

CROWD = 8
"""Prompts that the KV pool holds at once."""
MIN_REQUESTS = 8
"""Minimum arrivals at each rate."""
BEHIND = 0.1
"""Time that the server may need for the rest of the queue, as a share of the window."""


def load(tokenizer: Any, args: argparse.Namespace) -> None:
    """Poisson arrivals at each rate, without and with reuse; the rate sustained at the target.

    Both sides get the same prompts at the same times; a side ends at the first rate whose 90th
    percentile misses the target (twice the prefix cache's time alone, unless given), or that leaves
    a queue behind: a slow overload would pass in a short window where the target is generous.
    """
    rows = Rows(args)
    with started(args, args.tokens, CROWD) as server:
        url = server.url
        lib, chunks = a_library(tokenizer, args, args.tokens)
        learn(url, lib, chunks)
        target, alone = _alone(server, lib, chunks, args, rows)
        best = {}
        for name in ("prefix", "reuse"):
            if args.side not in ("both", name):
                continue
            best[name] = 0.0
            given = args.reuse_rates if name == "reuse" and args.reuse_rates else args.rates
            for rate in sorted(map(float, given.split(","))):
                flush(url)
                row = {"side": name, **_at_rate(url, tokenizer, args, rate, name == "prefix")}
                rows.add(row)
                queue_s = row["behind_s"] - alone[name]
                kept = row["p90_s"] <= target and queue_s <= BEHIND * row["window_s"]
                print(
                    f"{name:6} {rate:6.3f}/s: {row['n']:3} requests, TTFT p50 {row['p50_s']:5.2f} s, "
                    f"p90 {row['p90_s']:5.2f} s, all served {row['behind_s']:5.2f} s after the last "
                    f"came{'' if kept else '  not sustained'}",
                    flush=True,
                )
                if not kept:
                    break
                best[name] = rate
        said = ", ".join(f"{name} {rate:.3g}/s" for name, rate in best.items())
        print(f"sustained at p90 <= {target:.2f} s: {said}")
        if len(best) == 2 and best["prefix"]:
            print(f"{best['reuse'] / best['prefix']:.2f} times")
        rows.add({"target_s": target, "sustained_per_s": best})


def _alone(
    server: Any, lib: Library, chunks: int, args: argparse.Namespace, rows: Rows
) -> tuple[float, dict[str, float]]:
    """Print the time of one request alone. Returns the target and both times, in s."""
    prompt, answers = pairs(server, lib, chunks, args.repeats)
    plain, fused = zip(*answers)
    row = {
        "tokens": len(prompt.ids),
        "chunks": chunks,
        "prefix_alone_s": median([a.ttft_s for a in plain]),
        "reuse_alone_s": median([a.ttft_s for a in fused]),
    }
    rows.add(row)
    target = args.target or 2.0 * row["prefix_alone_s"]
    print(
        f"{row['tokens']} tokens, {chunks} documents; alone: prefix cache "
        f"{row['prefix_alone_s']:.2f} s, reuse {row['reuse_alone_s']:.2f} s; target TTFT "
        f"{target:.2f} s (p90)",
        flush=True,
    )
    return target, {"prefix": row["prefix_alone_s"], "reuse": row["reuse_alone_s"]}


def _at_rate(
    url: str, tokenizer: Any, args: argparse.Namespace, rate: float, plain: bool
) -> dict[str, Any]:
    """Return the TTFT of every request that arrived, after all were answered."""
    lib, chunks = a_library(tokenizer, args, args.tokens)
    lib.draw = random.Random(f"{args.seed} {rate}")
    draw = random.Random(f"{args.seed} arrivals {rate}")
    times: list[float] = []
    threads: list[threading.Thread] = []

    def one(prompt: Prompt) -> None:
        times.append(ask(url, prompt, tokens=2).ttft_s)

    started_s, at, last = time.perf_counter(), 0.0, 0.0
    while (at := at + draw.expovariate(rate)) < args.seconds or len(threads) < MIN_REQUESTS:
        last = at
        prompt = lib.prompt(chunks)
        time.sleep(max(0.0, started_s + at - time.perf_counter()))
        threads.append(threading.Thread(target=one, args=(off(prompt) if plain else prompt,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - started_s
    return {
        "rate": rate,
        "n": len(times),
        "p50_s": median(times),
        "p90_s": percentile(times, 0.9),
        "window_s": last,
        "behind_s": took - last,
        "ttft_s": times,
    }
