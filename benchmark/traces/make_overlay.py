"""Build a multi-tenant trace from single conversations.

    python benchmark/traces/make_overlay.py --archive traces_500.tar.xz --conversations 200 \
        --window-s 7200 --seed 1 -o overlay.jsonl
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from overlays import flat_line, overlay
from tqdm import tqdm
from writing import open_for_writing

from sglang_canopy.errors import CanopyError


def main(argv: Sequence[str] | None = None) -> int:
    """Write the overlay and a summary on stderr."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--archive", required=True, metavar="PATH", help="archive, folder or file of conversations")
    add("--conversations", type=int, required=True, metavar="N", help="how many")
    add("--window-s", type=float, required=True, metavar="S", help="they start within S seconds")
    add("--seed", type=int, default=0, metavar="K", help="of which conversations, and when")
    add("--skip-bad", type=int, default=0, metavar="N", help="pass over N broken conversations")
    add("-o", "--output", required=True, metavar="OUT", help=".jsonl, .jsonl.gz or .jsonl.xz")
    try:
        return write_overlay(parser.parse_args(argv))
    except CanopyError as error:
        print(f"make_overlay: {error}", file=sys.stderr)
        return 2


def write_overlay(args: argparse.Namespace) -> int:
    """Write the trace under another name first, so that a file of its name is complete."""
    request_count, last_s, started_users = 0, 0.0, set()
    chosen = (args.archive, args.conversations, args.window_s, args.seed)
    overlaid = overlay(*chosen, skip_bad=args.skip_bad)
    output = Path(args.output)
    partial = output.with_name(f".partial.{output.name}")
    try:
        with (
            open_for_writing(partial) as out,
            tqdm(total=args.conversations, desc="conversations started", unit="") as bar,
        ):
            for request in overlaid:
                out.write(flat_line(request) + "\n")
                request_count, last_s = request_count + 1, request.time_s
                if request.user not in started_users:
                    started_users.add(request.user)
                    bar.update()
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)
    print(
        f"{output}: {request_count} requests of {len(started_users)} conversations over {last_s:.0f} s",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
