"""Write the numbers of result files into the pages that show them.

    python scripts/result_pages.py            # rewrite the pages that are stale
    python scripts/result_pages.py --check    # name them and exit with 1

``<!-- results: FILE NAME -->...<!-- end -->`` in a page is what ``PARTS[NAME]`` of
``benchmark/FILE``, a Python file, returns, or section NAME of a Markdown file with values of the Python
file beside it. They read the JSON that the benchmarks wrote: a page can neither differ from it nor go
stale unnoticed.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from result_tables import Template

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmark" / "papers"))
BLOCK = re.compile(r"(<!-- results: (\S+) (\S+) -->)(.*?)(<!-- end -->)", re.S)


@functools.cache
def parts(file: str) -> dict[str, Callable[[], str]]:
    """Return the functions of ``benchmark/FILE`` that render parts of pages."""
    if file.endswith(".md"):
        path = ROOT / "benchmark" / file
        return Template(path, module(file.removesuffix("md") + "py")).parts()
    made: dict[str, Callable[[], str]] = module(file).PARTS
    return made


@functools.cache
def module(file: str) -> Any:
    """Import ``benchmark/FILE``."""
    spec = importlib.util.spec_from_file_location(f"results of {file}", ROOT / "benchmark" / file)
    if spec is None or spec.loader is None:
        raise ImportError(f"benchmark/{file} is no Python file")
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


def render(page: str) -> str:
    """``page`` with every part as the result files have it."""

    def part(match: re.Match[str]) -> str:
        start, file, name, text, end = match.groups()
        space = "\n\n" if text.startswith("\n") else ""
        return f"{start}{space}{parts(file)[name]()}{space}{end}"

    return BLOCK.sub(part, page)


def pages() -> list[Path]:
    tables = (ROOT / "benchmark").glob("*/results/*.md")
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted(tables)]


def stale_pages() -> dict[Path, str]:
    """Pages that differ from their result files, with the text they should have."""
    texts = {path: path.read_text(encoding="utf-8") for path in pages()}
    return {path: new for path, text in texts.items() if (new := render(text)) != text}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if stale")
    check = parser.parse_args().check
    stale = stale_pages()
    for path, text in stale.items():
        print(f"{'stale' if check else 'written'}: {path.relative_to(ROOT)}")
        if not check:
            path.write_text(text, encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
