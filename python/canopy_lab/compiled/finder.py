"""Take compiled modules instead of the Python files, in a process that simulates."""

from __future__ import annotations

import importlib.util
import os
import stat
import sys
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from pathlib import Path
from types import ModuleType

from canopy_lab.compiled.modules import MODULES, SHARED, folder

SWITCH = "CANOPY_COMPILED"
"""Environment: ``off`` simulates with the Python files."""


def use() -> bool:
    """From now on, import ``MODULES`` as compiled; whether that is so.

    Not where nothing was compiled of these very sources, where others could have written it, where
    ``CANOPY_COMPILED=off``, or where one of the modules has been imported already: the two never mix.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return True
    if os.environ.get(SWITCH, "").lower() == "off" or any(name in sys.modules for name in MODULES):
        return False
    compiled = folder()
    if not is_own(compiled):
        return False
    found = {name: compiled / f"{name}{EXTENSION_SUFFIXES[0]}" for name in (*MODULES, SHARED)}
    if not all(path.is_file() for path in found.values()):
        return False
    sys.meta_path.insert(0, _Finder(found))
    return True


def is_own(path: Path) -> bool:
    """Whether ``path`` is a folder of this user's, to which nobody else may write."""
    try:
        state = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid() and not state.st_mode & 0o022


class _Finder:
    def __init__(self, found: dict[str, Path]) -> None:
        self._found = found

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        at = self._found.get(name)
        return None if at is None else importlib.util.spec_from_file_location(name, at)
