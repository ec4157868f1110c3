"""``canopy top``: the tiers, hits and evictions of one server or of several, in the terminal."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass

from canopy_lab.cli.shared import ServerOptions
from canopy_lab.live.top.frame import frame
from canopy_lab.live.top.source import fetch_all
from sglang_canopy import declared
from sglang_canopy.declared import declare
from sglang_canopy.errors import CanopyError

MIN_INTERVAL_S = 0.2
_CLEAR = "\x1b[2J\x1b[H"


@dataclass(frozen=True, slots=True)
class Options(ServerOptions):
    """Options. ``url`` may list several servers, separated by commas; their counts are summed."""

    once: bool = declare(False, "--once", "print one status and exit; the default")
    json: bool = declare(False, "--json", "print one status as JSON and exit")
    watch: float | None = declare(
        None, "--watch-s", "print a status every SECONDS", metavar="SECONDS", low=MIN_INTERVAL_S
    )

    def __post_init__(self) -> None:
        declared.check(self)
        if self.watch is not None and (self.once or self.json):
            raise CanopyError("--watch-s runs until Ctrl-C; --once and --json print one status")


OPTIONS = (Options,)


def run(args: Options) -> int:
    """Return 0. Raises ``CanopyError`` if no server answers."""
    urls = [url.strip() for url in args.url.split(",") if url.strip()]
    status = fetch_all(urls, args.key)
    if args.json:
        json.dump(status, sys.stdout, indent=1)
        print()
        return 0
    print(frame(status))
    answered = time.monotonic()
    while args.watch is not None:
        time.sleep(args.watch)
        trouble = None
        try:
            status = fetch_all(urls, args.key)
            answered = time.monotonic()
        except CanopyError as error:  # the server may recover
            trouble = f"no answer for {time.monotonic() - answered:.0f} s: {error}"
        print((_CLEAR if sys.stdout.isatty() else "\n") + frame(status, trouble), flush=True)
    return 0
