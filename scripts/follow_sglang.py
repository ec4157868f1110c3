"""Print in one line which functions differ between the pinned SGLang and another release.

    python scripts/follow_sglang.py                 # the newest on the package index
    python scripts/follow_sglang.py --release 0.5.22
    python scripts/follow_sglang.py --wheel FILE    # a local wheel
    python scripts/follow_sglang.py --list          # and a table of functions and the files that use them
    python scripts/follow_sglang.py --try           # the table, then the caches' suites and two servers

The default is the newest release. Only the wheel is downloaded, into a temporary folder, and its code
is not run. The functions that Canopy hooks, overrides or relies on (``sglang_digests.json``) are
compared by their syntax trees; ``--list`` says of each what it means for us. New arguments of the server are listed, since they may change KV.
Exit status 0: no function differs; 1: some differ; 2: the release is not available. With ``--try``:
pytest's. The release lies over the installed one, with its packages.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import digests
from canopy_lab.report.table import text_table
from overlay import NoRelease, download, run_tests
from sglang_canopy import SGLANG_VERSION
from sglang_canopy.storage.server_arguments import unreviewed_arguments

ROOT = Path(__file__).resolve().parent.parent
SHOWN = 4
FIELDS = "sglang/srt/arg_groups/fields/"


@dataclass(slots=True)
class Moved:
    """Differences of a release, as ``FILE: NAME``."""

    release: str
    functions_known: int
    changed: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    meaning: dict[str, str] = field(default_factory=dict)
    """Function -> ``nothing`` or ``signature``; the others are to be read."""
    arguments: list[str] = field(default_factory=list)
    """Arguments of the server that ``storage/server_arguments.py`` does not list."""

    def line(self) -> str:
        """All of it in one line."""
        head = f"sglang {self.release}, pinned {SGLANG_VERSION}: "
        differ = [*self.removed, *self.changed]
        new = f"; arguments to review: {', '.join(self.arguments)}" if self.arguments else ""
        if not differ:
            return f"{head}none of {self.functions_known} functions moved{new}"
        files = sorted({place.partition(":")[0] for place in differ})
        names = [place.partition(": ")[2] for place in differ]
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        return (
            f"{head}{len(self.changed)} of {self.functions_known} functions changed and {len(self.removed)} are "
            f"gone, in {len(files)} files: {', '.join(names[:SHOWN])}{more}{new}"
        )


def compare_wheel(wheel: Path) -> Moved:
    """Compare a wheel of SGLang with the table. Raises ``NoRelease`` if it is not a wheel."""
    table = digests.read_table()
    name = re.fullmatch(r"sglang-([^-]+)-.*\.whl", wheel.name)
    if name is None:
        raise NoRelease(f"{wheel} is no wheel of sglang")
    result = Moved(name[1], sum(len(entry["names"]) for entry in table.values()))
    try:
        with zipfile.ZipFile(wheel) as archive:
            inside = set(archive.namelist())
            for file, entry in table.items():
                path = f"sglang/{file}"
                tree = ast.parse(archive.read(path) if path in inside else "")
                for function, digest in entry["names"].items():
                    present = digests.digest_of(tree, function)
                    if present is None:
                        result.removed.append(f"{file}: {function}")
                    elif present != digest:
                        result.changed.append(f"{file}: {function}")
                        if present[: digests.SIGNATURE] != digest[: digests.SIGNATURE]:
                            result.meaning[function] = "signature"
                        elif function in entry["hooked"]:
                            result.meaning[function] = "nothing"  # SGLang still has it to be hooked
            result.arguments = sorted(unreviewed_arguments(_server_arguments(archive)))
    except (OSError, zipfile.BadZipFile, SyntaxError) as error:
        raise NoRelease(f"{wheel} cannot be read: {error}") from None
    return result


def _server_arguments(archive: zipfile.ZipFile) -> set[str]:
    """The fields of ``ServerArgs``: annotated names of the classes in ``arg_groups/fields``."""
    names = set()
    for path in archive.namelist():
        if path.startswith(FIELDS) and path.endswith(".py"):
            classes = (n for n in ast.parse(archive.read(path)).body if isinstance(n, ast.ClassDef))
            for node in (member for one in classes for member in one.body):
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    names.add(node.target.id)
    return names


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--release", metavar="X.Y.Z", help="this release, not the newest")
    source.add_argument("--wheel", type=Path, metavar="FILE", help="a wheel that is here already")
    parser.add_argument("--list", action="store_true", help="every function that moved, in a table")
    parser.add_argument(
        "--try", action="store_true", dest="run", help="the table, then light tests on the release"
    )
    arguments = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as folder:
            wheel = arguments.wheel or download(arguments.release, Path(folder))
            result = compare_wheel(wheel)
            print(result.line(), flush=True)
            differs = bool(result.changed or result.removed or result.arguments)
            if differs and (arguments.list or arguments.run):
                print(table(result), flush=True)
            if arguments.run:
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(Path(folder) / "release")
                return run_tests(Path(folder) / "release")
    except NoRelease as error:
        print(error, file=sys.stderr)
        return 2
    return int(differs)


def table(result: Moved) -> str:
    """A row for each function that moved: how, where, and which of our files name it."""
    rows = []
    for how, each in (("gone", result.removed), ("changed", result.changed)):
        for place in each:
            file, _, function = place.partition(": ")
            meaning = result.meaning.get(function, "to read") if how == "changed" else "signature"
            rows.append([how, meaning, function, file, ", ".join(_standing_on(function)) or "-"])
    new = "the server's arguments"
    rows += [["new", "to read", name, new, "-"] for name in result.arguments]
    return text_table(("how", "for us", "function", "in SGLang", "in Canopy"), rows)


def _standing_on(function: str) -> list[str]:
    """Return our files that name a function and its class; if no file has both, files that name it."""
    parts = {part for part in function.split(".") if not part.startswith("__")}
    named = [path for path, words in _our_sources() if parts <= words]
    name = function.rpartition(".")[2]
    return named or [path for path, words in _our_sources() if name in words]


@functools.cache
def _our_sources() -> list[tuple[str, frozenset[str]]]:
    """Our files as ``FOLDER/FILE``, and the words in each."""
    files = [*(ROOT / "python").rglob("*.py"), *(ROOT / "sgl-kernel" / "cpu").rglob("*.py")]
    words = re.compile(r"\w+")
    return sorted(
        ("/".join(path.parts[-2:]), frozenset(words.findall(path.read_text("utf-8"))))
        for path in files
    )


if __name__ == "__main__":
    sys.exit(main())
