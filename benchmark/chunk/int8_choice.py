"""Is a choice of tokens by 8-bit copies as good as one by the full KV? KL of both, paired.

    python benchmark/chunk/int8_choice.py --model DIR --data musique_100.json --limit 20 \
        [--ratio 0.05,0.15] [--json rows.jsonl]

Each question's documents are encoded once. The default selector then chooses twice, from the full KV
and from the copies that ``--canopy-chunk-int8-mb`` keeps; what is reused is the full KV both times.
The placebo makes the copies worse (3 bits), so that a gate which never closes is seen. Rows are
appended to the file after each question, and questions that it has are skipped.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from canopy_chunks import int8_copy, tasks
from canopy_chunks.cache import dense_cache
from canopy_chunks.chunk import Placed
from canopy_chunks.encode import Encoder
from canopy_chunks.int8_copy import Int8Copy
from canopy_chunks.model import load
from canopy_chunks.placement import copy_positions, place_chunks
from canopy_chunks.quality import encode_case, mean_se, measure, refer, tokenise
from canopy_chunks.selectors import DEFAULT, SELECTORS
from canopy_chunks.selectors.base import Context, SelectedTokens, Selector
from canopy_chunks.selectors.query import probed_layers

BITS = {"int8": 127, "3-bit": 3}
"""Levels on each side of 0."""


def by_copies(name: str, levels: int, chosen: dict[str, torch.Tensor]) -> type[Selector]:
    """The default selector over a cache that copies of so many levels were placed in."""
    inner = SELECTORS[DEFAULT]()

    class ByCopies(Selector):
        reads_cache = True

        def choose(self, context: Context) -> SelectedTokens:
            model, prompt, depth = context.model, context.prompt, probed_layers_of(context)
            seen = dense_cache(model, len(prompt))
            copy_positions(context.cache, seen, context.ready)
            usual, int8_copy.LEVELS = int8_copy.LEVELS, levels
            copies = tuple(Placed(Int8Copy.of(p.chunk, depth), p.start) for p in prompt.placed)
            int8_copy.LEVELS = usual
            place_chunks(model, copies, seen, prompt.in_chunk(), depth)
            choice = inner.choose(replace(context, cache=seen))
            chosen[name] = choice.tokens
            return choice

    ByCopies.name = name
    return ByCopies


def probed_layers_of(context: Context) -> int:
    return probed_layers(context.model.shape.layers)


class Full(Selector):
    """The default, which remembers what it chose."""

    name = "full"
    reads_cache = True
    chosen: dict[str, torch.Tensor]

    def choose(self, context: Context) -> SelectedTokens:
        choice = SELECTORS[DEFAULT]().choose(context)
        self.chosen[self.name] = choice.tokens
        return choice


def questions(args: argparse.Namespace, done: set[str]) -> Any:
    for number, example in enumerate(tasks.read(args.data, args.limit)):
        name = f"{Path(args.data).name}:{number}"
        if name not in done:
            yield name, example


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--ratio", default="0.05,0.15")
    parser.add_argument("--encode", default="prefix")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    from transformers import AutoTokenizer

    model, tokenizer = load(args.model), AutoTokenizer.from_pretrained(args.model)
    chosen: dict[str, torch.Tensor] = {}
    Full.chosen = chosen
    SELECTORS["full"] = Full
    for name, levels in BITS.items():
        SELECTORS[name] = by_copies(name, levels, chosen)
    rows = []
    if args.json and args.json.exists():
        rows = [json.loads(line) for line in args.json.read_text().splitlines()]
    encoders: dict[tuple[int, ...], Encoder] = {}
    for name, example in questions(args, {row["question"] for row in rows}):
        case = tokenise(tokenizer, example, 6, 160)
        reference = refer(model, tokenizer, case)
        chunks = encode_case(model, case, args.encode, encoders)
        for ratio in map(float, args.ratio.split(",")):
            row: dict[str, Any] = {"question": name, "ratio": ratio}
            for how in ("full", *BITS):
                found = measure(model, tokenizer, case, reference, chunks, how, ratio, False)
                row[how] = found["kl"]
                same = set(chosen[how].tolist()) & set(chosen["full"].tolist())
                row[f"{how}_same"] = len(same) / max(1, chosen["full"].numel())
            rows.append(row)
            if args.json:
                with args.json.open("a") as f:
                    f.write(json.dumps(row) + "\n")
    report(rows)


def report(rows: list[dict[str, Any]]) -> None:
    for ratio in sorted({row["ratio"] for row in rows}):
        mine = [row for row in rows if row["ratio"] == ratio]
        full = mean_se([row["full"] for row in mine])
        print(f"r = {ratio}, {len(mine)} questions: full probe {full[0]:.4f} ({full[1]:.4f})")
        for how in BITS:
            kl = mean_se([row[how] for row in mine])
            off = mean_se([row[how] - row["full"] for row in mine])
            same = mean_se([row[f"{how}_same"] for row in mine])[0]
            print(
                f"  {how}: {kl[0]:.4f} ({kl[1]:.4f}), minus full {off[0]:+.4f} ({off[1]:.4f}), "
                f"{100 * same:.1f} % of its tokens the same"
            )


if __name__ == "__main__":
    main()
