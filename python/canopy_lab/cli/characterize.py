"""``canopy characterize``: how a trace reuses KV."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tqdm import tqdm

from canopy_lab.characterize.published import TARGETS
from canopy_lab.characterize.report import ReadProgress, characterize
from canopy_lab.report.characterize_text import summary
from canopy_lab.trace.open import format_names
from sglang_canopy.errors import CanopyError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument("trace", type=Path, help="the trace, may be compressed (.gz, .xz, .zst)")
    parser.add_argument("--format", required=True, choices=format_names(), help="trace format")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for report.html, report.json and the PNGs"
    )
    parser.add_argument(
        "--json", action="store_true", help="print report.json instead of a summary"
    )
    parser.add_argument(
        "--model-config",
        default="qwen2.5-7b",
        metavar="MODEL",
        help="preset or Hugging Face config.json whose KV bytes are counted (default %(default)s)",
    )
    parser.add_argument(
        "--published",
        choices=tuple(TARGETS),
        help="compare with the published statistics of this trace of arXiv 2506.02634",
    )
    parser.add_argument(
        "--skip-bad", type=int, default=0, metavar="N", help="go on past N broken lines"
    )


def run(args: argparse.Namespace) -> int:
    """Write the report. Returns the exit status."""
    from canopy_lab.report.characterize_html import write_report

    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CanopyError(f"cannot make the folder {str(args.out)!r}: {error}") from None
    with tqdm(desc=f"characterize {args.trace.name}", unit="req", disable=None) as bar:

        def resize(total: int) -> None:
            bar.total = total
            bar.refresh()

        report = characterize(
            args.trace,
            args.format,
            model=args.model_config,
            skip_bad=args.skip_bad,
            against=args.published,
            work=ReadProgress(bar.update, resize),
        )
        if bar.total:
            bar.update(bar.total - bar.n)
    write_report(report, args.out)
    print(json.dumps(report.as_json()) if args.json else summary(report, args.out))
    return 0
