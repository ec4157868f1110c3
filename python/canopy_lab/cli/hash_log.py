"""``canopy hash-log``: a log without its text, for those who may not pass prompts on."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from tqdm import tqdm

from canopy_lab.cli.log_arguments import add_log_arguments
from canopy_lab.trace.guess import guess_format
from canopy_lab.trace.hashed import salt_of, write
from canopy_lab.trace.lines import open_for_writing
from canopy_lab.trace.logs import TEXT_FORMATS, check_log, open_log
from canopy_lab.trace.prompts import Cutter
from sglang_canopy.errors import CanopyError

BLOCK_TOKENS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``canopy hash-log``."""
    add = parser.add_argument
    add_log_arguments(parser)
    add("--output", "-o", required=True, metavar="FILE", help="hashed log, .jsonl, .gz or .xz")
    add(
        "--salt-file",
        metavar="FILE",
        help="the secret salt in hexadecimal, made there if there is none; logs of one salt can "
        "be compared (default: a new salt that is thrown away)",
    )
    add(
        "--block-tokens",
        type=int,
        default=BLOCK_TOKENS,
        metavar="N",
        help="tokens of a hashed block, rounded down to whole blocks of the log (default %(default)s)",
    )
    add("--skip-bad", type=int, default=0, metavar="N", help="pass over N broken lines")


def run(args: argparse.Namespace) -> int:
    """Hash the log."""
    format = args.format or guess_format(args.log)
    path = check_log(args.log, format, args.tokenizer)
    if args.block_tokens < 1:
        raise CanopyError(f"--block-tokens must be 1 or more, got {args.block_tokens}")
    out = Path(args.output)
    if out.exists() and out.samefile(path):
        raise CanopyError(f"--output {args.output!r} is the log itself; name another file")
    cutter = Cutter(args.tokenizer)
    method = cutter.method if format in TEXT_FORMATS else f"as in a log of format {format}"
    salt = salt_of(args.salt_file)
    scratch = out.with_name(f".part-{os.getpid()}-{out.name}")
    try:
        with (
            tqdm(desc=f"hashing {path.name} ({format})", unit="req", disable=None) as bar,
            open_for_writing(scratch) as stream,
        ):
            rows = open_log(path, format, cutter=cutter, skip_bad=args.skip_bad)
            count = write(
                stream,
                (bar.update() or row for row in rows),
                salt,
                block_tokens=args.block_tokens,
                method=method,
            )
        scratch.chmod(0o600)
        scratch.replace(out)
    except OSError as error:
        raise CanopyError(f"cannot write {args.output!r}: {error}") from None
    finally:
        scratch.unlink(missing_ok=True)
    print(f"{count:,} requests in {args.output}; no text is in it")
    if args.salt_file is None:
        print("the salt was thrown away: nobody can test a guess at a prompt against this file")
    else:
        print(f"keep {args.salt_file} to yourself: with it guesses at prompts can be tested")
    return 0
