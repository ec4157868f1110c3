"""``canopy calibrate``: measure which share of a document a server should recompute."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sglang_canopy.chunk import ENCODINGS
from sglang_canopy.errors import CanopyError

RATIOS = (0.0, 0.1, 0.15, 0.25, 0.4, 0.6)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--model", required=True, help="Hugging Face directory (Llama, Qwen2, Mistral)")
    add("--out", type=Path, required=True, help="JSON file to save into; others in it are kept")
    add("--data", help="questions, as `canopy chunk-eval` takes them (made-up facts without it)")
    add("--limit", type=int, default=6, help="questions")
    add("--max-kl", type=float, help="KL that is good enough, in nats a token")
    add(
        "--keep",
        type=float,
        default=0.5,
        help="without --max-kl: share of the KL at ratio 0 to win",
    )
    add("--tiers", default="memory,disk", help="memory, disk, or both")
    add("--selector", default="default", help="a selector's name")
    add("--encode", default="prefix", choices=ENCODINGS, help="what chunks are encoded behind")
    add("--chunks", type=int, default=6, help="most documents per prompt")
    add("--chunk-tokens", type=int, default=160, help="most tokens per document")
    add(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16", "float16"),
        help="type of the weights and KV",
    )
    add("--device", default="cpu", help="torch device")
    add("--scratch", type=Path, default=None, help="folder for the disk tier's files")


def run(args: argparse.Namespace) -> int:
    """Measure KL by ratio, take the smallest that is good enough, search the fastest above it."""
    import tempfile

    import torch
    from transformers import AutoTokenizer

    from sglang_canopy.chunk import tasks
    from sglang_canopy.chunk.calibrate import calibrate, on_tier, setting_of
    from sglang_canopy.chunk.model import identity_of, load
    from sglang_canopy.chunk.quality import encode_case, prompt_of_case, tokenise
    from sglang_canopy.chunk.ratio import Calibrations, quality_floor
    from sglang_canopy.chunk.selectors import make_selector

    tiers = tuple(t.strip() for t in args.tiers.split(",") if t.strip())
    if not tiers or set(tiers) - {"memory", "disk"}:
        raise CanopyError(f"--tiers {args.tiers}: allowed are memory, disk, comma-separated")
    if args.limit < 1:
        raise CanopyError(f"--limit {args.limit}: give at least 1")
    if not args.out.resolve().parent.is_dir():
        raise CanopyError(f"--out {args.out}: its folder does not exist; make it first")
    make_selector(args.selector)
    model = load(args.model, getattr(torch, args.dtype), args.device)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    if args.data:
        examples = tasks.read(args.data, args.limit)
    else:
        each = -(-args.limit // len(tasks.SYNTHETIC))
        examples = tasks.synthetic(tasks.SYNTHETIC, each, tasks.default_filler())[: args.limit]
    cases = [tokenise(tokenizer, e, args.chunks, args.chunk_tokens) for e in examples]
    measured = _quality(model, tokenizer, cases, args.selector, args.encode)
    for ratio, kl in measured:
        print(f"ratio {ratio:.2f}  KL {kl:.4f} nats a token")
    floor = quality_floor(measured, args.keep, args.max_kl)
    print(f"smallest ratio that is good enough: {floor:.3f}")
    prompts = [
        prompt_of_case(c, encode_case(model, c, args.encode), model.device) for c in cases[:2]
    ]
    setting = setting_of(model, identity_of(args.model))
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        for tier in tiers:
            there = [on_tier(p, tier, Path(folder)) for p in prompts]
            found, search = calibrate(model, there, floor, selector=args.selector)
            Calibrations(args.out).put(setting, tier, found)
            cost, tokens = found.profile, there[0].reusable
            print(
                f"{tier}: ratio {found.ratio:.3f}, TTFT {search.ttft_s:.3f} s; computing a token "
                f"{1e6 * cost.compute_s:.0f} us, placing one {1e6 * cost.transfer_s:.0f} us, a "
                f"prompt at any ratio {1e3 * cost.other_s:.0f} ms (equation 10: "
                f"{cost.ttft(tokens, found.ratio):.3f} s)"
            )
    print(f"saved in {args.out}; serve with --canopy-chunk-calibration {args.out}")
    return 0


def _quality(
    model: Any, tokenizer: Any, cases: list[Any], selector: str, encode: str
) -> list[tuple[float, float]]:
    """``(ratio, mean KL)``; ratio 1 is exact by construction and is not run."""
    from sglang_canopy.chunk.quality import encode_case, measure, refer

    sums = dict.fromkeys(RATIOS, 0.0)
    for case in cases:
        reference = refer(model, tokenizer, case)
        chunks = encode_case(model, case, encode)
        for ratio in RATIOS:
            row = measure(model, tokenizer, case, reference, chunks, selector, ratio, False)
            sums[ratio] += row["kl"] / len(cases)
    return [*sums.items(), (1.0, 0.0)]
