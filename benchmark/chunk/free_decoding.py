"""Answers of full recompute and of reuse, decoded freely, from which the default was chosen.

    python benchmark/chunk/free_decoding.py --model DIR --set musique_100.json:60:20 \\
        --set n1k.jsonl:0:12:24:400 --way mixed,prefix,mixed@0.1 --out FILE --minutes 60

A set is FILE:FIRST:COUNT, perhaps with :DOCUMENTS:TOKENS of each (6 of 160). Sets take turns, a question
each, so that a run that is stopped has some of all. A way is an encoding and perhaps a ratio (0.15).
``right``: full recompute's answer holds the data's; ``kept``: so does the one with reuse. ``margin``:
by how many nats full recompute preferred its token where the answers first differ, null where they
do not: a small one is a flip at a near tie.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from comparators import questions
from comparators.quality import encode_case, measure, refer
from comparators.weights import load

from canopy_chunks.quality.answers import Case, holds, tokenise

ANSWER_TOKENS = 16
DEFAULT_RATIO = 0.15


def one_question(
    model: Any,
    tokenizer: Any,
    case: Case,
    todo: list[tuple[str, float]],
    encoders: dict[Any, Any],
    screen: bool,
) -> Iterator[dict[str, Any]]:
    """The result of each way for a case; for a case to ``screen`` that full recompute answers wrong,
    only that fact."""
    reference = refer(model, tokenizer, case, ANSWER_TOKENS)
    right, chunks = holds(reference.text, case.answers), {}
    if screen and not right:
        yield {"way": None, "ratio": None, "tokens": len(case.ids), "right": False}
        return
    for way, ratio in todo:
        if way not in chunks:
            chunks[way] = encode_case(model, case, way, encoders)
        got = measure(
            model, tokenizer, case, reference, chunks[way], "question", ratio, True, ANSWER_TOKENS
        )
        yield {
            "way": way,
            "ratio": ratio,
            "tokens": len(case.ids),
            "kl": round(got["kl"], 5),
            "right": right,
            "kept": holds(got["text"], case.answers),
            "margin": None if got["margin"] is None else round(got["margin"], 4),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--set", action="append", required=True)
    parser.add_argument("--way", default="mixed,prefix")
    parser.add_argument("--screen", default="", help="sets of which only right answers go on")
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
            if not todo or (name, number, None, None) in done:
                continue
            case = tokenise(tokenizer, example, *size)
            screen = name in args.screen.split(",")
            for row in one_question(model, tokenizer, case, todo, encoders, screen):
                file.write(json.dumps({"set": name, "number": number, **row}) + "\n")
                file.flush()
            print(name, number, round(end - time.monotonic()), file=sys.stderr, flush=True)


def in_turn(sets: list[str]) -> Iterator[tuple[str, int, Any, tuple[int, int]]]:
    """Yield the first question of each set, then the second, and so on."""
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
