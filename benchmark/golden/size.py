"""Size of the project, and the part that a reader meets: the table before and after.

    python benchmark/golden/size.py                     # measure, and print beside before.json
    python benchmark/golden/size.py --write before.json # measure, and write it beside this file

Lines are those of Python files, blank ones and comments included. A request is traced by hand into
the tree and through a whole server (trace_request.py). What a server imports is counted twice: the
modules that it can reach from its entry point, documents left out, and those that are loaded after
one chat without documents.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import code_size
import import_closure
from paths import HERE, ON_A_CPU, use_checkout
from trace_request import WAYS

BEFORE = HERE / "before.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", metavar="NAME", help="write the result as NAME, in this folder")
    args = parser.parse_args()
    use_checkout()
    now = measured()
    if args.write:
        (HERE / args.write).write_text(json.dumps(now, indent=1) + "\n")
    before = json.loads(BEFORE.read_text()) if BEFORE.exists() else now
    print(table(before, now))


def measured() -> dict[str, Any]:
    """Everything."""
    facts = json.loads(output("server_facts.py").strip().split("\n")[-1])
    reached = import_closure.closure()
    known = import_closure.modules()
    reached = {m for m in reached if not any(f in known[m].parents for f in ON_A_CPU)}
    return {
        "lines_by_package": code_size.lines_by_package(),
        "lines_by_room": code_size.lines_by_room(),
        "lines_beside": code_size.other_lines(),
        "server_options": {
            "count": len(facts["options"]),
            "shown": sum(facts["options"].values()),
            "names": list(facts["options"]),
        },
        "subcommands": subcommands(),
        "words": code_size.words(),
        "prose": prose(),
        "functions": code_size.functions(),
        "request": {way: traced(way) for way in WAYS},
        "server_imports": {
            "reachable_modules": len(reached),
            "reachable_lines": import_closure.lines(reached),
            "loaded_modules": len(facts["modules"]),
            "loaded_lines": sum(facts["modules"].values()),
            "of_documents": [m for m in facts["modules"] if import_closure.DOCUMENTS.match(m)],
            "of_the_laboratory": sorted(
                m for m in reached | set(facts["modules"]) if import_closure.LABORATORY.match(m)
            ),
        },
    }


def prose() -> dict[str, Any]:
    """Return docstrings and comments, and the percentage with a habit (scripts/words.py), by room."""
    from words import percent, python_files, rooms

    found = rooms(python_files())
    found["all"] = [text for texts in found.values() for text in texts]
    return {
        room: {"texts": len(texts), "percent": round(percent(texts), 1)}
        for room, texts in found.items()
    }


def subcommands() -> dict[str, Any]:
    """Return the subcommands of ``canopy``."""
    from canopy_lab.cli.main import COMMANDS

    names = sorted({name.split()[0] for name in COMMANDS})
    return {"count": len(names), "names": names}


def traced(way: str) -> dict[str, int]:
    """Files, functions and calls of one request."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "trace.json"
        output("trace_request.py", "--way", way, "--json", str(out))
        found = json.loads(out.read_text())
    return {key: found[key] for key in ("files", "functions", "calls")}


def output(script: str, *arguments: str) -> str:
    """Run a script of this folder as a process and return its output."""
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{script} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def table(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Return a Markdown table: before and now."""
    rows = []
    names = [*before["lines_by_package"], *now["lines_by_package"]]
    for name in dict.fromkeys(names):
        rows.append((f"lines of `{name}`", ("lines_by_package", name)))
    rows += [(f"lines of `{name}/`", ("lines_beside", name)) for name in now["lines_beside"]]
    rows += [
        ("server options", ("server_options", "count")),
        ("of them in `--help`", ("server_options", "shown")),
        ("subcommands", ("subcommands", "count")),
        ("words of `docs/`", ("words", "docs")),
        ("words of `README.md`", ("words", "README.md")),
        ("largest function, lines", ("functions", "largest_lines")),
        ("functions, 95th percentile", ("functions", "p95_lines")),
        ("functions, median", ("functions", "median_lines")),
        ("a request into the tree, files", ("request", "tree", "files")),
        ("a request into the tree, calls", ("request", "tree", "calls")),
        ("a request through a server, files", ("request", "server", "files")),
        ("a request through a server, calls", ("request", "server", "calls")),
        ("lines a server can import without documents", ("server_imports", "reachable_lines")),
        ("lines loaded when it serves", ("server_imports", "loaded_lines")),
    ]
    total = [sum(each["lines_by_package"].values()) for each in (before, now)]
    lines = ["| what | before | now |", "|---|---:|---:|"]
    lines.append(f"| lines of all packages | {total[0]:,} | {total[1]:,} |")
    lines += [f"| {what} | {cell(before, keys)} | {cell(now, keys)} |" for what, keys in rows]
    return "\n".join(lines)


def cell(values: dict[str, Any], keys: tuple[str, ...]) -> str:
    """Return the figure at ``keys``, or a dash."""
    found: Any = values
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return f"{found:,}" if isinstance(found, int) else "-"


if __name__ == "__main__":
    main()
