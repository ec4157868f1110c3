"""Options shared by several commands, each declared once."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canopy_lab.trace.guess import guess_format
from canopy_lab.trace.lines import existing
from canopy_lab.trace.open import format_names
from sglang_canopy.declared import declare

AUTO = "auto"
LOG_HELP = "the log: a file, several, or a folder of them; may be compressed (.gz, .xz, .zst)"
PROFILE_HELP = "costs of the engine: a file, or the name of a shipped profile"


def one_log(paths: list[str]) -> str:
    """Return the path of one log: the only one, or a folder of links to several, for this process."""
    if len(paths) == 1:
        return paths[0]
    parent = tempfile.mkdtemp(prefix="canopy-")
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    folder = Path(parent, f"{Path(paths[0]).name} and {len(paths) - 1} more")
    folder.mkdir()
    for at, path in enumerate(map(existing, paths)):
        (folder / f"{at:04d}.log.{path.name}").symlink_to(path.resolve())
    return str(folder)


def format_option() -> Any:
    """Return the field of ``--format``; ``format_of`` resolves its default."""
    return declare(
        AUTO, "--format", "format of the input; auto: what its first lines look like",
        choices=(AUTO, *format_names()),
    )  # fmt: skip


def skip_bad_option() -> Any:
    """Return the declaration of ``--skip-bad``."""
    return declare(0, "--skip-bad", "skip up to N broken lines", metavar="N", low=0)


def format_of(path: Path | str, format: str) -> str:
    """Return ``format``, or the format that fits the first lines of ``path`` if it is ``AUTO``."""
    return guess_format(path) if format == AUTO else format


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Options of commands that read a log."""

    log: str = declare(None, "LOG", LOG_HELP, join=one_log)
    format: str = format_option()
    skip_bad: int = skip_bad_option()


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """Options of commands that simulate a trace."""

    trace: str = declare(None, "TRACE", LOG_HELP, join=one_log)
    format: str = format_option()
    skip_bad: int = skip_bad_option()


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
