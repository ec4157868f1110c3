"""Make a synthetic trace with published statistics.

python benchmark/traces/make_synthetic.py --preset trace-a --seconds 7200 --seed 1 -o a.jsonl
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from synthetic.presets import PRESETS, get_preset
from synthetic.trace import check_seconds, meta_path, write_trace

from sglang_canopy.errors import CanopyError


def main(argv: Sequence[str] | None = None) -> int:
    """Write the trace, and NAME.meta.json, which states that it is synthetic."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add(
        "--preset",
        required=True,
        choices=tuple(PRESETS),
        help="; ".join(f"{p.name}: {p.description}" for p in PRESETS.values()),
    )
    add("--seconds", type=float, required=True, help="length of the trace")
    add("--seed", type=int, default=1, help="equal seeds give equal traces")
    add("--rate", type=float, metavar="REQUESTS_PER_S", help="instead of the preset's")
    add("-o", "--out", type=Path, required=True, help="Bailian's format: .jsonl, .jsonl.gz, .xz")
    args = parser.parse_args(argv)
    try:
        check_seconds(args.seconds)
        preset = get_preset(args.preset).at_rate(args.rate)
        meta = write_trace(args.out, preset, args.seconds, args.seed)
    except CanopyError as error:
        print(f"make_synthetic: {error}", file=sys.stderr)
        return 2
    print(
        f"synthetic: {meta['requests']} requests, {meta['input_tokens']} prompt tokens in "
        f"{args.out}, described in {meta_path(args.out)}",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
