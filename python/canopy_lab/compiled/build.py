"""Compile the simulator with mypyc, once for these sources."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from canopy_lab.compiled.modules import (
    GROUP,
    MODULES,
    PACKAGES,
    SHARED,
    SOURCES,
    folder,
    home,
    source_of,
)
from sglang_canopy.errors import CanopyError

NEEDS = ("mypy", "mypyc", "setuptools")
_BUILD = f"""
import sys
from mypyc.build import mypycify
from setuptools import setup
setup(
    name={GROUP!r},
    packages=[],
    ext_modules=mypycify(["--config-file", "mypy.ini", *sys.argv[1:]], group_name={GROUP!r}),
    script_args=["build_ext", "--inplace"],
)
"""
_MYPY = """[mypy]
ignore_missing_imports = true
[mypy-sglang.*,torch.*,transformers.*]
follow_imports = skip
"""
_SHOWN = 2000
"""Last characters of a compiler's output in an error."""


def build() -> tuple[Path, bool]:
    """Compile ``MODULES``; the folder, and whether that was needed. Raises ``CanopyError``."""
    into = folder()
    if into.is_dir():
        return into, False
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise CanopyError(
            f"compiling needs {', '.join(missing)}: pip install 'sglang-canopy[compile]' (and a C "
            "compiler)"
        )
    home().mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=home()) as scratch:
        made = _compiled(Path(scratch))
        try:
            os.rename(made, into)
        except OSError:
            if not into.is_dir():  # else another process was faster
                raise
    return into, True


def remove() -> int:
    """Delete all that was compiled, of other versions too; how many."""
    found = [path for path in home().glob("*") if path.is_dir()]
    for path in found:
        shutil.rmtree(path)
    return len(found)


def _compiled(scratch: Path) -> Path:
    """The compiled modules in a folder below ``scratch``, each named by its module."""
    for package in PACKAGES:
        shutil.copytree(
            SOURCES / package,
            scratch / package,
            ignore=lambda _, names: [n for n in names if _skip(n)],
        )
    (scratch / "build.py").write_text(_BUILD)
    (scratch / "mypy.ini").write_text(_MYPY)
    sources = [str(source_of(name).relative_to(SOURCES)) for name in MODULES]
    done = subprocess.run(
        [sys.executable, "build.py", *sources],
        cwd=scratch,
        env={**os.environ, "PYTHONPATH": str(scratch), "MYPYPATH": "", "PYTHONSAFEPATH": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise CanopyError(
            "the simulator was not compiled, and runs as Python; a C compiler is needed "
            f"(apt install gcc python3-dev). The end of its output:\n{done.stdout[-_SHOWN:]}"
        )
    made, suffix = scratch / "made", EXTENSION_SUFFIXES[0]
    made.mkdir(mode=0o700)
    for name in (*MODULES, SHARED):
        (scratch / Path(*name.split("."))).with_name(name.split(".")[-1] + suffix).rename(
            made / f"{name}{suffix}"
        )
    return made


def _skip(name: str) -> bool:
    """What a compilation does not read."""
    return name == "__pycache__" or ("." in name and not name.endswith((".py", ".typed")))
