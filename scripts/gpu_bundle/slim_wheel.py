"""Remove files that a text server does not load from a wheel: slim_wheel.py WHEEL FOLDER."""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

DROPPED = re.compile(
    r"^sglang/(multimodal_gen/|test/|benchmark/(?!.*serving)|kernels/jit/benchmark/"
    r"|srt/rust_extensions/.*\.so$|srt/mem_cache/rust_tree_core/.*\.so$)"
)
"""Parts of SGLang 0.5.23: image generation, tests, benchmarks and Rust extensions. The Rust tree core
misreads the types of torch 2.11; the Python core replaces it."""


def slim(wheel: Path, folder: Path) -> Path:
    """``wheel`` without :data:`DROPPED`, under the same name in ``folder``, its list of files made anew."""
    folder.mkdir(parents=True, exist_ok=True)
    slim_path = folder / wheel.name
    with (
        zipfile.ZipFile(wheel) as old,
        zipfile.ZipFile(slim_path, "w", zipfile.ZIP_DEFLATED, True, 9) as new,
    ):
        record = ""
        for item in old.infolist():
            if item.filename.endswith(".dist-info/RECORD"):
                record = item.filename
            elif not DROPPED.match(item.filename):
                new.writestr(item.filename, old.read(item))
        if not record:
            raise SystemExit(f"{wheel} has no list of its files (.dist-info/RECORD): not a wheel")
        names = [f'"{n}"' if "," in n else n for n in [*new.namelist(), record]]
        new.writestr(record, "".join(f"{name},,\n" for name in names))
    return slim_path


if __name__ == "__main__":
    print(slim(Path(sys.argv[1]), Path(sys.argv[2])))
