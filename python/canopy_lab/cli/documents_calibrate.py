"""``canopy documents calibrate``: measure which share of a document a server should recompute."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from canopy_chunks import ENCODINGS
from sglang_canopy.errors import CanopyError

RATIOS = (0.0, 0.1, 0.15, 0.25, 0.4, 0.6)
STATE = "canopy_chunks"
"""What a server's state and its answers call what they say of documents."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--model", help="Hugging Face directory (Llama, Qwen2, Mistral): the engine by itself")
    add("--url", help="a running server with --canopy-chunks on: its own first tokens are timed")
    add("--out", type=Path, required=True, help="JSON file to save into; others in it are kept")
    add(
        "--data",
        help="questions, as `canopy documents evaluate` takes them (made-up facts without it)",
    )
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
    add("--floor", type=float, default=0.15, help="with --url: smallest ratio allowed")
    add("--prompts", type=int, default=6, help="with --url: prompts, of random tokens")
    add("--repeats", type=int, default=3, help="with --url: times each is asked at each ratio")
    add(
        "--slack",
        type=float,
        default=0.02,
        help="with --url: a larger ratio is taken where it costs at most this share more",
    )
    add("--scratch", type=Path, default=None, help="folder for the disk tier's files")


def run(args: argparse.Namespace) -> int:
    """Measure KL by ratio, take the smallest that is good enough, search the fastest above it; or
    time a server's first tokens at ratios from a given floor on."""
    if (args.model is None) == (args.url is None):
        raise CanopyError("give --model (the engine by itself) or --url (a running server)")
    if not args.out.resolve().parent.is_dir():
        raise CanopyError(f"--out {args.out}: its folder does not exist; make it first")
    return _of_server(args) if args.url else _of_engine(args)


def _of_server(args: argparse.Namespace) -> int:
    from canopy_chunks.fields import BOUNDS, RATIO
    from canopy_chunks.ratio import Calibrations, Setting
    from canopy_chunks.served_calibration import ServedPrompts, calibrate_server
    from canopy_lab.profiling.client import ProfiledServer, wait_until

    if not 0 <= args.floor <= 1:
        raise CanopyError(f"--floor {args.floor}: give a ratio from 0 to 1")
    for flag in ("prompts", "repeats", "chunks", "chunk_tokens"):
        if getattr(args, flag) < 1:
            raise CanopyError(f"--{flag.replace('_', '-')}: give at least 1")
    server = ProfiledServer(args.url)
    about = server.state(STATE).get("setting")
    if about is None:
        raise CanopyError(
            f"{server.url} does not reuse documents; start it with --canopy-chunks on, in a mode that "
            "reuses them"
        )

    def ask(ids: Any, bounds: Any, ratio: float | None) -> tuple[float, dict[str, Any]]:
        params = {BOUNDS: list(bounds), **({} if ratio is None else {RATIO: ratio})}
        seconds, meta = server.first_token(list(ids), params)
        report = meta.get(STATE) or {}
        return seconds, report[0] if isinstance(report, list) else report

    def settled() -> None:
        if not wait_until(lambda: not server.state(STATE).get("waiting_chunks"), 600, 0.5):
            raise CanopyError("the server has not encoded the documents after 10 minutes")

    sizes = (args.prompts, args.chunks, args.chunk_tokens, args.repeats)
    prompts = ServedPrompts(ask, settled, server.token_range, *sizes)
    prompts.learn()
    found, search = calibrate_server(prompts, args.floor, slack=args.slack)
    for ratio, seconds in sorted(search.probes):
        print(f"ratio {ratio:.3f}  first token {seconds:.3f} s")
    setting = Setting(**about)
    Calibrations(args.out).put(setting, prompts.tier, found)
    cost = found.profile
    level = f"{cost.prior(0, 1):.3f}" if cost.compute_s > 0 else "unknown: too noisy"
    print(
        f"{prompts.tier}: ratio {found.ratio:.3f}, TTFT {search.ttft_s:.3f} s; computing a token "
        f"{1e6 * cost.compute_s:.0f} us, bringing one {1e6 * cost.transfer_s:.0f} us, a prompt at any "
        f"ratio {1e3 * cost.other_s:.0f} ms (equation 11: {level})"
    )
    print(
        f"saved in {args.out} for {setting.dtype}, --tp-size {setting.tp_size}, {setting.backend}, "
        f"{setting.device}; serve with --canopy-chunk-calibration {args.out}"
    )
    return 0


def _of_engine(args: argparse.Namespace) -> int:
    import tempfile

    import torch
    from transformers import AutoTokenizer

    from canopy_chunks import tasks
    from canopy_chunks.calibrate import calibrate, on_tier, setting_of
    from canopy_chunks.model import identity_of, load
    from canopy_chunks.quality import encode_case, prompt_of_case, tokenise
    from canopy_chunks.ratio import Calibrations, quality_floor
    from canopy_chunks.selectors import make_selector

    tiers = tuple(t.strip() for t in args.tiers.split(",") if t.strip())
    if not tiers or set(tiers) - {"memory", "disk"}:
        raise CanopyError(f"--tiers {args.tiers}: allowed are memory, disk, comma-separated")
    if args.limit < 1:
        raise CanopyError(f"--limit {args.limit}: give at least 1")
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
    from canopy_chunks.quality import encode_case, measure, refer

    sums = dict.fromkeys(RATIOS, 0.0)
    for case in cases:
        reference = refer(model, tokenizer, case)
        chunks = encode_case(model, case, encode)
        for ratio in RATIOS:
            row = measure(model, tokenizer, case, reference, chunks, selector, ratio, False)
            sums[ratio] += row["kl"] / len(cases)
    return [*sums.items(), (1.0, 0.0)]
