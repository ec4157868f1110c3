"""Build the wheel and the source distribution, and check their contents.

    python scripts/build.py --out dist
    python scripts/build.py --expect 0.1.0    # only: is this the version?

Needs setuptools 77 or newer and no network. The version has one place,
``python/sglang_canopy/__init__.py``; ``CITATION.cff`` and the changelog are held against it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "sglang_canopy": ROOT / "python",
    "canopy_lab": ROOT / "python",
    "canopy_chunks": ROOT / "python",
    "canopy_kernel": ROOT / "sgl-kernel" / "python",
}
MAX_BYTES = 2_000_000
"""Largest size of the wheel and of the source distribution."""
_BESIDE = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff")
"""Other files of a source distribution than the packages."""
_DATA = (".py", ".json", ".j2", ".typed", ".html", ".js", ".css", ".LICENSE")


def version() -> str:
    """The version, read without importing the package."""
    text = (PACKAGES["sglang_canopy"] / "sglang_canopy" / "__init__.py").read_text("utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.M)
    assert found, "no __version__ in sglang_canopy/__init__.py"
    return found[1]


def files() -> set[str]:
    """Return the paths of the packages' files in the wheel."""
    return {
        path.relative_to(folder).as_posix()
        for name, folder in PACKAGES.items()
        for path in (folder / name).rglob("*")
        if path.is_file() and path.suffix in _DATA and "__pycache__" not in path.parts
    }


def disagreements() -> list[str]:
    """Return the files with another version than the package."""
    found, now = [], version()
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.M)
    if cited is None or cited[1] != now:
        found.append(f"CITATION.cff says {cited and cited[1]}, the package {now}")
    if f"## [{now}]" not in (ROOT / "CHANGELOG.md").read_text("utf-8"):
        found.append(f"CHANGELOG.md has no section [{now}]")
    return found


def build(out: Path) -> tuple[Path, Path]:
    """(wheel, source distribution) in ``out``, built from a clean copy of the tree."""
    from setuptools import build_meta

    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="canopy-build-") as scratch:
        tree = Path(scratch) / "tree"
        # Setuptools writes build/ and *.egg-info into its working directory.
        tree.mkdir()
        for name in _BESIDE:
            shutil.copy2(ROOT / name, tree / name)
        skip = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
        for folder in ("python", "sgl-kernel/python"):
            shutil.copytree(ROOT / folder, tree / folder, ignore=skip)
        os.chdir(tree)
        try:
            source = out / build_meta.build_sdist(str(out))
            wheel = out / build_meta.build_wheel(str(out))
        finally:
            os.chdir(before)
    return wheel, source


def check(wheel: Path) -> list[str]:
    """Return the faults of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    found = [f"the wheel lacks {name}" for name in sorted(files() - held)]
    found += [f"the wheel holds {name}, which is no part of it" for name in sorted(held - files())]
    if wheel.stat().st_size > MAX_BYTES:
        found.append(f"the wheel has {wheel.stat().st_size:,} bytes, more than {MAX_BYTES:,}")
    return found


def check_source(source: Path) -> list[str]:
    """Return the faults of a source distribution: missing files, and files beyond those of a wheel."""
    with tarfile.open(source) as archive:
        held = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    # Setuptools writes these files.
    held = {n for n in held if ".egg-info/" not in n and n not in ("PKG-INFO", "setup.cfg")}
    wanted = set(_BESIDE)
    for name, folder in PACKAGES.items():
        prefix = folder.relative_to(ROOT).as_posix()
        wanted |= {f"{prefix}/{path}" for path in files() if path.startswith(f"{name}/")}
    found = [f"the source distribution lacks {name}" for name in sorted(wanted - held)]
    found += [f"the source distribution holds {name}" for name in sorted(held - wanted)]
    if source.stat().st_size > MAX_BYTES:
        found.append(f"it has {source.stat().st_size:,} bytes, more than {MAX_BYTES:,}")
    return found


def main() -> int:
    """Build and check, or only compare the version. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder (default dist)")
    parser.add_argument("--expect", metavar="VERSION", help="stop unless this is the version")
    args = parser.parse_args()
    wrong = disagreements()
    if args.expect is not None:
        if args.expect != version():
            wrong.append(f"the package has version {version()}, not {args.expect}")
    elif not wrong:
        wheel, source = build(args.out)
        wrong = check(wheel) + check_source(source)
        for path in (wheel, source):
            print(f"{path}: {path.stat().st_size:,} bytes")
    for line in wrong:
        print(f"canopy: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
