"""Distance of reuse from full recompute, by number of documents, length and ratio, on chat prompts.

    python benchmark/chunk/by_documents.py --model DIR --data hotpotqa_100.json --out FILE \\
        --lengths 1024,2048,4096 --sets 3 --way mixed/question@0.15/4,mixed/question@0.15/16

A set is the passages of ten questions, shuffled and cut to a length, and each question is put to it
behind the model's chat template. Every way cuts the same tokens into its number of documents, at
ends of passages. A way is ENCODING/SELECTOR@RATIO/DOCUMENTS; the encoding ``long`` is ``mixed``
with all stand-ins. The way ``reversed`` is full recompute of the passages in reverse order: it
shows the effect of order alone. Each row has the KL to full recompute along its own answer, whose
tokens end with the end token or after 16, and CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from comparators import make_selector, questions
from comparators.qcfuse import REPEAT, QCFuse
from comparators.quality import FORCED
from comparators.weights import load

from canopy_chunks.fuse import rows as engine
from canopy_chunks.fuse.cache import KVCache, dense_cache
from canopy_chunks.fuse.encode import STAND_IN, Encoder, stand_in
from canopy_chunks.fuse.fusion import fused_prefill
from canopy_chunks.quality.answers import (
    Case,
    divergence,
    forced_logprobs,
    greedy_steps,
    prompt_of_case,
    tokenise,
)
from canopy_chunks.quality.tasks import Example
from canopy_chunks.store.chunk import Chunk

ASKED = 10
"""Questions of a set."""
REVERSED = "reversed"
MIN_TOKENS, MAX_TOKENS = 38, 80
"""Tokens of a passage."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way of reuse; its text is its name in the rows."""

    encode: str
    selector: str
    ratio: float
    documents: int

    @classmethod
    def parse(cls, text: str) -> Way:
        encode, selected, documents = text.split("/")
        selector, _, ratio = selected.partition("@")
        return cls(encode, selector, float(ratio), int(documents))


@dataclass(frozen=True, slots=True)
class Answer:
    """Full recompute's answer: log-probabilities ``[m, vocab]`` and the m tokens."""

    logprobs: torch.Tensor
    tokens: list[int]


class Sets:
    """The sets of a file, by number, cut to a length."""

    def __init__(self, tokenizer: Any, path: str) -> None:
        self.tokenizer, self.name = tokenizer, Path(path).stem
        self.examples = questions.read(path)
        self.gap = self._ids("\n\n")

    def __len__(self) -> int:
        return len(self.examples) // ASKED

    def cases(self, number: int, length: int) -> tuple[list[list[int]], list[Case]]:
        """Return a set's passages, and one case without documents for each question."""
        mine = self.examples[number * ASKED : (number + 1) * ASKED]
        cases = [
            tokenise(self.tokenizer, Example(("",), e.question, e.answers, e.task), 1, 10)
            for e in mine
        ]
        room = length - len(cases[0].prefix) - max(len(c.question) for c in cases)
        rng = random.Random(f"{self.name} {number}")
        piles = [[p for d in e.documents for p in self._passages(d)[:2]] for e in mine]
        for pile in piles:
            rng.shuffle(pile)
        queue = [pile[i] for i in range(max(map(len, piles))) for pile in piles if i < len(pile)]
        taken, have = [], 0
        for passage in queue:
            if have + len(passage) <= room:
                taken.append(passage)
                have += len(passage)
        rng.shuffle(taken)
        return taken, cases

    def stand_ins(self, count: int) -> tuple[int, ...]:
        return stand_in(self._ids, count)

    def _passages(self, text: str) -> list[list[int]]:
        """Return runs of whole sentences, each with its empty line."""
        found: list[list[int]] = []
        now: list[int] = []
        for part in re.split(r"(?<=[.!?])\s+|\n", text):
            now += self._ids((" " if now else "") + part)
            if len(now) >= MIN_TOKENS:
                found.append(now[:MAX_TOKENS] + self.gap)
                now = []
        return [*found, now[:MAX_TOKENS] + self.gap] if now else found

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[no-any-return]


def joined(passages: Sequence[list[int]], count: int) -> list[list[int]]:
    """Return the passages joined into at most ``count`` documents of about equal size."""
    total = sum(map(len, passages))
    documents: list[list[int]] = [[] for _ in range(count)]
    have = 0
    for passage in passages:
        documents[min(count - 1, int((have + len(passage) / 2) / total * count))] += passage
        have += len(passage)
    return [d for d in documents if d]


