"""What commands that read somebody's log have in common."""

from __future__ import annotations

import argparse

from canopy_lab.trace.open import format_names


def add_log_arguments(parser: argparse.ArgumentParser) -> None:
    """The log, its format and its tokenizer."""
    add = parser.add_argument
    add("log", metavar="LOG", help="the log, may be compressed (.gz, .xz, .zst)")
    add(
        "--format",
        choices=format_names(),
        help="format of the log (default: what its first lines look like)",
    )
    add(
        "--tokenizer",
        metavar="PATH",
        help="tokenizer.json or its folder, for logs of text (default: 4 bytes count as a token)",
    )
