"""``canopy top``: the tiers, hits and evictions of one server or of several, in the terminal."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canopy_lab.cli.shared import ServerOptions
from canopy_lab.live.top.source import fetch_all
from sglang_canopy import declared
from sglang_canopy.declared import declare
from sglang_canopy.errors import CanopyError

WIDTH = 132
"""Columns of a frame that goes to a file or a pipe."""
MIN_INTERVAL_S = 0.2


@dataclass(frozen=True, slots=True)
class Options(ServerOptions):
    """``url`` may be several, of the workers of a gateway, which are added up."""

    interval: float = declare(
        2.0, "--interval", "between two frames", metavar="SECONDS", low=MIN_INTERVAL_S
    )
    once: bool = declare(False, "--once", "one frame, also without a terminal")
    json: bool = declare(False, "--json", "one status as JSON, for scripts")
    svg: Path | None = declare(
        None, "--svg", "one frame as a picture, written to FILE", metavar="FILE", parse=Path
    )

    def __post_init__(self) -> None:
        declared.check(self)


OPTIONS = (Options,)


def run(args: Options) -> int:
    """Returns 0. Raises ``CanopyError`` for a server that cannot be shown."""
    urls = [url.strip() for url in args.url.split(",") if url.strip()]
    status = fetch_all(urls, args.key)
    if args.json:
        json.dump(status, sys.stdout, indent=1)
        print()
        return 0
    from rich.console import Console

    from canopy_lab.live.top.frame import frame

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


def _live(args: Options, urls: list[str], console: Any, status: dict[str, Any]) -> int:
    from rich.live import Live

    from canopy_lab.live.top.frame import frame

    answered = time.monotonic()
    with Live(frame(status), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(args.interval)
            trouble = None
            try:
                status = fetch_all(urls, args.key)
                answered = time.monotonic()
            except CanopyError as error:  # the server may come back
                trouble = f"no news for {time.monotonic() - answered:.0f} s: {error}"
            live.update(frame(status, trouble), refresh=True)