class Measured:
    """A set at one length: full recompute of its passages, and their chunks by encoding."""

    def __init__(
        self, model: Any, sets: Sets, number: int, length: int, encoders: dict[Any, Encoder]
    ) -> None:
        self.model, self.encoders = model, encoders
        self.passages, self.cases = sets.cases(number, length)
        self.many = sets.stand_ins(len(STAND_IN))
        self.end = sets.tokenizer.eos_token_id
        self._chunks: dict[tuple[str, int], list[Chunk]] = {}
        start = time.process_time()
        self.exact = self._full(self.passages)
        self.full_s = time.process_time() - start

    def answer(self, case: Case) -> Answer:
        """Return full recompute's answer to a question."""
        n, first = self._asked(self.exact, case)
        logits = [first]
        begun = [int(first.argmax())]
        steps = greedy_steps(self.model, self.exact, n, begun, FORCED, self.end, logits)
        tokens = engine.finish(steps)
        return Answer(torch.stack(logits).log_softmax(-1), tokens)

    def reversed(self) -> Callable[[Case, Answer], dict[str, Any]]:
        """Compare an answer with the answer after the passages in reverse order."""
        cache = self._full(self.passages[::-1])

        def compare(case: Case, answer: Answer) -> dict[str, Any]:
            n, first = self._asked(cache, case)
            return against(answer, forced_logprobs(self.model, cache, first, answer.tokens, n))

        return compare

    def reuse(self, way: Way, case: Case, answer: Answer) -> dict[str, Any]:
        """Compare an answer with the answer after reuse."""
        chunks = self._encoded(way.encode, way.documents)
        case = Case(case.prefix, [list(c.ids) for c in chunks], case.question, (), "")
        prompt = prompt_of_case(case, chunks, self.model.device)
        n = len(prompt)
        cache, selector = dense_cache(self.model, n + FORCED), make_selector(way.selector)
        start = time.process_time()
        fused = fused_prefill(self.model, prompt, cache.upto(n), selector, way.ratio)
        spent = time.process_time() - start
        rows = forced_logprobs(self.model, cache, fused.logits, answer.tokens, n)
        return {**against(answer, rows), "made": len(chunks), "cpu_s": round(spent, 3)}

    def _full(self, passages: Sequence[list[int]]) -> KVCache:
        ids = [*self.cases[0].prefix, *(t for p in passages for t in p)]
        room = max(len(c.question) for c in self.cases) + FORCED
        cache = dense_cache(self.model, len(ids) + room)
        engine.prefill(self.model, torch.tensor(ids), cache.upto(len(ids)))
        return cache

    def _asked(self, cache: KVCache, case: Case) -> tuple[int, torch.Tensor]:
        """Prefill a question; returns the tokens so far and the last token's logits."""
        at = len(case.prefix) + sum(map(len, self.passages))
        n = at + len(case.question)
        hidden = engine.prefill(self.model, torch.tensor(case.question), cache.upto(n), at)
        return n, self.model.logits(hidden[-1:])[0]

    def _encoded(self, how: str, documents: int) -> list[Chunk]:
        if (how, documents) not in self._chunks:
            case, made = self.cases[0], []
            prefix = tuple(case.prefix)
            others = {"mixed": (*prefix, *case.stand_in), "long": (*prefix, *self.many)}
            for place, document in enumerate(joined(self.passages, documents)):
                behind = others.get(how, prefix) if place else prefix
                if behind not in self.encoders:
                    self.encoders[behind] = Encoder(self.model, behind)
                made.append(self.encoders[behind].encode(document))
            self._chunks[how, documents] = made
        return self._chunks[how, documents]


def against(answer: Answer, rows: torch.Tensor) -> dict[str, Any]:
    """Compare log-probabilities ``rows [m, vocab]`` with an answer's: the mean KL over its tokens in
    nats, and whether the first token is the same."""
    same = int(rows[0].argmax()) == answer.tokens[0]
    return {"kl": round(divergence(answer.logprobs, rows), 5), "same_first": same}


def measure(
    model: Any, sets: Sets, number: int, length: int, todo: dict[int, list[str]], encoders: Any
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a set that are in ``todo``, by question."""
    one = Measured(model, sets, number, length, encoders)
    reverse = one.reversed() if any(REVERSED in ways for ways in todo.values()) else None
    for asked, ways in todo.items():
        answer = one.answer(one.cases[asked])
        meta = {"length": length, "answer": len(answer.tokens), "full_cpu_s": round(one.full_s, 2)}
        for way in ways:
            if way == REVERSED and reverse is not None:
                got = reverse(one.cases[asked], answer)
            else:
                got = one.reuse(Way.parse(way), one.cases[asked], answer)
            yield {"set": f"{sets.name}:{number}", "asked": asked, "way": way, **meta, **got}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; resumed if it exists")
    parser.add_argument("--lengths", default="1024,2048,4096")
    parser.add_argument("--first", type=int, default=0, help="first set")
    parser.add_argument("--sets", type=int, default=3)
    parser.add_argument("--way", default=f"{REVERSED},mixed/question@0.15/4,mixed/question@0.15/16")
    args = parser.parse_args()
    from transformers import AutoTokenizer

    torch.set_num_threads(1)
    model, ways = load(args.model), args.way.split(",")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    sets = Sets(tokenizer, args.data)
    QCFuse.repeat = tuple(tokenizer(REPEAT, add_special_tokens=False)["input_ids"])
    done = set()
    if args.out.exists():
        lines = map(json.loads, args.out.read_text().splitlines())
        done = {(r["set"], r["asked"], r["length"], r["way"]) for r in lines}
    with args.out.open("a") as file:
        for number in range(args.first, min(args.first + args.sets, len(sets))):
            for length in map(int, args.lengths.split(",")):
                name = f"{sets.name}:{number}"
                todo = {
                    q: left
                    for q in range(ASKED)
                    if (left := [w for w in ways if (name, q, length, w) not in done])
                }
                if todo:
                    write(file, measure(model, sets, number, length, todo, {}))


@torch.no_grad()
def write(file: TextIO, rows: Iterator[dict[str, Any]]) -> None:
    """Write each row as it is measured."""
    for row in rows:
        file.write(json.dumps(row) + "\n")
        file.flush()


if __name__ == "__main__":
    main()
