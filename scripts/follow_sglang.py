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
MAX_SHOWN_FUNCTIONS = 4
ARGUMENT_FOLDER = "sglang/srt/arg_groups/fields/"


@dataclass(slots=True)
class ReleaseDifferences:
    """Differences of a release, as ``FILE: NAME``."""

    release: str
    functions_known: int
    changed: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    meanings: dict[str, str] = field(default_factory=dict)
    """Function -> ``nothing`` or ``signature``; the others are to be read."""
    arguments: list[str] = field(default_factory=list)
    """Arguments of the server that ``storage/server_arguments.py`` does not list."""

    def summary(self) -> str:
        """Return the differences in one line."""
        release_text = f"sglang {self.release}, pinned {SGLANG_VERSION}: "
        places = [*self.removed, *self.changed]
        new = f"; arguments to review: {', '.join(self.arguments)}" if self.arguments else ""
        if not places:
            return f"{release_text}none of {self.functions_known} functions moved{new}"
        files = sorted({place.partition(":")[0] for place in places})
        names = [place.partition(": ")[2] for place in places]
        others = len(names) - MAX_SHOWN_FUNCTIONS
        more = f" and {others} more" if others > 0 else ""
        return (
            f"{release_text}{len(self.changed)} of {self.functions_known} functions changed and {len(self.removed)} are "
            f"gone, in {len(files)} files: {', '.join(names[:MAX_SHOWN_FUNCTIONS])}{more}{new}"
        )


def compare_wheel(wheel: Path) -> ReleaseDifferences:
    """Compare a wheel of SGLang with the table. Raises ``NoRelease`` if it is not a wheel."""
    table = digests.read_table()
    wheel_name = re.fullmatch(r"sglang-([^-]+)-.*\.whl", wheel.name)
    if wheel_name is None:
        raise NoRelease(f"{wheel} is no wheel of sglang")
    diff = ReleaseDifferences(wheel_name[1], sum(len(entry["names"]) for entry in table.values()))
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive_names = set(archive.namelist())
            for file, entry in table.items():
                path = f"sglang/{file}"
                tree = ast.parse(archive.read(path) if path in archive_names else "")
                for function, digest in entry["names"].items():
                    found = digests.digest_of(tree, function)
                    if found is None:
                        diff.removed.append(f"{file}: {function}")
                    elif found != digest:
                        diff.changed.append(f"{file}: {function}")
                        if found[: digests.SIGNATURE_DIGITS] != digest[: digests.SIGNATURE_DIGITS]:
                            diff.meanings[function] = "signature"
                        elif function in entry["hooked"]:
                            diff.meanings[function] = "nothing"  # it is still there to be hooked
            diff.arguments = sorted(unreviewed_arguments(_server_arguments(archive)))
    except (OSError, zipfile.BadZipFile, SyntaxError) as error:
        raise NoRelease(f"{wheel} cannot be read: {error}") from None
    return diff


def _server_arguments(archive: zipfile.ZipFile) -> set[str]:
    """The fields of ``ServerArgs``: annotated names of the classes in ``arg_groups/fields``."""
    names = set()
    for path in archive.namelist():
        if path.startswith(ARGUMENT_FOLDER) and path.endswith(".py"):
            classes = (n for n in ast.parse(archive.read(path)).body if isinstance(n, ast.ClassDef))
            for node in (member for cls in classes for member in cls.body):
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    names.add(node.target.id)
    return names


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--release", metavar="X.Y.Z", help="this release, not the newest")
    choice.add_argument("--wheel", type=Path, metavar="FILE", help="a wheel that is here already")
    parser.add_argument("--list", action="store_true", help="every function that moved, in a table")
    parser.add_argument(
        "--try", action="store_true", dest="run", help="the table, then light tests on the release"
    )
    arguments = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as folder:
            wheel = arguments.wheel or download(arguments.release, Path(folder))
            diff = compare_wheel(wheel)
            print(diff.summary(), flush=True)
            differs = bool(diff.changed or diff.removed or diff.arguments)
            if differs and (arguments.list or arguments.run):
                print(difference_table(diff), flush=True)
            if arguments.run:
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(Path(folder) / "release")
                return run_tests(Path(folder) / "release")
    except NoRelease as error:
        print(error, file=sys.stderr)
        return 2
    return int(differs)


def difference_table(diff: ReleaseDifferences) -> str:
    """Return a row for each function that moved: how, where, and which of our files name it."""
    rows = []
    for how, places in (("gone", diff.removed), ("changed", diff.changed)):
        for place in places:
            file, _, function = place.partition(": ")
            meaning = diff.meanings.get(function, "to read") if how == "changed" else "signature"
            rows.append([how, meaning, function, file, ", ".join(_files_naming(function)) or "-"])
    argument_file = "the server's arguments"
    rows += [["new", "to read", name, argument_file, "-"] for name in diff.arguments]
    return text_table(("how", "for us", "function", "in SGLang", "in Canopy"), rows)


def _files_naming(function: str) -> list[str]:
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
