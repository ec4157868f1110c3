"""Sizes of the quick start's agents, pool and limit: the same agents on a simulated server.

    python benchmark/quickstart/size.py
    python benchmark/quickstart/size.py --kv-tokens 3072 --running 99 --agents 8 --think 1 4

The prompts of scripts/agents.py, tokenised by the quick start's model, are sent to a server that admits
the requests that fit, computes their new tokens at --speed tokens per second, and then decodes one token
a step for all. Tokens are locked until the answer is complete, as in a real server; the tree and the
policies are those of ``canopy simulate``. Prints for each policy: cached prompt tokens, agents' steps in
time, their mean TTFT, documents, concurrent requests. The answers are made up with correct lengths.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import agents  # noqa: E402
import quickstart  # noqa: E402
from sglang_canopy.policy.block_tree import RadixTree  # noqa: E402
from sglang_canopy.policy.registry import make_policy  # noqa: E402
from sglang_canopy.records import Request  # noqa: E402

BLOCK = 16
BATCH_S, STEP_S, TOKEN_S = 0.05, 0.06, 0.01
"""Seconds of a batch of prompts without its tokens; of a decode step, and of each request in it."""
NO_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class Server:
    """One server's queue, batches and cache, on a clock of its own."""

    def __init__(self, policy: str, kv_tokens: int, running: int, speed: float, encode) -> None:  # type: ignore[no-untyped-def]
        whole = policy == "lru"
        self.policy = make_policy(policy, {})
        self.tree = RadixTree(
            self.policy, kv_tokens // BLOCK, BLOCK, quantum_tokens=BLOCK, whole_nodes=whole
        )
        self.most, self.speed, self.encode = running, speed, encode
        self.ids: dict[tuple[int, tuple[int, ...]], int] = {}
        self.waiting: list[tuple] = []
        self.running: list[list] = []

    def asked(self, now: float, client, messages) -> None:  # type: ignore[no-untyped-def]
        tokens = prompt_of(messages, self.encode)
        path, chain = [], 0
        for at in range(0, len(tokens) - BLOCK + 1, BLOCK):
            chain = self.ids.setdefault((chain, tokens[at : at + BLOCK]), len(self.ids) + 1)
            path.append(chain)
        self.tree.now = max(self.tree.now, now)
        request = Request(
            time=self.tree.now,
            category="chat",
            path=tuple(path),
            block_tokens=BLOCK,
            prompt_tokens=len(tokens),
            output_tokens=agents.ANSWER_TOKENS,
            turn=sum(m["role"] == "user" for m in messages),
            stop="length",
        )
        request.label = self.policy.arrive(request)
        self.waiting.append((now, client, request))

    def batch(self) -> list[tuple]:
        """Admit the requests that fit; return (arrival, client, request, cached tokens)."""
        tree, taken = self.tree, []
        while self.waiting and len(self.running) < self.most:
            asked_at, client, request = self.waiting[0]
            node, hit = tree.match(request.path)
            tree.lock(node)
            short = len(request.path) - hit + 1 - (tree.capacity_blocks - tree.used_blocks)
            if short > 0 and tree.evict(short) < short and self.running:
                tree.unlock(node)
                break
            leaf = tree.insert(request.path, node, hit)
            tree.lock(leaf)
            tree.unlock(node)
            request.label = self.policy.finish(request)
            tree.stamp(request, leaf)
            found = min(hit * BLOCK, request.prompt_tokens - 1)
            taken.append((asked_at, client, request, found))
            self.running.append([agents.ANSWER_TOKENS - 1, leaf, client])
            del self.waiting[0]
        return taken

    def decode(self) -> list:
        """One step; the clients whose answers are done."""
        done = []
        for one in self.running:
            one[0] -= 1
            if not one[0]:
                self.tree.unlock(one[1])
                done.append(one)
        self.running = [one for one in self.running if one[0]]
        return [client for *_, client in done]


def prompt_of(messages: agents.Messages, encode) -> tuple[int, ...]:  # type: ignore[no-untyped-def]
    """The model's chat template."""
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": NO_SYSTEM}, *messages]
    parts = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
    return tuple(itertools.chain.from_iterable(map(encode, [*parts, "<|im_start|>assistant\n"])))


