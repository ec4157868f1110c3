"""Sixteen at once whose prefixes follow Zipf's law, in a pool that is too small for them."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import talk
from result import result

PREFIXES, PREFIX_TOKENS, EXPONENT = 60, 1200, 0.9


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("requests", type=int)
    return parser.parse_args(words)


def prompts(count: int) -> list[list[int]]:
    source = random.Random(7)
    prefixes = [talk.draw(source, PREFIX_TOKENS) for _ in range(PREFIXES)]
    weights = [(i + 1) ** -EXPONENT for i in range(PREFIXES)]
    chosen = source.choices(prefixes, weights, k=count)
    return [prefix + talk.draw(source, source.choice((100, 400, 900))) for prefix in chosen]


def main() -> None:
    sent = prompts(arguments().requests)
    talk.flush()
    begin = time.perf_counter()
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda ids: talk.generate(ids, 8), sent))
    took = time.perf_counter() - begin
    waits = sorted(a.seconds for a in answers)
    result(
        "churn",
        requests=len(sent),
        seconds=round(took, 1),
        mean_s=round(statistics.mean(waits), 3),
        p95_s=round(waits[int(0.95 * len(waits))], 3),
        hit=round(sum(a.cached for a in answers) / sum(map(len, sent)), 3),
    )


if __name__ == "__main__":
    main()
