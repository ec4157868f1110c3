"""Options shared by several commands, each declared once."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from canopy_lab.trace.guess import guess_format
from canopy_lab.trace.lines import readable_path
from canopy_lab.trace.open import format_names, open_trace
from canopy_lab.trace.record import TraceRequest
from sglang_canopy import declared
from sglang_canopy.declared import declare

AUTO_FORMAT = "auto"
LOG_HELP = "the log: a file, several, or a folder of them; may be compressed (.gz, .xz, .zst)"
PROFILE_HELP = "costs of the engine: a file, or the name of a shipped profile"


def join_logs(paths: list[str]) -> str:
    """Return the path of one log: the only one, or a folder of links to several, for this process."""
    if len(paths) == 1:
        return paths[0]
    parent = tempfile.mkdtemp(prefix="canopy-")
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    folder = Path(parent, f"{Path(paths[0]).name} and {len(paths) - 1} more")
    folder.mkdir()
    for number, path in enumerate(map(readable_path, paths)):
        (folder / f"{number:04d}.log.{path.name}").symlink_to(path.resolve())
    return str(folder)


class Bar(tqdm):  # type: ignore[type-arg]
    """A progress bar whose length may be known later."""

    def show(self, stage: str, finished: int, total: int) -> None:
        self.total = total
        self.set_description(stage, refresh=False)
        self.update(finished - self.n)


@dataclass(frozen=True, slots=True)
class TraceOptions(declared.Checked):
    """Options of commands that read a trace or a log."""

    trace: str = declare(None, "TRACE", LOG_HELP, join=join_logs)
    format: str = declare(
        AUTO_FORMAT, "--format", "format of the input; auto: what its first lines look like",
        choices=(AUTO_FORMAT, *format_names()),
    )  # fmt: skip
    skip_bad: int = declare(0, "--skip-bad", "skip up to N broken lines", metavar="N", low=0)

    @property
    def detected_format(self) -> str:
        """``format``, or the format that fits the first lines if it is ``AUTO_FORMAT``."""
        return guess_format(self.trace) if self.format == AUTO_FORMAT else self.format

    def read(self) -> Iterator[TraceRequest]:
        return open_trace(self.trace, self.detected_format, skip_bad=self.skip_bad)


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """Options of commands that query a running server."""

    url: str = declare("http://127.0.0.1:30000", "--url", "the server", metavar="URL")
    api_key: str | None = declare(
        None, "--api-key", "the server's --api-key", metavar="KEY",
        shown_default="$CANOPY_API_KEY",
    )  # fmt: skip

    @property
    def key(self) -> str | None:
        return self.api_key or os.environ.get("CANOPY_API_KEY")