def agent(texts: list[str], draw: random.Random) -> Iterator[tuple[float, agents.Messages]]:
    """(pause before it, prompt) without end."""
    pause = draw.uniform(0, agents.THINK_S[1])
    while True:
        for messages in agents.task(texts, draw):
            yield pause, messages
            said = " ".join(str(draw.randrange(10)) for _ in range(agents.ANSWER_TOKENS // 2))
            messages.append({"role": "assistant", "content": said})
            pause = draw.uniform(*agents.THINK_S)


def reader(texts: list[str], draw: random.Random) -> Iterator[tuple[float, agents.Messages]]:
    pause = draw.uniform(0, agents.READ_S)
    while True:
        yield pause, agents.question(texts, draw)
        pause = draw.expovariate(1 / agents.READ_S)


def run(server: Server, texts: list[str], seconds: float, seed: int) -> dict[str, float]:
    clients = [("agent", agent(texts, random.Random(f"{seed}a{n}"))) for n in range(agents.AGENTS)]
    clients += [
        ("reader", reader(texts, random.Random(f"{seed}r{n}"))) for n in range(agents.READERS)
    ]
    number, due = itertools.count(), []

    def goes_on(now: float, client) -> None:  # type: ignore[no-untyped-def]
        pause, messages = next(client[1])
        heapq.heappush(due, (now + pause, next(number), client, messages))

    for client in clients:
        goes_on(0.0, client)
    now, waits, documents, found, prompts, at_once = 0.0, [], 0, 0, 0, []
    while now < seconds:
        while due and due[0][0] <= now:
            at, _, client, messages = heapq.heappop(due)
            server.asked(at, client, messages)
        taken = server.batch()
        if taken:
            now += BATCH_S + sum(r.prompt_tokens - hit for *_, r, hit in taken) / server.speed
            at_once.append(len(server.running))
            for asked_at, client, request, hit in taken if now < seconds else ():
                found, prompts = found + hit, prompts + request.prompt_tokens
                if client[0] == "agent":
                    waits.append(now - asked_at)
                else:
                    documents += 1
        elif server.running:
            now += STEP_S + TOKEN_S * len(server.running)
            for client in server.decode():
                goes_on(now, client)
        else:
            now = due[0][0]
    return {
        "found %": 100 * found / prompts,
        "steps": len(waits),
        "first token s": statistics.fmean(waits),
        "documents": documents,
        "at once": statistics.fmean(at_once),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kv-tokens", type=int, default=quickstart.KV_TOKENS)
    parser.add_argument("--running", type=int, default=quickstart.RUNNING)
    parser.add_argument("--agents", type=int, default=agents.AGENTS)
    parser.add_argument("--readers", type=int, default=agents.READERS)
    parser.add_argument("--think", type=float, nargs=2, default=agents.THINK_S)
    parser.add_argument("--seconds", type=float, default=quickstart.RUN_S)
    parser.add_argument("--speed", type=float, nargs="*", default=(300, 600, 900, 1400))
    parser.add_argument("--policy", nargs="*", default=("lru", "canopy-lru", "wa"))
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    agents.AGENTS, agents.READERS, agents.THINK_S = args.agents, args.readers, tuple(args.think)

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(
        str(ROOT / ".canopy" / "models" / quickstart.NAME / "tokenizer.json")
    )
    known: dict[str, list[int]] = {}

    def encode(text: str) -> list[int]:
        if text not in known:
            known[text] = tokenizer.encode(text, add_special_tokens=False).ids
        return known[text]

    texts = agents.read_texts([ROOT / "docs", ROOT / "python"])
    for speed in args.speed:
        for policy in args.policy:
            runs = [
                run(
                    Server(policy, args.kv_tokens, args.running, speed, encode),
                    texts,
                    args.seconds,
                    seed,
                )
                for seed in range(args.seeds)
            ]
            means = {name: statistics.fmean(r[name] for r in runs) for name in runs[0]}
            print(
                f"{speed:6.0f} tokens/s {policy:10}",
                *(f"{n} {v:.1f}" for n, v in means.items()),
                sep="  ",
                flush=True,
            )


if __name__ == "__main__":
    main()
