"""How a scheduler process shows the HTTP process what it counts: one small file a rank.

The HTTP process makes a private folder and names it in the environment, which its children
inherit; each rank replaces its file whole, so that a reader sees one moment or another, never
half of one. Reading does not disturb the scheduler, also while it is busy for seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path
from typing import Any

from sglang_canopy.private_file import replace_file

FOLDER_VARIABLE = "CANOPY_STATUS_DIR"
MAX_FILE_BYTES = 1 << 20

_PREFIX = "canopy-status-"
_STALE_S = 60.0
"""A server that reports touches its folder every second."""


def make_folder() -> tempfile.TemporaryDirectory[str]:
    """Make the folder (mode 0700) and name it to child processes. It goes with its owner.

    SGLang may end its own process with SIGKILL: what such a server left is removed by the next.
    """
    _remove_left_behind()
    folder = tempfile.TemporaryDirectory(
        prefix=f"{_PREFIX}{os.getpid()}-", ignore_cleanup_errors=True
    )
    os.environ[FOLDER_VARIABLE] = folder.name
    return folder


RANKS, OBSERVED, DOCUMENTS, ANSWER = "rank", "observed", "documents", "answer"
"""Kinds of files: of a rank with a tree of ours, of one that is only watched, of reused documents, and
(with a name that follows) what was asked for once."""


def write(rank: int, status: Any, peer: str = "", kind: str = RANKS) -> None:
    """Replace the file of data-parallel rank ``rank``. Without a folder nothing is done.

    ``peer``: which of its tensor- and pipeline-parallel ranks writes, if not the first. Raises ``OSError`` where the folder is gone or its disk is full.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return
    name = f"{kind}-{rank}.{peer}.json" if peer else f"{kind}-{rank}.json"
    replace_file(Path(folder) / name, json.dumps(status))


def read_all(kind: str = RANKS) -> list[dict[str, Any]]:
    """What every rank wrote last, in order of rank; empty where no rank counts.

    ``peers`` of each: what its other tensor- and pipeline-parallel ranks on this machine wrote.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return []
    found: dict[int, dict[str, Any]] = {}
    peers: dict[int, dict[str, dict[str, Any]]] = {}
    for path in Path(folder).glob(f"{kind}-*.json"):
        # A file may be replaced or go between two of these calls.
        with contextlib.suppress(OSError, ValueError):
            if path.stat().st_size > MAX_FILE_BYTES:
                continue
            rank, _, peer = path.stem.removeprefix(f"{kind}-").partition(".")
            status = json.loads(path.read_text("utf-8"))
            if peer:
                peers.setdefault(int(rank), {})[peer] = status
            else:
                found[int(rank)] = status
    for number, status in found.items():
        others = sorted(peers.get(number, {}).items())
        status["peers"] = [{"peer": name, **of} for name, of in others]
    return [found[number] for number in sorted(found)]


def take(name: str) -> list[Any]:
    """The answers that were left under ``name``, in order of rank. They are removed."""
    folder = os.environ.get(FOLDER_VARIABLE)
    found = []
    for path in sorted(Path(folder).glob(f"{ANSWER}{name}-*.json")) if folder else ():
        with contextlib.suppress(OSError, ValueError):
            if path.stat().st_size <= MAX_FILE_BYTES:
                found.append(json.loads(path.read_text("utf-8")))
        with contextlib.suppress(OSError):
            path.unlink()
    return found


def _remove_left_behind() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        with contextlib.suppress(OSError, ValueError):
            owner = int(path.name.removeprefix(_PREFIX).partition("-")[0])
            status = path.lstat()
            ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if ours and time.time() - status.st_mtime > _STALE_S and not _alive(owner):
                shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
