"""Real workers behind the gateways that exist: what routing and eviction are worth together.

    pip install --no-deps --target GATEWAYS sglang-router==0.3.2 smg==1.13.0
    PYTHONPATH=GATEWAYS python benchmark/gateways/run.py --overlay OVERLAY --model MODEL --out OUT

The same agentic overlay (``benchmark/traces/make_overlay.py``) is sent through each gateway under each routing, with
``lru`` and with ``wa`` on its workers, each time to empty caches. ``by key`` pins a conversation to a
worker: in ``smg`` by the lineage of its request ids, in ``sglang-router`` by the header
``x-smg-routing-key``. What OUT/results.json has already is not run again. See README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import numpy as np

from canopy_lab.live.replay import replay_clock
from canopy_lab.live.replay.options import labels
from canopy_lab.report.table import text_table
from canopy_lab.trace import open_trace
from canopy_lab.trace.materialise import Materialiser, Planned, middle_tokens

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from launch_server import cpu_arguments, free_port, serving

Row = TypeVar("Row")
READY_S = 600.0
BLOCK = 64
LEARN_NOTHING = ("lru", "canopy-lru")
"""Policies that do not learn. Others serve an uncounted replay first, so that each routing has a server
with learnt state. Tokens and names differ each time; the conversations are the same."""


@dataclass(frozen=True, slots=True)
class Routing:
    """One way in which the gateway chooses a worker."""

    name: str
    flags: tuple[str, ...]


ROUND_ROBIN = Routing("round robin", ("--policy", "round_robin"))
CACHE_AWARE = Routing("cache-aware", ("--policy", "cache_aware"))
ROUTINGS = {
    "smg": (
        ROUND_ROBIN,
        CACHE_AWARE,
        Routing("by key", ("--policy", "round_robin", "--routing-key-override")),
    ),
    "sglang-router": (ROUND_ROBIN, CACHE_AWARE, Routing("by key", ("--policy", "manual"))),
}
MODULES = {"smg": "smg", "sglang-router": "sglang_router"}


@contextlib.contextmanager
def gateway(name: str, workers: list[str], flags: tuple[str, ...], log: Path) -> Iterator[str]:
    """The gateway before these workers. Gives its URL."""
    port = free_port()
    command = [
        *(sys.executable, "-m", f"{MODULES[name]}.launch_router"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-port", str(free_port()), "--worker-urls", *workers, *flags),
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + READY_S
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/readiness"):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{name} does not answer; the end of {log} says why")
            time.sleep(0.5)
        yield url
    finally:
        process.kill()
        process.wait()


@dataclass(frozen=True, slots=True)
class Words:
    """Text whose tokens are known: one token a word, so that a prompt is the same either way."""

    tokenizer: Any

    @classmethod
    def of(cls, model: Path) -> Words:
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(model))

    def vocabulary(self) -> np.ndarray:
        """The token ids that are a space and letters: joined, each stays a token of its own."""
        words = self.tokenizer.convert_ids_to_tokens(range(len(self.tokenizer)))
        return np.array([i for i, word in enumerate(words) if re.fullmatch("Ġ[A-Za-z]+", word)])

    def text(self, tokens: list[int]) -> str:
        """The text of these ids."""
        made: str = self.tokenizer.decode(tokens)
        if self.tokenizer.encode(made, add_special_tokens=False) != tokens:
            raise SystemExit("this tokenizer reads a prompt's words as other tokens; use --as ids")
        return made


async def in_order(
    made: Materialiser, at_once: int, send: Callable[[Planned], Awaitable[Row]]
) -> list[Row]:
    """Return the results of ``send``. Requests start in the order of the trace, at most ``at_once`` at a
    time, each after the previous answer of its conversation. A request that waits for that blocks
    later requests: otherwise all first turns would be sent first."""
    room = asyncio.Semaphore(at_once)
    sent: list[asyncio.Task[Row]] = []

    async def one(planned: Planned) -> Row:
        try:
            return await send(planned)
        finally:
            room.release()

    for planned in made.planned:
        if planned.previous is not None:
            await sent[planned.previous]
        await room.acquire()
        sent.append(asyncio.create_task(one(planned)))
    return await asyncio.gather(*sent)


async def replay(
    url: str, made: Materialiser, at_once: int, words: Words | None, run: int
) -> list[dict[str, Any]]:
    """Send every request; ``run`` numbers the replays of these workers. Returns tokens and the time to
    the first token of each. Outputs are forced where the gateway lets that through, so that turns
    continue each other's answers: with text both do, with token ids ``smg`` alone."""
    said = labels(made.planned, shuffle=False, seed=0)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def send(planned: Planned) -> dict[str, Any]:
            body = _body(made, planned, said[planned.ordinal], words, run)
            return await _send(session, url, body)

        return await in_order(made, at_once, send)


