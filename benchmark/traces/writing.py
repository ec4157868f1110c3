"""Write a trace, compressed by its name."""

from __future__ import annotations

import contextlib
import gzip
import io
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from sglang_canopy.errors import CanopyError


@contextlib.contextmanager
def open_for_writing(path: Path) -> Iterator[IO[str]]:
    """A text stream into ``path``, compressed by its suffix. Raises ``CanopyError``."""
    try:
        if path.suffix == ".gz":
            # Not gzip.open: the header would carry the time, and equal traces differ in bytes.
            with (
                path.open("wb") as binary,
                gzip.GzipFile("", "wb", 6, binary, mtime=0) as compressed,
                io.TextIOWrapper(compressed, encoding="utf-8") as out,
            ):
                yield out
        elif path.suffix == ".xz":
            with lzma.open(path, "wt", preset=1, encoding="utf-8") as out:
                yield out
        elif path.suffix == ".zst":
            raise CanopyError(f"cannot write {str(path)!r}: write .jsonl, .jsonl.gz or .jsonl.xz")
        else:
            with path.open("w", encoding="utf-8") as out:
                yield out
    except OSError as error:
        raise CanopyError(f"cannot write {str(path)!r}: {error}") from None
