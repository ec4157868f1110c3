"""The price of going on from kept KV: later turns over the first turn's documents, in two ways.

    python benchmark/chunk/follow_up.py --model DIR --data FILE --data FILE --conversations 36 --out FILE

``kept`` continues from the KV of the previous turn, as the server does; ``fused again`` reuses the
documents' stored KV in every turn. The history is full recompute's own, so that both read the same
tokens. KL (nats a token) of 16 tokens along full recompute's answer; rows: tokens computed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from comparators import make_selector, questions
from comparators.quality import FORCED, divergence, encode_case, forced_logprobs
from comparators.weights import load

from canopy_chunks.fuse import rows as engine
from canopy_chunks.fuse.cache import KVCache, dense_cache
from canopy_chunks.fuse.fusion import fused_prefill
from canopy_chunks.quality.answers import greedy_steps, prompt_of_case, tokenise
from canopy_chunks.store.chunk import FusedPrompt

TURNS = 3
FOLLOW_UPS = (
    "Tell me more about it. When did it happen?",
    "Who else is named in the documents?",
    "Which of the documents says so?",
    "Give the year, please.",
    "Where was that?",
    "Name one person from the first document.",
    "What happened before that?",
    "Summarise the second document.",
)
ROOM = 512
"""Tokens of the cache in addition to the first prompt."""

Turn = tuple[list[int], list[int], torch.Tensor]
"""A turn's prompt, full recompute's answer, and its log-probabilities ``[m, vocab]``."""


def history(model: Any, tokenizer: Any, ids: list[int], number: int) -> list[Turn]:
    """Return the turns of a conversation under full recompute."""
    cache, have, turns = dense_cache(model, len(ids) + ROOM), 0, []
    ids = list(ids)
    for turn in range(TURNS):
        if turn:
            asked = FOLLOW_UPS[(number + turn) % len(FOLLOW_UPS)]
            text = f"<|im_end|>\n<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
            ids = ids + tokenizer(text, add_special_tokens=False)["input_ids"]
        row = extend(model, ids, cache, have)
        rows, first = [row], int(row.argmax())
        steps = greedy_steps(model, cache, len(ids), [first], FORCED, None, rows)
        tokens = engine.finish(steps)
        turns.append((ids, tokens, torch.stack(rows).log_softmax(-1)))
        have = len(ids)
        ids = ids + [t for t in tokens if t != tokenizer.eos_token_id]
    return turns


def extend(model: Any, ids: list[int], cache: KVCache, have: int) -> torch.Tensor:
    """Compute ``ids`` after the first ``have`` of them; return the last one's logits ``[vocab]``."""
    rest = torch.tensor(ids[have:])
    hidden = engine.prefill(model, rest, cache.upto(len(ids)), have)
    return model.logits(hidden[-1:])[0]  # type: ignore[no-any-return]


def fuse(model: Any, prompt: FusedPrompt, cache: KVCache, ratio: float) -> tuple[Any, int]:
    """Return the last token's logits, and the tokens computed."""
    fused = fused_prefill(model, prompt, cache.upto(len(prompt)), make_selector("question"), ratio)
    return fused.logits, fused.rows.numel()


def against(model: Any, cache: KVCache, first: torch.Tensor, rows: int, turn: Turn) -> Any:
    """Return KL to full recompute along its answer."""
    ids, tokens, true = turn
    got = forced_logprobs(model, cache, first, tokens, len(ids))
    return {"kl": round(divergence(true, got), 6), "rows": rows}


def conversation(
    model: Any, tokenizer: Any, case: Any, number: int, ratio: float, encoders: dict[Any, Any]
) -> list[dict[str, Any]]:
    """Return a row for each turn."""
    placed = prompt_of_case(case, encode_case(model, case, "mixed", encoders), model.device).placed
    kept, have, found = dense_cache(model, len(case.ids) + ROOM), 0, []
    for place, turn in enumerate(history(model, tokenizer, case.ids, number), 1):
        ids = turn[0]
        prompt, n = FusedPrompt(torch.tensor(ids), placed), len(ids)
        row: dict[str, Any] = {"turn": place, "tokens": n}
        if have:
            last = extend(model, ids, kept, have)
            row["kept"] = against(model, kept, last, n - have, turn)
            again = dense_cache(model, n + FORCED)
            row["again"] = against(model, again, *fuse(model, prompt, again, ratio), turn)
        else:
            row["kept"] = against(model, kept, *fuse(model, prompt, kept, ratio), turn)
        have = n
        found.append(row)
    return found


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", action="append", required=True, help="asked in turn")
    parser.add_argument("--conversations", type=int, default=36)
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; gone on with if there")
    args = parser.parse_args()
    from transformers import AutoTokenizer

    model = load(args.model, torch.float32, "cpu")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    sets = [(Path(path).stem, questions.read(path)) for path in args.data]
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    done, encoders = {json.loads(line)["number"] for line in lines}, {}
    with args.out.open("a") as file:
        for number in range(args.conversations):
            if number in done:
                continue
            name, examples = sets[number % len(sets)]
            case = tokenise(tokenizer, examples[number // len(sets)], 6, 160)
            for row in conversation(model, tokenizer, case, number, args.ratio, encoders):
                about = {"number": number, "set": name, "ratio": args.ratio}
                file.write(json.dumps({**about, **row}) + "\n")
            file.flush()
            print(number, len(case.ids), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
