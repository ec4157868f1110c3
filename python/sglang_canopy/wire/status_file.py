"""Counters from scheduler processes to the HTTP process: one small file per rank.

The HTTP process creates a private folder and puts its path into the environment, which child processes
inherit. Each rank replaces its file atomically, so readers never get a partial file. Reading does not
disturb a scheduler, and works while it is busy.
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

from sglang_canopy.private_file import read_regular, replace_file

FOLDER_VARIABLE = "CANOPY_STATUS_DIR"
MAX_FILE_BYTES = 1 << 20

_PREFIX = "canopy-status-"
_ABANDONED_S = 60.0
"""Age of an abandoned folder, in seconds; a live server touches its folder every second."""


def make_folder() -> tempfile.TemporaryDirectory[str]:
    """Create the folder (mode 0700), and put its path into the environment of child processes. The
    owner deletes it on exit. After SIGKILL, which SGLang may send to its own process, the next server
    removes it."""
    _remove_abandoned()
    folder = tempfile.TemporaryDirectory(
        prefix=f"{_PREFIX}{os.getpid()}-", ignore_cleanup_errors=True
    )
    os.environ[FOLDER_VARIABLE] = folder.name
    return folder


RANKS, OBSERVED, ANSWER = "rank", "observed", "answer"
"""Kinds of files: a rank with Canopy's tree, an observed rank, a single answer."""
ADDED_KINDS: list[str] = []
"""Kinds that other plugins add to the answer of ``/canopy/status``."""


def write_status(rank: int, status: Any, peer: str = "", kind: str = RANKS) -> None:
    """Replace the file of data-parallel rank ``rank``, if there is a folder. ``peer``: the writing
    tensor- and pipeline-parallel rank, unless it is the first. Raises ``OSError`` if the folder was
    removed or the disk is full."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return
    name = f"{kind}-{rank}.{peer}.json" if peer else f"{kind}-{rank}.json"
    replace_file(Path(folder) / name, json.dumps(status))


def read_all(kind: str = RANKS) -> list[dict[str, Any]]:
    """Return the latest status of every data-parallel rank, in order of rank; empty without any.
    ``peers`` of a status: statuses of its other tensor- and pipeline-parallel ranks on this machine."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return []
    status_by_rank: dict[int, dict[str, Any]] = {}
    peers: dict[int, dict[str, dict[str, Any]]] = {}
    for path in Path(folder).glob(f"{kind}-*.json"):
        # A file may be replaced or removed between these calls.
        with contextlib.suppress(OSError, ValueError):
            status = _read_json(path)
            rank, _, peer = path.stem.removeprefix(f"{kind}-").partition(".")
            if peer:
                peers.setdefault(int(rank), {})[peer] = status
            else:
                status_by_rank[int(rank)] = status
    for rank_number, status in status_by_rank.items():
        peer_statuses = sorted(peers.get(rank_number, {}).items())
        status["peers"] = [{"peer": name, **peer_status} for name, peer_status in peer_statuses]
    return [status for _, status in sorted(status_by_rank.items())]


def _read_json(path: Path) -> Any:
    """Return a file's JSON. Raises ``ValueError`` for invalid JSON or a file that is too large."""
    text = read_regular(path, MAX_FILE_BYTES)
    if len(text) > MAX_FILE_BYTES:
        raise ValueError(f"{path.name} has more than {MAX_FILE_BYTES} bytes")
    return json.loads(text)


def take_answers(name: str) -> list[Any]:
    """Return and remove the answers under ``name``, in order of rank."""
    folder = os.environ.get(FOLDER_VARIABLE)
    answers = []
    for path in sorted(Path(folder).glob(f"{ANSWER}{name}-*.json")) if folder else ():
        with contextlib.suppress(OSError, ValueError):
            answers.append(_read_json(path))
        with contextlib.suppress(OSError):
            path.unlink()
    return answers


def _remove_abandoned() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        with contextlib.suppress(OSError, ValueError):
            owner_pid = int(path.name.removeprefix(_PREFIX).partition("-")[0])
            status = path.lstat()
            is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            is_abandoned = time.time() - status.st_mtime > _ABANDONED_S and not _is_alive(owner_pid)
            if is_ours and is_abandoned:
                shutil.rmtree(path, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
