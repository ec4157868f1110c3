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
        zipfile.ZipFile(wheel) as source,
        zipfile.ZipFile(slim_path, "w", zipfile.ZIP_DEFLATED, True, 9) as target,
    ):
        record_name = ""
        for file in source.infolist():
            if file.filename.endswith(".dist-info/RECORD"):
                record_name = file.filename
            elif not DROPPED.match(file.filename):
                target.writestr(file.filename, source.read(file))
        if not record_name:
            raise SystemExit(f"{wheel} has no list of its files (.dist-info/RECORD): not a wheel")
        csv_names = [f'"{n}"' if "," in n else n for n in [*target.namelist(), record_name]]
        target.writestr(record_name, "".join(f"{name},,\n" for name in csv_names))
    return slim_path


if __name__ == "__main__":
    print(slim(Path(sys.argv[1]), Path(sys.argv[2])))
