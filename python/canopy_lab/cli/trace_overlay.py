"""``canopy trace overlay``: build a multi-tenant trace from single conversations."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tqdm import tqdm

from canopy_lab.trace.agentic import flat_line
from canopy_lab.trace.lines import open_for_writing
from canopy_lab.trace.overlay import overlay


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``canopy trace overlay``."""
    parser.add_argument(
        "--archive",
        required=True,
        metavar="PATH",
        help="tar archive (.tar, .tar.xz, .tar.gz, .tar.zst), folder or file of conversations",
    )
    parser.add_argument(
        "--conversations", type=int, required=True, metavar="N", help="how many conversations"
    )
    parser.add_argument(
        "--window-s",
        type=float,
        required=True,
        metavar="S",
        help="they start uniformly within this many seconds",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="K",
        help="seed of which conversations and when they start",
    )
    parser.add_argument(
        "--own-prefixes",
        action="store_true",
        help="share no blocks: by default agents of the same model with the same numbers of tokens "
        "of tools and of system prompt begin with the same ones",
    )
    parser.add_argument(
        "--skip-bad", type=int, default=0, metavar="N", help="pass over N broken conversations"
    )
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="OUT",
        help="JSON lines to write (.jsonl, .jsonl.gz, .jsonl.xz); read with --format agentic",
    )


def run(args: argparse.Namespace) -> int:
    """Write the overlay and say on stderr what is in it."""
    requests, last_s, started = 0, 0.0, set()
    merged = overlay(
        args.archive,
        args.conversations,
        args.window_s,
        args.seed,
        skip_bad=args.skip_bad,
        own_prefixes=args.own_prefixes,
    )
    # The file is written under another name first: a trace that is there is a whole one.
    output = Path(args.output)
    partial = output.with_name(f".partial.{output.name}")
    try:
        with (
            open_for_writing(partial) as out,
            tqdm(total=args.conversations, desc="conversations started", unit="") as bar,
        ):
            for request in merged:
                out.write(flat_line(request) + "\n")
                requests, last_s = requests + 1, request.time_s
                if request.user not in started:
                    started.add(request.user)
                    bar.update()
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)
    print(
        f"{output}: {requests} requests of {len(started)} conversations over {last_s:.0f} s",
        file=sys.stderr,
    )
    return 0
