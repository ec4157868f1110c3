"""The same prompts cold, hot, side by side and after an eviction: the same answers, and hits."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import talk
from result import result

ANSWER_TOKENS = 24


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    return argparse.ArgumentParser(description=__doc__).parse_args(words)


def prompts(source: random.Random) -> list[list[int]]:
    """Six questions to each of four heads of 900 tokens."""
    heads = [talk.draw(source, 900) for _ in range(4)]
    return [head + talk.draw(source, 60 + 13 * i) for i in range(6) for head in heads]


def compared(cold: list[talk.Answer], other: list[talk.Answer]) -> dict[str, int]:
    """Count the answers that equal the cold ones in all tokens, and in the first token."""
    pairs = list(zip(cold, other))
    return {
        "all": sum(a.ids == b.ids for a, b in pairs),
        "first": sum(a.ids[0] == b.ids[0] for a, b in pairs),
        "cached": sum(b.cached for b in other),
    }


def main() -> None:
    arguments()
    source = random.Random(7)
    sent = prompts(source)
    others = [talk.draw(source, 2500) for _ in range(60)]  # more than the pool holds
    answer = lambda ids: talk.generate(ids, ANSWER_TOKENS)  # noqa: E731
    talk.flush()
    cold, hot = [answer(p) for p in sent], [answer(p) for p in sent]
    with ThreadPoolExecutor(12) as pool:
        crowd = list(pool.map(answer, sent))
        list(pool.map(lambda ids: talk.generate(ids, 2), others))
    evicted = [answer(p) for p in sent]
    ways = {"hot": hot, "crowd": crowd, "after_eviction": evicted}
    found = {name: compared(cold, answers) for name, answers in ways.items()}
    result("same", of=len(sent), cold_cached=sum(a.cached for a in cold), **found)


if __name__ == "__main__":
    main()
