"""``canopy trace synth``: a synthetic trace with published statistics."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tqdm import tqdm

from canopy_lab.trace.synth import check_seconds, meta_path, write_trace
from canopy_lab.trace.synth_presets import PRESETS, get_preset


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument(
        "--preset",
        required=True,
        choices=tuple(PRESETS),
        help="statistics to follow: " + "; ".join(f"{p.name}: {p.about}" for p in PRESETS.values()),
    )
    parser.add_argument("--seconds", type=float, required=True, help="length of the trace")
    parser.add_argument("--seed", type=int, default=1, help="equal seeds give equal traces")
    parser.add_argument(
        "--rate",
        type=float,
        metavar="REQUESTS_PER_S",
        help="mean requests a second instead of the preset's: the same habits, more or fewer users",
    )
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        required=True,
        help="file in the Bailian format (.jsonl, .jsonl.gz, .jsonl.xz); "
        "NAME.meta.json beside it says that it is synthetic",
    )


def run(args: argparse.Namespace) -> int:
    """Write the trace. Returns the exit status."""
    check_seconds(args.seconds)
    preset = get_preset(args.preset).at_rate(args.rate)
    with tqdm(
        total=round(args.seconds), unit="s", desc=f"synth {preset.name}", disable=None
    ) as bar:

        def progress(time_s: float) -> None:
            if time_s - bar.n >= 1.0:
                bar.update(int(time_s - bar.n))

        meta = write_trace(args.out, preset, args.seconds, args.seed, progress=progress)
        bar.update(bar.total - bar.n)
    print(
        f"synthetic: {meta['requests']} requests, {meta['input_tokens']} prompt tokens in "
        f"{args.out}, described in {meta_path(args.out)}",
        file=sys.stderr,
    )
    return 0
