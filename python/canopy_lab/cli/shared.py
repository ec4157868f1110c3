"""Options shared by several commands, each declared once."""

from __future__ import annotations

import os
from dataclasses import dataclass

from canopy_lab.trace.open import format_names
from sglang_canopy.declared import declare

PROFILE_HELP = "costs of the engine: a file, or the name of a shipped profile"


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Options of commands that read a log."""

    log: str = declare(None, "LOG", "the log, may be compressed (.gz, .xz, .zst)")
    format: str | None = declare(
        None, "--format", "format of the log", choices=format_names(),
        shown_default="guessed from its first lines",
    )  # fmt: skip
    skip_bad: int = declare(0, "--skip-bad", "skip up to N broken lines", metavar="N", low=0)


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """Options of commands that simulate a trace."""

    trace: str = declare(None, "--trace", "trace file", metavar="PATH", required=True)
    format: str = declare(None, "--format", "trace format", choices=format_names(), required=True)
    skip_bad: int = declare(0, "--skip-bad", "skip up to N broken lines", metavar="N", low=0)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of commands that query a running server."""

    url: str = declare("http://127.0.0.1:30000", "--url", "the server", metavar="URL")
    api_key: str | None = declare(
        None, "--api-key", "the server's --api-key", metavar="KEY",
        shown_default="$CANOPY_API_KEY",
    )  # fmt: skip

    @property
    def key(self) -> str | None:
        return self.api_key or os.environ.get("CANOPY_API_KEY")
