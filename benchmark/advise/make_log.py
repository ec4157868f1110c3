"""Write a log of chats as a gateway would export it: JSON lines with ``messages`` and a time.

    python benchmark/advise/make_log.py --requests 1000000 -o chats.jsonl

Made up: conversations begin at random, last a geometric number of turns and share one of 24 system
prompts; every line holds the whole conversation so far. Equal arguments give equal bytes.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
from pathlib import Path

WORDS = ("cache", "prefix", "token", "page", "leaf", "tier", "turn", "hash", "block", "queue")


def sentences(draw: random.Random, pool: str, least: int, most: int) -> str:
    """A slice of ``pool``, of ``least`` to ``most`` characters."""
    start = draw.randrange(len(pool) - most)
    return pool[start : start + draw.randint(least, most)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--per-second", type=float, default=12.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    pool = " ".join(f"{draw.choice(WORDS)}{draw.randrange(10_000)}" for _ in range(200_000))
    systems = [sentences(draw, pool, 400, 2000) for _ in range(24)]
    turns_mean, now, written = 3.0, 0.0, 0
    # (when, number, rendered messages, turns left)
    waiting: list[tuple[float, int, str, int]] = []
    started = 0
    with args.output.open("w") as out:
        while written < args.requests:
            now += draw.expovariate(args.per_second / turns_mean)
            left = 1 + int(draw.expovariate(1 / (turns_mean - 0.5)))
            system = json.dumps(draw.choice(systems))
            heapq.heappush(waiting, (now, started, f'{{"role":"system","content":{system}}}', left))
            started += 1
            while waiting and waiting[0][0] <= now and written < args.requests:
                when, number, messages, left = heapq.heappop(waiting)
                question = json.dumps(sentences(draw, pool, 40, 600))
                messages += f',{{"role":"user","content":{question}}}'
                tokens = draw.randint(20, 300)
                out.write(
                    f'{{"startTime":{1.7e9 + when:.3f},"model":"m","messages":[{messages}],'
                    f'"completion_tokens":{tokens}}}\n'
                )
                written += 1
                if left > 1:
                    answer = json.dumps(sentences(draw, pool, 3 * tokens, 5 * tokens))
                    messages += f',{{"role":"assistant","content":{answer}}}'
                    pause = draw.lognormvariate(4.0, 1.0)
                    heapq.heappush(waiting, (when + pause, number, messages, left - 1))


if __name__ == "__main__":
    main()
