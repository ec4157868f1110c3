"""Options that several commands have, each spelt once."""

from __future__ import annotations

import os
from dataclasses import dataclass

from canopy_lab.trace.open import format_names
from sglang_canopy.declared import declare

PROFILE_HELP = "costs of the engine: a file, or the name of a shipped profile"


@dataclass(frozen=True, slots=True)
class LogOptions:
    """What commands that read somebody's log have in common."""

    log: str = declare(None, "LOG", "the log, may be compressed (.gz, .xz, .zst)")
    format: str | None = declare(
        None, "--format", "format of the log", choices=format_names(),
        shown_default="what its first lines look like",
    )  # fmt: skip
    skip_bad: int = declare(0, "--skip-bad", "pass over N broken lines", metavar="N", low=0)


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """What commands that simulate a trace have in common."""

    trace: str = declare(None, "--trace", "trace file", metavar="PATH", required=True)
    format: str = declare(None, "--format", "trace format", choices=format_names(), required=True)
    skip_bad: int = declare(0, "--skip-bad", "pass over N broken lines", metavar="N", low=0)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What commands that ask a running server have in common."""

    url: str = declare("http://127.0.0.1:30000", "--url", "the server", metavar="URL")
    api_key: str | None = declare(
        None, "--api-key", "the server's --api-key", metavar="KEY",
        shown_default="$CANOPY_API_KEY",
    )  # fmt: skip

    @property
    def key(self) -> str | None:
        return self.api_key or os.environ.get("CANOPY_API_KEY")