def _body(
    made: Materialiser, planned: Planned, said: dict[str, Any], words: Words | None, run: int
) -> dict[str, Any]:
    request = planned.request
    custom: dict[str, Any] = {"canopy_force_output": made.output(planned), **said}
    # Policies see the trace's pauses, however fast the replay is.
    custom[replay_clock.KEY] = [run, round(request.time_s, 6)]
    rid = f"{run}-{request.conversation or planned.ordinal}_t{planned.ordinal}".replace("/", "-")
    body: dict[str, Any] = {"model": "tiny", "rid": rid, "stream": True}
    sampling = {"temperature": 0, "ignore_eos": True, "custom_params": custom}
    if words is None:
        body["input_ids"] = made.prompt(planned)
        return body | {"sampling_params": sampling | {"max_new_tokens": planned.output_tokens}}
    body["prompt"] = words.text(made.prompt(planned))
    body["stream_options"] = {"include_usage": True}
    return body | sampling | {"max_tokens": planned.output_tokens}


async def _send(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    path = "/v1/completions" if "prompt" in body else "/generate"
    began, first, last = time.monotonic(), 0.0, {}
    headers = {"x-smg-routing-key": body["rid"].rpartition("_t")[0]}
    async with session.post(f"{url}{path}", json=body, headers=headers) as response:
        if response.status != 200:
            raise SystemExit(f"{response.status}: {(await response.text())[:500]}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                first = first or time.monotonic() - began
                last = json.loads(line[6:])
    usage = last.get("meta_info") or last.get("usage")
    if not usage:
        raise SystemExit(f"an answer came to no end; the last of it was {last}")
    details = usage.get("prompt_tokens_details") or {}
    return {
        "prompt": usage["prompt_tokens"],
        "cached": usage.get("cached_tokens", details.get("cached_tokens", 0)),
        "ttft_ms": 1000.0 * first,
    }


@contextlib.contextmanager
def workers(policy: str, kv_tokens: int, args: argparse.Namespace) -> Iterator[list[str]]:
    """New servers with this policy. Gives their URLs."""
    arguments = cpu_arguments(args.model, kv_tokens=kv_tokens, dtype=args.dtype)
    if not (args.model / "model.safetensors").exists():
        arguments += ["--load-format", "dummy"]
    arguments += ["--radix-eviction-policy", policy, "--canopy-enable-forced-output"]
    arguments += ["--served-model-name", "tiny", "--enable-cache-report"]
    if policy != "lru":
        size = max(1, round(BLOCK * args.scale_lengths))
        config = {"block_tokens": size, "quantum_tokens": size}
        arguments += ["--radix-eviction-policy-config", json.dumps(config)]
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(args.workers) as pool:
        starts = [
            serving(
                arguments,
                log=args.out / f"worker-{policy}-{n}.log",
                port=free_port(),
                deadline_s=READY_S,
                environment={"SGLANG_CPU_OMP_THREADS_BIND": str(cores[n % len(cores)])},
            )
            for n in range(args.workers)
        ]
        started = [(start, pool.submit(start.__enter__)) for start in starts]
        for start, _ in started:
            stack.push(start.__exit__)
        yield [server.result().url for _, server in started]


def measure(
    name: str,
    policy: str,
    routing: Routing,
    urls: list[str],
    words: Words | None,
    args: argparse.Namespace,
    run: int = 0,
) -> dict[str, Any]:
    """One replay, from empty caches. Each of these workers' replays has tokens of its own."""
    for worker in urls:
        flush = urllib.request.Request(f"{worker}/flush_cache", method="POST")
        with urllib.request.urlopen(flush) as answer:
            answer.read()
    made, kv_tokens = planned(args, words, run)
    log = args.out / f"{name}-{policy}-{routing.name.replace(' ', '-')}.log"
    with gateway(name, urls, routing.flags, log) as url:
        rows = asyncio.run(replay(url, made, args.max_concurrency, words, run))
    prompt = sum(row["prompt"] for row in rows)
    times = [row["ttft_ms"] for row in rows]
    return {
        "gateway": name,
        "policy": policy,
        "routing": routing.name,
        "hit_rate": sum(row["cached"] for row in rows) / prompt,
        "prompt_tokens": prompt,
        "ttft_ms": {"mean": float(np.mean(times)), "p50": float(np.median(times)),
                    "p90": float(np.percentile(times, 90))},
        "requests": len(rows),
        "workers": args.workers,
        "kv_tokens": kv_tokens,
        "sent_as": args.sent_as,
    }  # fmt: skip


def planned(args: argparse.Namespace, words: Words | None, run: int) -> tuple[Materialiser, int]:
    """The requests, with tokens of this run alone, and the tokens of one worker's pool."""
    taken = itertools.islice(open_trace(args.overlay, "agentic"), args.num_prompts)
    vocabulary = middle_tokens(1 << 15) if words is None else words.vocabulary()
    made = Materialiser(taken, vocabulary, args.scale_lengths, seed=run)
    tokens: dict[int, int] = {}
    for one in made.planned:
        small = made.block_tokens(one.request.block_tokens)
        for i, block in enumerate(one.request.blocks):
            tokens[block] = min(small, one.prompt_tokens - i * small)
    longest = max(one.prompt_tokens + one.output_tokens for one in made.planned)
    return made, max(round(sum(tokens.values()) * args.capacity / args.workers), longest + 64)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--overlay", type=Path, required=True, help="of make_overlay.py")
    parser.add_argument("--model", type=Path, required=True, help="no weights: dummy")
    parser.add_argument("--out", type=Path, required=True, help="folder for results and logs")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--policies", default="lru,wa")
    parser.add_argument("--routings", default="round robin,cache-aware,by key")
    parser.add_argument("--gateways", default="smg,sglang-router")
    parser.add_argument("--capacity", type=float, default=0.2, help="all pools, of distinct tokens")
    parser.add_argument("--num-prompts", type=int, default=400)
    parser.add_argument("--scale-lengths", type=Fraction, default=Fraction(1, 64))
    parser.add_argument("--max-concurrency", type=int, default=4)
    parser.add_argument("--as", dest="sent_as", choices=("text", "ids"), default="text",
                        help="prompts to /v1/completions, or token ids to /generate")  # fmt: skip
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    words = Words.of(args.model) if args.sent_as == "text" else None
    made, kv_tokens = planned(args, words, 0)
    file = args.out / "results.json"
    results = json.loads(file.read_text()) if file.exists() else []
    done = {(r["gateway"], r["routing"], r["policy"]) for r in results}
    for policy in args.policies.split(","):
        todo = [
            (name, routing)
            for name in args.gateways.split(",")
            for routing in ROUTINGS[name]
            if routing.name in args.routings.split(",") and (name, routing.name, policy) not in done
        ]
        if not todo:
            continue
        with workers(policy, kv_tokens, args) as urls:
            if policy not in LEARN_NOTHING:
                measure(todo[0][0], policy, ROUND_ROBIN, urls, words, args)
            for run, (name, routing) in enumerate(todo, 1):
                results.append(measure(name, policy, routing, urls, words, args, run))
                file.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\n{len(made.planned)} requests, {args.workers} workers of {kv_tokens} tokens\n")
    rows = [
        [r["gateway"], r["routing"], r["policy"], f"{r['hit_rate']:.1%}",
         *(f"{r['ttft_ms'][part]:.0f}" for part in ("mean", "p50", "p90"))]
        for r in results
    ]  # fmt: skip
    heads = ["gateway", "routing", "policy", "tokens hit", "TTFT ms, mean", "P50", "P90"]
    print(text_table(heads, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
