"""Documents on a served model: exact where everything is recomputed, and sooner than plain prefill."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import talk
from result import result

TOKENS, SYSTEM_TOKENS, QUESTION_TOKENS = 500, 40, 40
COUNTS = (4, 8, 16, 30)
"""Documents of a prompt whose speed is measured: 2k to 15k tokens."""
OFF = {"canopy_chunks": "off"}
SHOWN = (
    "fused_requests",
    "fallbacks",
    "fused_batches",
    "mixed_batches",
    "split_batches",
    "not_fused",
)


@dataclass(slots=True)
class Library:
    """A system text and documents for prompts."""

    source: random.Random
    system: list[int]
    documents: list[list[int]]

    def prompt(self, which: Sequence[int]) -> tuple[list[int], dict[str, Any]]:
        """Return a prompt of these documents and a new question, and the field with their positions."""
        ids, bounds = list(self.system), []
        for i in which:
            bounds += [len(ids), len(ids) + len(self.documents[i])]
            ids += self.documents[i]
        return ids + talk.draw(self.source, QUESTION_TOKENS), {"canopy_chunks": bounds}

    def some(self, count: int) -> tuple[list[int], dict[str, Any]]:
        """A prompt of ``count`` documents in random order."""
        return self.prompt(self.source.sample(range(len(self.documents)), count))

    def learn(self, limit_s: float = 60) -> None:
        """Encode every document; wait at most ``limit_s``."""
        every = range(len(self.documents))
        for first in every[::4]:
            ids, fields = self.prompt(every[first : first + 4])
            talk.generate(ids, 1, fields)
        until = time.monotonic() + limit_s
        while talk.documents_state().get("waiting_tokens") and time.monotonic() < until:
            time.sleep(0.5)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("exact", "speed"))
    parser.add_argument("tokens", type=int, help="of the longest prompt's documents")
    return parser.parse_args(words)


def library(tokens: int) -> Library:
    source = random.Random(7)
    documents = [talk.draw(source, TOKENS) for _ in range(tokens // TOKENS + 2)]
    return Library(source, talk.draw(source, SYSTEM_TOKENS), documents)


def difference(one: talk.Answer, other: talk.Answer) -> float:
    """Return the largest difference of a log-probability that both answers have."""
    both = one.top.keys() & other.top.keys()
    return max((abs(one.top[t] - other.top[t]) for t in both), default=float("inf"))


def exact(docs: Library, repeats: int = 10) -> None:
    """Compare answers at ratio 1 with plain ones, then mix fused prompts with short plain ones.

    The ruler: plain answers over a cached prefix, whose batches have another shape.
    """
    equal, off, again, ruler = 0, [], 0, []
    for _ in range(repeats):
        ids, fields = docs.some(3)
        talk.flush()
        fused = talk.generate(ids, 8, {**fields, "canopy_recompute_ratio": 1.0}, top=20)
        talk.flush()
        plain = talk.generate(ids, 8, OFF, top=20)
        cached = talk.generate(ids, 8, OFF, top=20)
        equal += fused.ids == plain.ids
        again += cached.ids == plain.ids
        off.append(difference(fused, plain))
        ruler.append(difference(cached, plain))
    result("exact at ratio 1", equal=equal, of=repeats, largest_logprob_difference=max(off))
    result("plain over its cache", equal=again, of=repeats, largest_logprob_difference=max(ruler))
    sent = [
        (*docs.some(3),) if i % 2 else (talk.draw(docs.source, 30 + i), None) for i in range(40)
    ]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda one: talk.generate(one[0], 16, one[1]), sent))


def speed(docs: Library, longest: int, repeats: int = 6) -> None:
    """Time fused prefill against SGLang's own, each with an empty prefix cache; ignore the first pair."""
    for count in COUNTS:
        if count * TOKENS > longest:
            break
        plain, fused = [], []
        for _ in range(repeats):
            ids, fields = docs.some(count)
            talk.flush()
            plain.append(talk.generate(ids, 1, OFF))
            talk.flush()
            fused.append(talk.generate(ids, 1, fields))
        ms = [1000 * statistics.median(a.seconds for a in way[1:]) for way in (plain, fused)]
        report = fused[-1].documents
        result(
            "documents",
            tokens=len(ids),
            plain_ms=round(ms[0], 1),
            fused_ms=round(ms[1], 1),
            times=round(ms[0] / ms[1], 2),
            **{name: report.get(name) for name in ("plan_ms", "computed", "reused", "why")},
        )


def main() -> None:
    given = arguments()
    docs = library(given.tokens)
    docs.learn()
    ids, fields = docs.some(3)
    talk.generate(ids, 1, fields)  # what is compiled at first
    talk.generate(ids, 4, OFF)
    if given.what == "exact":
        exact(docs)
    else:
        speed(docs, given.tokens)
    state = talk.documents_state()
    result("documents' counters", **{name: state.get(name) for name in SHOWN})


if __name__ == "__main__":
    main()
