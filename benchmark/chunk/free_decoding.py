"""Answers of full recompute and of reuse, each decoded freely: what the default is decided by.

    python benchmark/chunk/free_decoding.py --model DIR --set musique_100.json:60:20 \\
        --set n1k.jsonl:0:12:24:400 --way mixed,prefix+n3,mixed@0.1 --out FILE --minutes 60

A set is FILE:FIRST:COUNT, perhaps with :DOCUMENTS:TOKENS of each (6 of 160). Sets take turns, a question
each, so that a run that is stopped has some of all. A way is an encoding, what is done beside it, and perhaps a ratio (0.15):
n1 and n3 correct with that noise, w4 with four weights, cov spends a third of the budget evenly over the
documents, near corrects only within ``NEAR`` tokens of a revealed one.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from comparators import questions
from comparators.quality import encode_case, measure, refer
from comparators.weights import load

from canopy_chunks import correction
from canopy_chunks.quality import Case, holds, normalise, tokenise
from canopy_chunks.selectors import question
from canopy_chunks.selectors.base import Context, SelectedTokens, best

NEAR = 12
SPREAD = 1 / 3
ANSWER_TOKENS = 16
DEFAULT_RATIO = 0.15


def covering(self: question.Question, context: Context) -> SelectedTokens:
    """As the selector, with a share of the budget at even distances over the documents."""
    prompt = context.prompt
    score = question.question_scores(context, last_weight=0.5)
    allowed = prompt.in_chunk()
    allowed[len(prompt) - 1] = False
    if prompt.first_is_exact:
        allowed[prompt.placed[0].start : prompt.placed[0].end] = False
    inside = allowed.nonzero()[:, 0]
    even = inside[
        torch.linspace(0, inside.numel() - 1, max(1, int(SPREAD * context.budget))).long()
    ]
    allowed[even] = False
    rest = best(score, allowed, context.budget - even.numel())
    return SelectedTokens(torch.cat([even, rest]).sort()[0])


def near_only(weights: Any) -> Any:
    """Weights of nothing for a target that lies far from every revealed token."""

    def guarded(features: Any, revealed: Any, positions: Any, rows: Any, starts: Any) -> Any:
        index, weight = weights(features, revealed, positions, rows, starts)
        after = torch.searchsorted(rows, positions).clamp(max=rows.numel() - 1)
        before = (after - 1).clamp(min=0)
        far = torch.minimum((rows[after] - positions).abs(), (rows[before] - positions).abs())
        return index, weight * (far <= NEAR)[:, None]

    return guarded


@contextlib.contextmanager
def way_of(name: str) -> Iterator[tuple[str, bool]]:
    """The encoding of a way, and whether it corrects; what it changes is changed meanwhile."""
    encoding, *options = name.split("+")
    with contextlib.ExitStack() as changed:
        for option in options:
            if option == "w4":
                changed.enter_context(mock.patch.object(correction, "WEIGHTS", 4))
            elif option == "cov":
                changed.enter_context(mock.patch.object(question.Question, "choose", covering))
            elif option == "near":
                guarded = near_only(correction.regression_weights)
                changed.enter_context(mock.patch.object(correction, "regression_weights", guarded))
            elif option[:1] == "n":
                changed.enter_context(mock.patch.object(correction, "NOISE", float(option[1:])))
        yield encoding, any(o[0] == "n" and o != "near" for o in options)


def one_question(
    model: Any, tokenizer: Any, case: Case, todo: list[tuple[str, float]], encoders: dict[Any, Any]
) -> Iterator[dict[str, Any]]:
    """What each way makes of a case."""
    reference = refer(model, tokenizer, case, ANSWER_TOKENS)
    right, chunks = holds(reference.text, case.answers), {}
    for way, ratio in todo:
        with way_of(way) as (encoding, correct):
            if encoding not in chunks:
                chunks[encoding] = encode_case(model, case, encoding, encoders)
            got = measure(
                model, tokenizer, case, reference, chunks[encoding], "question", ratio, True,
                ANSWER_TOKENS, correct,
            )  # fmt: skip
        yield {
            "way": way,
            "ratio": ratio,
            "tokens": len(case.ids),
            "kl": round(got["kl"], 5),
            "right": right,
            "kept": holds(got["text"], case.answers),
            "same": normalise(got["text"]) == normalise(reference.text),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--set", action="append", required=True)
    parser.add_argument("--way", default="mixed,prefix")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; gone on with if there")
    args = parser.parse_args()
    from transformers import AutoTokenizer

    model = load(args.model, torch.float32, "cpu")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    parts = [way.partition("@") for way in args.way.split(",")]
    ways = [(name, float(ratio or DEFAULT_RATIO)) for name, _, ratio in parts]
    done = set()
    if args.out.exists():
        lines = map(json.loads, args.out.read_text().splitlines())
        done = {(r["set"], r["number"], r["way"], r["ratio"]) for r in lines}
    end, encoders = time.monotonic() + 60 * args.minutes, {}
    with args.out.open("a") as file:
        for name, number, example, size in in_turn(args.set):
            todo = [w for w in ways if (name, number, *w) not in done]
            if time.monotonic() > end:
                break
            if not todo:
                continue
            case = tokenise(tokenizer, example, *size)
            for row in one_question(model, tokenizer, case, todo, encoders):
                file.write(json.dumps({"set": name, "number": number, **row}) + "\n")
                file.flush()
            print(name, number, round(end - time.monotonic()), file=sys.stderr, flush=True)


def in_turn(sets: list[str]) -> Iterator[tuple[str, int, Any, tuple[int, int]]]:
    """One question of each set, then the next of each."""
    rows = []
    for text in sets:
        path, first, count, *size = text.split(":")
        documents, tokens = map(int, size) if size else (6, 160)
        found = questions.read(path)[int(first) : int(first) + int(count)]
        name = Path(path).stem
        rows.append([(name, int(first) + i, e, (documents, tokens)) for i, e in enumerate(found)])
    for turn in itertools.zip_longest(*rows):
        yield from (one for one in turn if one is not None)


if __name__ == "__main__":
    main()
