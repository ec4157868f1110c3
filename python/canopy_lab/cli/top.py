"""``canopy top``: the tiers, hits and evictions of one server or of several, in the terminal."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from canopy_lab.top.source import fetch_all
from sglang_canopy.errors import CanopyError

WIDTH = 132
"""Columns of a frame that goes to a file or a pipe."""
MIN_INTERVAL_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:30000",
        metavar="URL,URL",
        help="the server, or the workers of a gateway, added up (default: %(default)s)",
    )
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="SECONDS", help="between two frames (2)"
    )
    parser.add_argument("--once", action="store_true", help="one frame, also without a terminal")
    parser.add_argument("--json", action="store_true", help="one status as JSON, for scripts")
    parser.add_argument(
        "--svg", type=Path, metavar="FILE", help="one frame as a picture, written to FILE"
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("CANOPY_API_KEY"),
        help="the server's --api-key (default: $CANOPY_API_KEY)",
    )


def run(args: argparse.Namespace) -> int:
    """Returns 0. Raises ``CanopyError`` for a server that cannot be shown."""
    if not args.interval >= MIN_INTERVAL_S:
        raise CanopyError(f"--interval must be at least {MIN_INTERVAL_S} s, got {args.interval:g}")
    urls = [url.strip() for url in args.url.split(",") if url.strip()]
    status = fetch_all(urls, args.api_key)
    if args.json:
        json.dump(status, sys.stdout, indent=1)
        print()
        return 0
    from rich.console import Console

    from canopy_lab.top.frame import frame

    if args.svg is not None:
        with open(os.devnull, "w") as nowhere:
            console = Console(file=nowhere, width=WIDTH, record=True, force_terminal=True)
            console.print(frame(status))
        try:
            svg = console.export_svg(title="canopy top")
            # Without the fonts that rich would have a browser fetch from elsewhere.
            svg = re.sub(r"@font-face\s*\{.*?\}\s*", "", svg, flags=re.DOTALL)
            args.svg.write_text(svg, encoding="utf-8")
        except OSError as error:
            raise CanopyError(f"--svg: cannot write {args.svg}: {error}") from None
        return 0
    console = Console()
    if args.once or not console.is_terminal:
        if not console.is_terminal:
            console = Console(width=WIDTH)
        console.print(frame(status))
        return 0
    return _live(args, urls, console, status)


def _live(args: argparse.Namespace, urls: list[str], console: Any, status: dict[str, Any]) -> int:
    from rich.live import Live

    from canopy_lab.top.frame import frame

    answered = time.monotonic()
    with Live(frame(status), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(args.interval)
            trouble = None
            try:
                status = fetch_all(urls, args.api_key)
                answered = time.monotonic()
            except CanopyError as error:  # the server may come back
                trouble = f"no news for {time.monotonic() - answered:.0f} s: {error}"
            live.update(frame(status, trouble), refresh=True)
