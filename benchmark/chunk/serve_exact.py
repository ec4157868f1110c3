"""Check that ratio 1 equals plain serving, and "off" equals a server without Canopy."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rag_load import Prompt, ask, flush, learn, off
from rag_server import Rows, a_library, started

AT_ONCE = 4


def exact(tokenizer: Any, args: argparse.Namespace) -> None:
    """Greedy ids of the same prompts, four at a time: ratio 1.0 and "off" here, then on two more
    servers: without the flag, and without any plugin. Prints how many answers are the same.
    """
    lib, chunks = a_library(tokenizer, args, args.tokens)
    prompts = [lib.prompt(chunks) for _ in range(args.prompts)]
    rows, found = Rows(args), {}

    def run(name: str, url: str, send: Callable[[Prompt], Any]) -> None:
        began = time.perf_counter()
        answers = _crowd(send, prompts)
        found[name] = [a.ids for a in answers]
        fused = sum(bool(a.report.get("fused")) for a in answers)
        rows.add({"name": name, "fused": fused, "seconds": time.perf_counter() - began})
        print(f"{name}: {len(answers)} answers, {fused} of them fused", flush=True)

    def compare(one: str, other: str) -> None:
        pairs = list(zip(found[one], found[other]))
        same, first = sum(a == b for a, b in pairs), sum(a[0] == b[0] for a, b in pairs)
        rows.add({"pair": [one, other], "same": same, "same_first": first, "of": len(pairs)})
        print(f"{one} and {other}: {same} of {len(pairs)} answers of {n} tokens are the same")

    n = args.new_tokens
    with started(args, args.tokens, 2 * AT_ONCE) as server:
        url = server.url
        learn(url, lib, chunks)
        flush(url)
        run("ratio 1", url, lambda p: ask(url, p, n, stream=False, canopy_recompute_ratio=1.0))
        flush(url)
        run("off", url, lambda p: ask(url, off(p), n, stream=False))
    compare("ratio 1", "off")
    for name in filter(None, args.others.split(",")):
        stock = name == "no Canopy"
        with started(args, args.tokens, 2 * AT_ONCE, flags=(), stock=stock) as server:
            url = server.url
            run(name, url, lambda p: ask(url, Prompt(p.ids, [], ()), n, stream=False))  # noqa: B023
        compare("off", name)


def _crowd(send: Callable[[Prompt], Any], prompts: Sequence[Prompt]) -> list[Any]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(send, prompts))
