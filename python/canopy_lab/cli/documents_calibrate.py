"""``canopy documents calibrate``: measure which share of a document a server should recompute."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sglang_canopy.errors import CanopyError

STATE = "canopy_chunks"
"""What a server's state and its answers call what they say of documents."""
MOST_S = 600
"""Seconds that a server may take to encode the documents it is shown."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--url", required=True, help="a running server with --canopy-chunks on, idle")
    add("--out", type=Path, required=True, help="JSON file to save into; others in it are kept")
    add("--floor", type=float, default=0.15, help="smallest ratio allowed")
    add("--prompts", type=int, default=6, help="prompts, of random tokens")
    add("--chunks", type=int, default=6, help="documents per prompt")
    add("--chunk-tokens", type=int, default=160, help="tokens per document")
    add("--repeats", type=int, default=3, help="times each prompt is asked at each ratio")
    add(
        "--slack",
        type=float,
        default=0.02,
        help="a larger ratio is taken where it costs at most this share more",
    )


def run(args: argparse.Namespace) -> int:
    """Time a server's first tokens at ratios from a given floor on, and save the fastest."""
    from canopy_chunks.calibration.saved import Calibrations, Setting
    from canopy_chunks.calibration.served import ServedPrompts, calibrate_server
    from canopy_lab.profiling.client import ProfiledServer

    _check(args)
    server = ProfiledServer(args.url)
    about = server.state(STATE).get("setting")
    if about is None:
        raise CanopyError(
            f"{server.url} does not reuse documents; start it with --canopy-chunks on"
        )
    sizes = (args.prompts, args.chunks, args.chunk_tokens, args.repeats)
    prompts = ServedPrompts(_asking(server), _settling(server), server.token_range, *sizes)
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
        f"{setting.device}; serve with --canopy-chunks calibration={args.out}"
    )
    return 0


def _check(args: argparse.Namespace) -> None:
    if not args.out.resolve().parent.is_dir():
        raise CanopyError(f"--out {args.out}: its folder does not exist; make it first")
    if not 0 <= args.floor <= 1:
        raise CanopyError(f"--floor {args.floor}: give a ratio from 0 to 1")
    for flag in ("prompts", "repeats", "chunks", "chunk_tokens"):
        if getattr(args, flag) < 1:
            raise CanopyError(f"--{flag.replace('_', '-')}: give at least 1")


def _asking(server: Any) -> Any:
    from sglang_canopy.request.document_names import BOUNDS, RATIO

    def ask(ids: Any, bounds: Any, ratio: float | None) -> tuple[float, dict[str, Any]]:
        params = {BOUNDS: list(bounds), **({} if ratio is None else {RATIO: ratio})}
        seconds, meta = server.first_token(list(ids), params)
        report = meta.get(STATE) or {}
        return seconds, report[0] if isinstance(report, list) else report

    return ask


def _settling(server: Any) -> Any:
    from canopy_lab.profiling.client import wait_until

    def settled() -> None:
        if not wait_until(lambda: not server.state(STATE).get("waiting_chunks"), MOST_S, 0.5):
            raise CanopyError(
                f"the server has not encoded the documents after {MOST_S // 60} minutes"
            )

    return settled
